"""Starts all ranks of this node as copies of this process, and brings rank 0's result back: spawn, fork, forkserver."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ...accelerators.matmul_precision import State as MatmulState
from ...accelerators.matmul_precision import capture_matmul_precision, restore_matmul_precision
from ...errors import ConfigError, LaunchError, StopBySignal
from ...strategies.distributed import rendezvous
from ..failure import Failure, describe_exit
from ..seed import rng_state, set_rng_state
from . import InProcessLauncher
from .parent_watchdog import tie_to_parent_process
from .script import num_threads_per_process

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch._C._distributed_c10d import Store, TCPStore

    from ..cluster import ClusterEnvironment

__all__ = ["START_METHODS", "ProcessLauncher"]

log = logging.getLogger(__name__)

R = TypeVar("R")

START_METHODS = ("spawn", "fork", "forkserver")

_TERMINATED = 128 + signal.SIGTERM
_INTERRUPTED = 128 + signal.SIGINT
# The process that a ProcessLauncher made a rank; its own forks, such as loader workers, are none.
_started_in: int | None = None

_POLL_S = 0.2
_ENDS_BY_ITSELF_S = 1.5
_TERMINATE_S = 3.0
# What objects raise that cannot be pickled: each class its own.
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError)
# What a rank says when another one has gone: a consequence, never the cause.
_CONSEQUENCE = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|gloo/transport|Gloo |NCCL|ProcessGroup|DistNetworkError|"
    r"DistStoreError|lost the store|RankFailure"
)


class ProcessLauncher(InProcessLauncher):
    """All ranks are new processes; this one is none of them. It waits, and returns what rank 0 returned.

    What the function changes in memory stays in those processes. "fork" starts in a fraction of a second and needs no
    pickling; it is what notebooks need, and cannot be used once CUDA was. "spawn" and "forkserver" start fresh
    interpreters: the function and its arguments must be picklable, and the script must not run when it is imported.

    Args:
        start_method: "spawn", "fork" or "forkserver".
        cluster: Knows address and node rank; every process is told its own rank.
        num_processes: Processes per node.
        num_nodes: Number of nodes.

    Raises:
        ConfigError: The start method is unknown, or this system does not have it.
    """

    def __init__(self, start_method: str, cluster: ClusterEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        check_start_method(start_method)
        self.start_method = start_method
        self._cluster = cluster
        self._num_processes = num_processes
        self._num_nodes = num_nodes
        self._processes: dict[int, BaseProcess] = {}
        self._server: TCPStore | None = None

    @property
    def starts_processes(self) -> bool:
        """True, except in a process that was started like this: there it runs in place."""
        return _started_in != os.getpid()

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook: only with "fork", since what a notebook defines cannot be imported."""
        return self.start_method == "fork"

    def local_exits(self) -> dict[int, int]:
        """Return the exit codes of the processes that have ended, by local rank; negative for a signal."""
        if not self.starts_processes:
            return {}  # a fork has a copy of the list, but these are not its children
        return {rank: process.exitcode for rank, process in self._processes.items() if process.exitcode is not None}

    def kill(self, signum: int) -> None:
        """Send a signal to the processes that still run."""
        if not self.starts_processes:
            return
        for process in self._processes.values():
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)

    def __getstate__(self) -> dict[str, Any]:
        # It travels with the Fabric that it belongs to; the processes are only this process's children.
        return {**self.__dict__, "_processes": {}, "_server": None}

    def launch(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call the function in new processes and return what it returned on the first rank of this node.

        Tensors in the result are on the CPU. Ctrl-C and SIGTERM go on to the processes, and their end is waited for.
        Within one of these processes the function is simply called; the others call it, too.

        Raises:
            LaunchError: Processes cannot be started here and now; says why.
            RankFailure: A rank failed: the first failure, with its traceback. The other ranks have been ended.
            KeyboardInterrupt: Ctrl-C ended all ranks.
            StopBySignal: SIGTERM ended all ranks; the exit code is 143.
        """
        if not self.starts_processes:
            return function(*args, **kwargs)
        self._check()
        cluster = self._cluster
        cluster.validate_settings(self._num_processes, self._num_nodes)
        with tempfile.TemporaryDirectory(prefix="loopwright-") as folder:
            plan = _Plan(
                folder=folder,
                address=cluster.main_address,
                port=cluster.main_port,
                node_rank=cluster.node_rank(),
                num_processes=self._num_processes,
                num_nodes=self._num_nodes,
                num_threads=self._num_threads(),
                settings=None if self.start_method == "fork" else _Settings.current(),
            )
            call = (cluster, function, args, kwargs)
            if self.start_method == "fork":
                plan.call, plan.gate = call, os.pipe()
            else:
                _write_call(call, plan, self.start_method)
            try:
                result: R = self._run(plan)
                return result
            finally:
                self._stop()
                plan.close()

    # -- before --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise LaunchError(
                f"start_method={self.start_method!r} imports the script in every new process, and this script starts "
                "training while it is imported.",
                fix='put what it does under `if __name__ == "__main__":`.',
            )
        if self.start_method != "fork":
            return
        if torch.cuda.is_initialized():
            raise LaunchError(
                "this process has used CUDA already, and a forked process cannot use it then.",
                fix="make no CUDA tensor and no CUDA query before the launch (in a notebook: restart it and run the "
                "training first), or run a script with strategy='ddp' or 'ddp_spawn'.",
            )
        if dist.is_initialized():
            raise LaunchError(
                "this process is a rank of torch.distributed already, and its connections cannot be shared by forks.",
                fix="call torch.distributed.destroy_process_group() first, or use strategy='ddp'.",
            )

    def _num_threads(self) -> int:
        count = num_threads_per_process(self._num_processes)
        if self.start_method != "fork" or torch.get_num_threads() == 1:
            return count
        # A fork has none of OpenMP's threads, but its library counts on them: the first parallel loop would never end.
        if count > 1:
            log.info("each forked rank computes with one thread of the CPU; strategy='ddp' and 'ddp_spawn' use more.")
        return 1

    # -- while they run ------------------------------------------------------------------------------------------

    def _run(self, plan: _Plan) -> Any:
        context = multiprocessing.get_context(self.start_method)
        self._processes = {}
        if self.start_method != "fork":
            self._host(plan)
        with self._forwarding(plan) as asked:
            for local in range(self._num_processes):
                process = context.Process(  # type: ignore[attr-defined]  # every context has it
                    target=_run_rank, args=(local, plan), name=f"loopwright-rank-{plan.rank(local)}"
                )
                process.start()
                self._processes[local] = process
            if self.start_method == "fork":
                # Only now: a fork has the locks of the store's thread as they are at that moment, some of them held
                # for ever. The forks wait for the port.
                self._host(plan)
                plan.open_gate()
            for signum in tuple(asked):  # one that came while they started
                self.kill(signum)
            culprit = self._wait(plan, asked)
        if asked:
            raise KeyboardInterrupt if signal.SIGINT in asked else StopBySignal
        if culprit is not None:
            raise culprit.to_error()
        codes = set(self.local_exits().values())
        if _TERMINATED in codes:
            raise StopBySignal
        if _INTERRUPTED in codes:
            raise KeyboardInterrupt
        # Our own file, from our own child, in a folder that is open to nobody else.
        return torch.load(plan.file(0, "result"), map_location="cpu", weights_only=False)

    def _host(self, plan: _Plan) -> None:
        """Open the store where rank 0 is; the plan's port is the right one afterwards."""
        if plan.node_rank == 0:
            self._server = rendezvous.host_store(plan.address, plan.port)
            plan.port = self._server.port

    def _wait(self, plan: _Plan, asked: list[int]) -> Failure | None:
        """Return when all have ended: None, or the first failure."""
        deaths: list[Failure] = []
        failed_at: float | None = None
        living = dict(self._processes)
        while living:
            # Not for ever: the system may give a signal to another thread, and then only a return runs its handler.
            ready = multiprocessing.connection.wait([process.sentinel for process in living.values()], _POLL_S)
            if failed_at is not None and time.monotonic() >= failed_at + _ENDS_BY_ITSELF_S:
                break
            for local, process in list(living.items()):
                if process.sentinel not in ready:
                    continue
                process.join()
                del living[local]
                code = process.exitcode or 0
                if code in (0, _TERMINATED, _INTERRUPTED) or asked:
                    continue
                failed_at = failed_at or time.monotonic()
                if not plan.file(local, "failure").exists():
                    deaths.append(plan.death(local, process.pid or 0, code, self.start_method))
        if failed_at is None:
            return None
        return _first_failure(plan, self._server, deaths)

    @contextmanager
    def _forwarding(self, plan: _Plan) -> Iterator[list[int]]:
        """Send Ctrl-C and SIGTERM on to the processes, which have a process group of their own and get it once.

        Gives the list of the signals that came.
        """
        asked: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            yield asked  # only the main thread can have handlers
            return
        pid = os.getpid()

        def forward(signum: int, frame: FrameType | None) -> None:
            if os.getpid() != pid:
                return  # a fork that has not taken its own handlers yet; the signal is sent to it below
            asked.append(signum)
            # The third Ctrl-C is from somebody who does not want to wait any more.
            self.kill(signal.SIGKILL if asked.count(signal.SIGINT) > 2 else signum)

        before: dict[int, Any] = {
            number: signal.signal(number, forward) or signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM)
        }
        if self.start_method == "fork":
            plan.handlers = before
        try:
            yield asked
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        """End what still runs, first with a request and then without, and reap it."""
        # Not left to a traceback that somebody keeps: a later fork would have a server without its thread, and die of
        # it when its copy is collected.
        self._server = None
        ends = time.monotonic() + _TERMINATE_S
        self.kill(signal.SIGTERM)
        for process in self._processes.values():
            process.join(max(0.0, ends - time.monotonic()))
        self.kill(signal.SIGKILL)
        for process in self._processes.values():
            process.join()


