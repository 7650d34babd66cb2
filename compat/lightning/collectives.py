"""`TorchCollective`: An object interface to torch.distributed, with a separate process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["Collective", "SingleDeviceCollective", "TorchCollective"]

T = TypeVar("T")


class Collective:
    """Operations over ranks.

    Attributes:
        _group: The group that they are over; None before one is made.
    """

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return 1

    @property
    def group(self) -> ProcessGroup | None:
        """The group.

        Raises:
            RuntimeError: There is none.
        """
        if self._group is None:
            raise RuntimeError(f"{type(self).__name__} has no group; call create_group() first.")
        return self._group

    @classmethod
    def is_available(cls) -> bool:
        """Return whether the library is available."""
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        """Return whether processes are connected."""
        return True


class SingleDeviceCollective(Collective):
    """One process: every operation returns its input."""

    def __getattr__(self, name: str) -> Any:  # Any: an operation
        if name.startswith("_") or not hasattr(TorchCollective, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: args[0] if args else self


class TorchCollective(Collective):
    """The operations of torch.distributed; tensors are changed in place and returned."""

    def __init__(self) -> None:
        if not dist.is_available():
            raise RuntimeError("torch.distributed is not available")
        super().__init__()

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        """Number of processes in the group."""
        return dist.get_world_size(self._group)

    @property
    def group(self) -> ProcessGroup | None:
        """The group; the world by default."""
        return self._group if self._group is not None else dist.GroupMember.WORLD

    def setup(self, main_address: str | None = None, main_port: str | None = None, **kwargs: Any) -> Self:
        """Connect the processes, unless they are connected, and create a group of all ranks.

        Args:
            main_address: Address of rank 0; MASTER_ADDR by default.
            main_port: Port of rank 0; MASTER_PORT by default.
            kwargs: Further arguments of dist.init_process_group.
        """
        if not dist.is_initialized():
            for name, value in (("MASTER_ADDR", main_address), ("MASTER_PORT", main_port)):
                if value is not None:
                    os.environ[name] = str(value)
            dist.init_process_group(**kwargs)
        return self.create_group()

    def create_group(self, **kwargs: Any) -> Self:  # Any: as dist.new_group takes them
        """Create the group of the operations."""
        self._group = dist.new_group(**kwargs)
        return self

    def teardown(self) -> Self:
        """Destroy the group, and disconnect if no other group remains."""
        self.destroy_group(self.group)
        self._group = None
        return self

    @classmethod
    def is_available(cls) -> bool:
        """Return whether torch includes torch.distributed."""
        return dist.is_available()

    @classmethod
    def is_initialized(cls) -> bool:
        """Return whether processes are connected."""
        return dist.is_available() and dist.is_initialized()

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:  # Any: as dist.init_process_group takes them
        """Connect the processes."""
        dist.init_process_group(**kwargs)

    @classmethod
    def new_group(cls, **kwargs: Any) -> object:  # Any: as dist.new_group takes and gives
        """Return another group."""
        return dist.new_group(**kwargs)

    @classmethod
    def destroy_group(cls, group: object) -> None:
        """Destroy a group."""
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Broadcast a rank's tensor to all ranks."""
        dist.broadcast(tensor, src, group=self.group)
        return tensor

    def all_reduce(self, tensor: Tensor, op: object = "sum") -> Tensor:  # ReduceOp or its name
        """Reduce over ranks; all ranks get the result."""
        dist.all_reduce(tensor, _op(op), group=self.group)
        return tensor

    def reduce(self, tensor: Tensor, dst: int, op: object = "sum") -> Tensor:  # ReduceOp or its name
        """Reduce over ranks; rank `dst` gets the result."""
        dist.reduce(tensor, dst, _op(op), group=self.group)
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        """Gather the tensors of all ranks on all ranks."""
        dist.all_gather(tensor_list, tensor, group=self.group)
        return tensor_list

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        """Gather the tensors of all ranks on rank `dst`."""
        dist.gather(tensor, gather_list if self.rank == dst else None, dst, group=self.group)
        return gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        """Scatter the tensors of rank `src`'s list over the ranks."""
        dist.scatter(tensor, scatter_list if self.rank == src else None, src, group=self.group)
        return tensor

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: object = "sum") -> Tensor:
        """Reduce the ranks' lists elementwise, and scatter the results over the ranks."""
        dist.reduce_scatter(output, input_list, _op(op), group=self.group)
        return output

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        """Scatter the tensors of every rank's list over the ranks."""
        dist.all_to_all(output_tensor_list, input_tensor_list, group=self.group)
        return output_tensor_list

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send to a rank."""
        dist.send(tensor, dst, group=self.group, tag=tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        """Receive from a rank, or from any."""
        dist.recv(tensor, src, group=self.group, tag=tag)
        return tensor

    def all_gather_object(self, object_list: list[T], obj: T) -> list[T]:
        """Gather the objects of all ranks on all ranks."""
        dist.all_gather_object(object_list, obj, group=self.group)
        return object_list

    def broadcast_object_list(self, object_list: list[T], src: int, device: torch.device | None = None) -> list[T]:
        """Broadcast the objects of rank `src` to all ranks."""
        dist.broadcast_object_list(object_list, src, group=self.group, device=device)
        return object_list

    def gather_object(self, obj: T, object_gather_list: list[T], dst: int = 0) -> list[T]:
        """Gather the objects of all ranks on rank `dst`."""
        dist.gather_object(obj, object_gather_list if self.rank == dst else None, dst, group=self.group)
        return object_gather_list

    def scatter_object_list(self, scatter_object_output_list: list[T], scatter_object_input_list: list[T],
                            src: int = 0) -> list[T]:  # fmt: skip
        """Scatter the objects of rank `src`'s list over the ranks."""
        dist.scatter_object_list(scatter_object_output_list, scatter_object_input_list, src, group=self.group)
        return scatter_object_output_list

    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.group, device_ids=device_ids)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; an error lists missing ranks."""
        dist.monitored_barrier(group=self.group, timeout=timeout, wait_all_ranks=wait_all_ranks)


def _op(op: object) -> object:  # ReduceOp or its name
    if not isinstance(op, str):
        return op
    name = {"mean": "AVG"}.get(op.lower(), op.upper())
    if not hasattr(dist.ReduceOp, name):
        raise ValueError(f"op={op!r}, expected a name of torch.distributed.ReduceOp")
    return getattr(dist.ReduceOp, name)
