"""A world of many ranks in one process, in which nothing is sent and tensors have no memory.

This file alone uses the private parts of torch that planning needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..errors import LaunchError
from ..fabric.cluster import ClusterEnvironment
from ..strategies.distributed import collectives
from ..strategies.mesh.pipeline.unreached import UnreachedStages
from ..strategies.mesh.split import ModuleSplit

_READS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


class NeedsValues(RuntimeError):
    """Code reads values of tensors without memory."""


# Beginnings of the names of variables with which launchers and schedulers describe a real world.
_OF_REAL_WORLDS = (
    "GROUP_", "JSM_", "KUBERNETES_", "LOCAL_", "LOOPWRIGHT_STORE", "LSB_", "LT_", "MASTER_", "MV2_", "NODE_RANK",
    "OMPI_", "PMI", "RANK", "ROLE_", "SLURM_", "TORCHELASTIC_", "WORLD_SIZE",
)  # fmt: skip
_inherited: list[object] = []
_REDUCTIONS = ("sum", "avg", "max", "min", "product")
_OF_SHARDS = "torch.distributed.fsdp._fully_shard._fsdp_param"


class SimulatedCluster(ClusterEnvironment):
    """The place of this process in a world whose other ranks do not exist; nothing is detected or asked.

    Args:
        rank: Global rank that this process stands for.
        size: Number of ranks.
        num_nodes: Number of nodes, with equally many ranks.
    """

    def __init__(self, rank: int, size: int, num_nodes: int = 1) -> None:
        super().__init__(variables={})
        self._rank, self._size, self._num_nodes = rank, size, num_nodes

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        """Return False: it is only used where it is passed."""
        return False

    def world_size(self) -> int:
        """Return the number of simulated ranks."""
        return self._size

    def global_rank(self) -> int:
        """Return the rank that this process stands for."""
        return self._rank

    def local_rank(self) -> int:
        """Return its rank on its node."""
        return self._rank % self.num_local_processes()

    def node_rank(self) -> int:
        """Return the rank of its node."""
        return self._rank // self.num_local_processes()

    def num_local_processes(self) -> int:
        """Return the number of ranks per node."""
        return self._size // self._num_nodes


@contextmanager
def fake_world(size: int, rank: int = 0, *, num_nodes: int = 1) -> Iterator[SimulatedCluster]:
    """Make this process one rank of a world in which nothing is sent; it leaves the world at the end.

    Collectives return at once. What is gathered from other ranks are copies of what this rank passed, and what is
    reduced or received keeps its values, so that checks between ranks find them alike.

    Args:
        size: Number of ranks.
        rank: The one that this process stands for.
        num_nodes: Number of nodes, with equally many ranks.

    Yields:
        The cluster environment to pass as a plugin to Fabric or Trainer.

    Raises:
        LaunchError: This process belongs to a process group already.
    """
    if dist.is_initialized():
        raise LaunchError(
            "Expected a process without a process group for a simulated world, got one that is connected to others.",
            fix="plan in a separate process, before the training starts.",
        )
    with (
        fake_group(size, rank),
        without_real_world(),
        # It reads values in C++. The strategy has compared the parameters before.
        patch("torch.nn.parallel.distributed._verify_param_shape_across_processes"),
        patch.object(dist, "all_gather_object", _gather_copies),
        # What compares values of tensors has none to compare; the first answer is known.
        patch.object(collectives, "same_everywhere", return_value=True),
        patch.object(ModuleSplit, "_take_verification", return_value=False),
    ):
        yield SimulatedCluster(rank, size, num_nodes)


@contextmanager
def fake_group(size: int, rank: int = 0) -> Iterator[None]:
    """Make this process a rank of a process group in which nothing is sent, until the end of the context."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def without_real_world() -> AbstractContextManager[object]:
    """Return a context without the environment variables that describe the world of this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_REAL_WORLDS)}
    return patch.dict(os.environ, kept, clear=True)


def leave_inherited_world() -> None:
    """Let a copy of a process forget the process group of the original, whose connections only that one may use."""
    _inherited.append(distributed_c10d._world)  # its end would wait for threads that were not copied
    for name in ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag", "_tags_to_pg"):
        known = getattr(distributed_c10d, name)
        _inherited.append(dict(known))
        known.clear()
    distributed_c10d._world = distributed_c10d._World()


def _gather_copies(boxes: list[object], own: object, group: object = None) -> None:
    """Gather objects as torch does, also within `fake_tensors`."""
    boxes[:] = [own] * len(boxes)


def fake_tensors() -> FakeTensorMode:
    """Return a context in which tensors have shapes, dtypes and devices, and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def naming_reads() -> Iterator[None]:
    """Raise `NeedsValues` for what reads values: torch's own errors cannot be sent to another process."""
    try:
        yield
    except _READS as error:
        raise NeedsValues(str(error)) from error
    except RuntimeError as error:
        if not str(error).startswith(".numpy() is not supported"):
            raise
        raise NeedsValues(str(error)) from error