def check_start_method(start_method: str) -> None:
    """Raise a ConfigError if there is no such method, or this system does not have it."""
    if start_method not in START_METHODS:
        raise ConfigError(
            f"start_method={start_method!r} is unknown.",
            fix=f"use one of popen, {', '.join(START_METHODS)}.",
        )
    if start_method not in multiprocessing.get_all_start_methods():
        raise ConfigError(
            f"start_method={start_method!r} does not exist on this system ({sys.platform}).",
            fix="use 'ddp' (which runs the script once per process) or 'ddp_spawn'.",
        )


# -- what the processes need to know -----------------------------------------------------------------------------------


@dataclass
class _Settings:
    """What a fresh interpreter does not have, and a fork would."""

    rng: dict[str, Any]
    dtype: torch.dtype
    is_deterministic: bool
    warns_only: bool
    benchmark: bool
    cudnn_deterministic: bool
    matmul_precision: MatmulState

    @classmethod
    def current(cls) -> _Settings:
        return cls(
            rng=rng_state(),
            dtype=torch.get_default_dtype(),
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            warns_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            benchmark=torch.backends.cudnn.benchmark,
            cudnn_deterministic=torch.backends.cudnn.deterministic,
            matmul_precision=capture_matmul_precision(),
        )

    def apply(self) -> None:
        torch.set_default_dtype(self.dtype)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)
        torch.backends.cudnn.benchmark = self.benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        restore_matmul_precision(self.matmul_precision)
        set_rng_state(self.rng)


