"""Runs a function in replicas of XLA on the CPU: a process with a thread per device, as torch_xla's launch makes them.

For tests, and for torch_xla 2.9.0 only. As shipped, any collective of these threads hangs: each thread compiles the
graph for itself, and the CPU's runtime does not see that the two are one collective. Here all threads of the process
meet before a graph is sent off; the first compiles it, the others follow when it is in the cache, and nobody goes on
before all have sent theirs. torch.distributed gets torch's own process group for threads, in the place of gloo.

What Loopwright keeps for a process (the store that ranks are watched over with, signals, random generators of the
host) is not each replica's own here: a Trainer cannot run in these threads, a loop by hand on Fabric can.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loopwright.fabric.cluster import ClusterEnvironment

__all__ = ["BUILDING", "ReplicaEnvironment", "run_replicas"]

# Any in this file: torch_xla is not annotated; what functions take and return.

BUILDING = threading.Lock()
"""Held while a module is built: the host's generator belongs to all threads."""

LIMIT_S = 120


class ReplicaEnvironment(ClusterEnvironment):
    """The place of this thread among the replicas."""

    def __init__(self) -> None:
        super().__init__()
        import torch_xla.runtime as runtime

        self._place = (runtime.global_ordinal(), runtime.world_size())

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return int(self._place[1])

    def global_rank(self) -> int:
        return int(self._place[0])

    def local_rank(self) -> int:
        return int(self._place[0])

    def node_rank(self) -> int:
        return 0


def run_replicas(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Call `function(rank, size, *args)` in `size` replicas and return the results in rank order.

    Args:
        function: At the top level of a module that can be imported without doing anything.
        size: Number of replicas.
        args: Further arguments.
    """
    import torch_xla.distributed.xla_multiprocessing as multiprocessing

    os.environ.update(CPU_NUM_DEVICES=str(size), XLA_THREAD_POOL_SIZE="16", NPROC="16")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_replica, args=(function, size, folder, args))
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(size)]


def _replica(rank: int, function: Callable[..., Any], size: int, folder: str, args: tuple[Any, ...]) -> None:
    with BUILDING:
        turns = Turns.install(size)
    try:
        dist.init_process_group("threaded", rank=rank, world_size=size, store=turns.store)
        torch.save(function(rank, size, *args), Path(folder, str(rank)))
    except BaseException as error:
        turns.fail(error)
        raise


class Turns:
    """Lets the replicas of this process send off graphs in turn.

    Args:
        size: Number of replicas.
    """

    here: Turns | None = None

    def __init__(self, size: int) -> None:
        import torch_xla
        import torch_xla.debug.metrics as metrics
        import torch_xla.runtime as runtime

        self._lib: Any = torch_xla._XLAC
        self._device: Any = torch_xla.device
        self._ordinal: Any = runtime.local_ordinal
        self._counts = lambda: (
            runtime.get_num_cached_compilation_graph(),
            metrics.counter_value("CachedCompile") or 0,
        )
        self._barrier = threading.Barrier(size, timeout=LIMIT_S)
        self._before: Any = None
        self._is_sent = False
        self.store = dist.HashStore()

    @classmethod
    def install(cls, size: int) -> Turns:
        """Put it between torch_xla and its runtime, once per process."""
        if cls.here is not None:
            return cls.here
        from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

        turns = cls.here = cls(size)
        lib = turns._lib
        marker, multi = lib._xla_step_marker, lib._xla_sync_multi

        def step_marker(device: str = "", devices: Any = (), wait: bool = True, reset_scope: bool = True) -> None:
            turns.take(lambda: marker(device, list(devices), wait=False, reset_scope=reset_scope))

        def sync_multi(tensors: Any, devices: Any = (), wait: bool = True, sync_xla_data: bool = True) -> None:
            turns.take(lambda: multi(tensors, list(devices), wait=False, sync_xla_data=sync_xla_data))

        lib._xla_step_marker, lib._xla_sync_multi = step_marker, sync_multi
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        _install_threaded_pg()
        # The threads' group takes tensors of the host, as gloo does.
        dist.get_backend_config = lambda group=None: "cpu:gloo"
        return turns

    def take(self, send: Callable[[], None]) -> None:
        """Send off the graph of this replica, when it is its turn; all replicas call it equally often."""
        self._drain()
        self._barrier.wait()
        is_first = self._ordinal() == 0
        if is_first:
            self._before, self._is_sent = self._counts(), False
        self._barrier.wait()
        if is_first:
            send()
            self._is_sent = True
        else:
            end = time.monotonic() + LIMIT_S
            while not self._is_sent and self._counts() == self._before and time.monotonic() < end:
                time.sleep(0.001)
            send()
        # A thread that goes on may free memory, which waits for the execution while it holds Python's lock.
        self._barrier.wait()
        self._drain()
        self._barrier.wait()

    def fail(self, error: BaseException) -> None:
        """Let the other replicas fail, too, in place of waiting for this one."""
        from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

        self._barrier.abort()
        ProcessLocalGroup.exception_handle(error)

    def _drain(self) -> None:
        self._lib._xla_wait_device_ops(self._lib._xla_real_devices([str(self._device())]))