def belongs_to(tensor: Tensor, mode: FakeTensorMode | None) -> bool:
    """Return whether a tensor is one of these tensors without memory; with None, whether it has memory."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_mode is mode
    return mode is None and not tensor.is_meta


def really(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Call a function outside of `fake_tensors`."""
    with unset_fake_temporarily():
        return function(*args, **kwargs)


def average_buckets(replica: DistributedDataParallel, on_bucket: Callable[[Tensor], None]) -> None:
    """Let a replica of DDP average gradients in a simulated world, as torch does by default in the same memory.

    Args:
        replica: Made in `fake_world`, with `fake_tensors`.
        on_bucket: Called with each bucket that is averaged.
    """

    def average(on_bucket: Callable[[Tensor], None], bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        on_bucket(buffer)
        buffer.div_(dist.get_world_size())
        dist.all_reduce(buffer)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    # torch's own code in C++ expects a result of the collective, and reads in the second step in which order gradients
    # were ready on rank 0: buckets keep their order, and with it their bytes. (A lambda: torch compares annotations.)
    replica.register_comm_hook(on_bucket, lambda state, bucket: average(state, bucket))
    stand_in: Any = _SameBuckets(replica.reducer)
    replica.reducer = stand_in


@contextmanager
def agreed_stages() -> Iterator[None]:
    """Let pipeline stages take the shapes they were made with, and expect gradients, without asking other ranks."""
    schedules: Any = import_module("torch.distributed.pipelining.schedules")  # takes a while

    def agree(schedule: object, stages: list[Any], *_: object) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC

    with patch.object(schedules._PipelineSchedule, "_warmup_p2p", agree), patch.object(UnreachedStages, "settle"):
        yield


class _SameBuckets:
    """torch's reducer, which keeps its buckets."""

    def __init__(self, reducer: object) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> object:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def group_size(args: tuple[Any, ...]) -> int:
    """Return the number of ranks of a collective's group, which is among its arguments as an object or by its name."""
    for one in args:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return int(dist.ProcessGroup.unbox(one).size())
    names: list[Any] = [one for one in args if isinstance(one, str) and one not in _REDUCTIONS]
    return int(distributed_c10d._resolve_process_group(names[-1]).size()) if names else 1  # type: ignore[attr-defined]


@contextmanager
def watch_storages(on_change: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with each tensor whose storage FSDP grows to gather a parameter, or frees: no operation does."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param  # takes half a second

    def told(change: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def run(tensor: Tensor) -> None:
            change(tensor)
            on_change(tensor)

        return run

    with (
        patch(f"{_OF_SHARDS}.alloc_storage", told(_fsdp_param.alloc_storage)),
        patch(f"{_OF_SHARDS}_group.alloc_storage", told(_fsdp_param.alloc_storage)),
        patch(f"{_OF_SHARDS}.free_storage", told(_fsdp_param.free_storage)),
    ):
        yield
