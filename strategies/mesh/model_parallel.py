"""`ModelParallelStrategy`: the user's own parallelization, by Lightning's arguments and names of mesh axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import ConfigError, ModuleError
from ..distributed.shards import is_sharded, local_slice
from ..parallel import DEFAULT_TIMEOUT
from ..sharded import ShardedStrategy
from .axes import REST, MeshAxes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh

    from ..fsdp.root import ShardedRoot

_TENSOR = "tensor_parallel"

# Any in this file: further arguments of FSDPStrategy.


class ModelParallelStrategy(ShardedStrategy):
    """A mesh with the axes "data_parallel" and "tensor_parallel", along which the module parallelizes itself.

    `configure_model` finds the mesh as `self.device_mesh` and applies torch's `parallelize_module` and `fully_shard`.
    With Fabric a function does it, `parallelize_fn`. Parameters that are left out of `fully_shard` are sharded over
    "data_parallel" too. To have layers split by a plan, use `MeshStrategy`.

    Args:
        data_parallel_size: Number of processes that read different data; "auto" is the number of nodes, or what the
            other size leaves.
        tensor_parallel_size: Number of processes that share the layers; "auto" is the number of processes of a node, or
            what the other size leaves.
        save_distributed_checkpoint: Whether all ranks write checkpoints, each its local shards, into a folder; else
            rank 0 writes one file. Both load everywhere.
        process_group_backend: "gloo", "nccl", ...; None is gloo on the CPU, nccl and gloo on CUDA devices.
        timeout: Time after which a rank that waits for another one fails: a timedelta or seconds. None is 30 minutes.
        parallelize_fn: Called with the module and the mesh when Fabric sets the module up; returns the module.
        arguments: Further arguments of FSDPStrategy.

    Raises:
        ConfigError: A size or another argument is unsupported; the message names it.
    """

    strategy_name = "model_parallel"
    axis_names = {"fsdp": "data_parallel", "tp": _TENSOR}
    traits = replace(ShardedStrategy.traits, copies_draw_alike=True)

    def __init__(
        self,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        *,
        parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
        **arguments: Any,
    ) -> None:
        sizes = {"data_parallel_size": data_parallel_size, "tensor_parallel_size": tensor_parallel_size}
        for name, size in sizes.items():
            if size != "auto" and (type(size) is not int or size < 1):
                raise ConfigError(
                    f"Expected a positive number or 'auto' for {name}, got {size!r}.",
                    fix=f"pass {name} as a number of processes; a function goes to parallelize_fn=.",
                )
        # Both "auto": by the number of nodes, which `check_processes` knows.
        self._lw_is_by_nodes = set(sizes.values()) == {"auto"}
        super().__init__(
            MeshAxes(
                fsdp=REST if data_parallel_size == "auto" else int(data_parallel_size),
                tp=1 if self._lw_is_by_nodes else REST if tensor_parallel_size == "auto" else int(tensor_parallel_size),
            ),
            {
                "state_dict_type": "sharded" if save_distributed_checkpoint else "full",
                "process_group_backend": process_group_backend,
                "timeout": timeout,
                **arguments,
            },
        )
        self.parallelize_fn = parallelize_fn

    def check_processes(self, num_processes: int, num_nodes: int) -> None:
        """Compare the sizes with the number of processes; those that are "auto" follow from it."""
        if self._lw_is_by_nodes:
            self.axes = MeshAxes(fsdp=num_nodes, tp=num_processes // num_nodes)
        super().check_processes(num_processes, num_nodes)

    def check_layers(self, module: nn.Module) -> None:
        """Accept any module: its own code parallelizes it."""

    # -- the model -----------------------------------------------------------------------------------------------

    @contextmanager
    def init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context in which a module is built on the CPU; with `empty_init=True` on the meta device."""
        with torch.device("meta") if empty_init else nullcontext():
            yield

    def change_context(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context that does nothing: the module's own code has parallelized it."""
        return nullcontext()

    def _lw_shard(self, module: nn.Module) -> ShardedRoot:
        if self.parallelize_fn is not None:
            assert self.device_mesh is not None
            module = self.parallelize_fn(module, self.device_mesh)
            if not isinstance(module, nn.Module):
                raise ModuleError(
                    f"Expected parallelize_fn to return the module, got {module!r}.",
                    fix="return the module from it, also where it is changed in place.",
                )
        return super()._lw_shard(module)

    def _lw_prepare(self, module: nn.Module) -> None:
        self.check_module(module)
        fill_shards(module, self.device)
        if self.resolved_axes.tp > 1:
            from .tensor.apply import differentiate_once

            for one in module.modules():
                meshes = [getattr(parameter, "device_mesh", None) for parameter in one.parameters(recurse=False)]
                if any(mesh is not None and _TENSOR in (mesh.mesh_dim_names or ()) for mesh in meshes):
                    differentiate_once(one)


def fill_shards(module: nn.Module, device: torch.device) -> None:
    """Give values to shards on the meta device, by `reset_parameters` of the modules that own them. On every rank.

    Each module is filled with full tensors on rank 0, parents first, and each rank keeps its shards: the values do not
    depend on the mesh.

    Raises:
        ModuleError: Modules have no `reset_parameters`; names them.
    """
    owners = {
        name: one
        for name, one in module.named_modules()
        if any(is_sharded(parameter) and parameter.is_meta for parameter in one.parameters(recurse=False))
    }
    without = [f"{name} ({type(one).__name__})" for name, one in owners.items() if not hasattr(one, "reset_parameters")]
    if without:
        raise ModuleError(
            f"Expected reset_parameters() of modules that were parallelized on the meta device, got none in "
            f"{', '.join(without)}.",
            fix="define reset_parameters(), which initializes the parameters that the module itself has; or build the "
            "model on the CPU.",
        )
    for one in owners.values():
        _fill(one, device)


def _fill(owner: Any, device: torch.device) -> None:
    shards = {name: one for name, one in owner._parameters.items() if one is not None}
    full = {name: nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device=device)) for name, one in shards.items()}
    buffers = {
        name: one if one is None or not one.is_meta else torch.empty_like(one, device=device)
        for name, one in owner._buffers.items()
    }
    owner._parameters.update(full)
    owner._buffers.update(buffers)
    with torch.no_grad():
        if dist.get_rank() == 0:
            owner.reset_parameters()
        for tensor in [*full.values(), *(one for one in buffers.values() if one is not None)]:
            dist.broadcast(tensor.detach(), 0)
    owner._parameters.update(shards)
    parts: dict[str, Tensor] = {}
    for name, one in shards.items():
        part = full[name].detach()
        if is_sharded(one):
            offsets, sizes = local_slice(one)
            part = part[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
        parts[name] = part
    values = dict(owner._buffers)
    owner.to_empty(device=device, recurse=False)
    owner._buffers.update(values)
    with torch.no_grad():
        for name, one in owner._parameters.items():
            if one is not None and parts[name].numel():
                (one.to_local() if is_sharded(one) else one).copy_(parts[name])