@dataclass
class _Plan:
    """What every process is told."""

    folder: str
    address: str
    port: int
    node_rank: int
    num_processes: int
    num_nodes: int
    num_threads: int
    settings: _Settings | None
    call: Any = None
    """(cluster, function, args, kwargs); None: in the file."""
    gate: tuple[int, int] | None = None
    """For forks: a pipe that brings the port when the store is open."""
    handlers: dict[int, Any] = field(default_factory=dict)
    """For forks: the signal handlers before the launch."""

    def open_gate(self) -> None:
        """Tell every fork the port."""
        assert self.gate is not None
        os.write(self.gate[1], self.port.to_bytes(4, "little") * self.num_processes)

    def pass_gate(self) -> None:
        """Wait for the port; called in a fork.

        Raises:
            SystemExit: The launching process has ended before.
        """
        if self.gate is None:
            return
        os.close(self.gate[1])
        told = os.read(self.gate[0], 4)
        if not told:
            sys.exit(1)
        self.port = int.from_bytes(told, "little")

    def close(self) -> None:
        """Close the pipe in the launching process."""
        for end in self.gate or ():
            os.close(end)

    def rank(self, local: int) -> int:
        return self.node_rank * self.num_processes + local

    def file(self, local: int, what: str) -> Path:
        return Path(self.folder, f"{what}{local}")

    def death(self, local: int, pid: int, code: int, start_method: str) -> Failure:
        """Return the failure of a process that could not say anything itself."""
        how = describe_exit(code)
        if not self.file(local, "started").exists() and start_method != "fork":
            how += (
                "; it never got as far as its work. Its own message stands above; often the script lacks "
                'an `if __name__ == "__main__":`'
            )
        trace = ""
        for file in Path(self.folder).glob(f"loopwright-crash-{pid}-*"):
            from ..watch.crash_file import crash_text, describe_crash

            text = crash_text(str(file))
            if text:
                crash, trace = describe_crash(text, 0)
                how = f"{how}: {crash}"
        return Failure(self.rank(local), socket.gethostname(), pid, how, trace=trace, when=time.time())


def _write_call(call: Any, plan: _Plan, start_method: str) -> None:
    # Not through multiprocessing, which would put tensors into memory that all ranks share and train on together.
    try:
        torch.save(call, plan.file(0, "call"))
    except _UNPICKLABLE as error:
        raise LaunchError(
            f"start_method={start_method!r} sends the function and its arguments to other processes, but they cannot "
            f"be pickled: {error}",
            fix="define functions and classes at the top level of a module, and open files and connections in hooks; "
            "or use strategy='ddp' or 'ddp_fork', which pickle nothing.",
        ) from error


def _first_failure(plan: _Plan, server: TCPStore | None, deaths: list[Failure]) -> Failure:
    """Return the failure that the others follow from."""
    posted = None
    if server is not None and (shared := rendezvous.attempt_store(server)).check([rendezvous.FAILURE]):
        posted = Failure.from_json(shared.get(rendezvous.FAILURE))
    known = [] if posted is None else [posted]
    said = [
        Failure.from_json(file.read_text())
        for local in range(plan.num_processes)
        if (file := plan.file(local, "failure")).exists()
    ]
    known += sorted(said, key=lambda failure: failure.when)
    causes = [failure for failure in known if not _CONSEQUENCE.search(failure.how)]
    return (causes + deaths + known)[0]


# -- in the new process ------------------------------------------------------------------------------------------------


def _run_rank(local: int, plan: _Plan) -> None:
    """Run the function as one rank, and leave what came of it in a file. The whole life of the process."""
    global _started_in
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # the terminal's Ctrl-C goes to the launching process, which sends it on
    for number, handler in plan.handlers.items():
        signal.signal(number, handler)
    tie_to_parent_process()
    _started_in = os.getpid()
    # Garbage that a fork takes over may own threads that only its parent has (the store of a run that failed): to
    # collect it here would wait for them for ever.
    gc.freeze()
    rank = plan.rank(local)
    code = 0
    try:
        plan.pass_gate()
        plan.file(local, "started").touch()
        _, function, args, kwargs = _prepare(local, plan)
        result = function(*args, **kwargs)
        if local == 0:
            _write_result(result, plan.file(0, "result"))
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except StopBySignal:
        code = _TERMINATED
    except BaseException as error:  # whatever it is, the launching process raises it for the user
        failure = Failure.of(error, rank=rank)
        code = failure.exit_code
        partial = plan.file(local, "partial")
        partial.write_text(failure.to_json())
        partial.replace(plan.file(local, "failure"))
        _post(failure, plan)
    finally:
        rendezvous.disconnect()
    sys.exit(code)


def _prepare(local: int, plan: _Plan) -> Any:
    """Tell this process who it is, and return what it is to do."""
    os.environ.update(
        {
            "MASTER_ADDR": plan.address,
            "MASTER_PORT": str(plan.port),
            "NODE_RANK": str(plan.node_rank),
            "LOCAL_RANK": str(local),
            "RANK": str(plan.rank(local)),
            "WORLD_SIZE": str(plan.num_processes * plan.num_nodes),
            "LOCAL_WORLD_SIZE": str(plan.num_processes),
            rendezvous.HOSTED: "hosted",
            "LOOPWRIGHT_CRASH_FOLDER": plan.folder,  # read by fabric/watch/crash_file.py
        }
    )
    torch.set_num_threads(plan.num_threads)
    if plan.settings is not None:
        plan.settings.apply()
    # Written by the launching process into a folder that is open to nobody else.
    call = plan.call if plan.call is not None else torch.load(plan.file(0, "call"), weights_only=False)
    cluster = call[0]
    cluster.set_world_size(plan.num_processes * plan.num_nodes)
    cluster.set_global_rank(plan.rank(local))
    set_main_port = getattr(cluster, "set_main_port", None)
    if set_main_port is not None:
        set_main_port(plan.port)
    return call


def _write_result(result: Any, file: Path) -> None:
    try:
        torch.save(result, file)
    except _UNPICKLABLE as error:
        raise LaunchError(
            f"what the function returned on rank 0 cannot be pickled, and so not brought back: {error}",
            fix="return tensors and plain values.",
        ) from error


def _post(failure: Failure, plan: _Plan) -> None:
    """Tell the other ranks, also those on other nodes."""
    store: Store | None = rendezvous.store()
    with suppress(RuntimeError):  # the store is gone: so is the launching process, and with it whoever would read this
        if store is None:
            store = rendezvous.attempt_store(rendezvous.open_store(_Place(plan)))
        store.compare_set(rendezvous.FAILURE, "", failure.to_json())


class _Place:
    """Where the store is, for a process whose cluster environment may be what failed."""

    def __init__(self, plan: _Plan) -> None:
        self.main_address, self.main_port = plan.address, plan.port

    def world_size(self) -> int:
        return 1

    def global_rank(self) -> int:
        return 0
