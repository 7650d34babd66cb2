"""`ProcessLauncher`: runs a function in new processes (spawn, fork, forkserver) and returns rank 0's result."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
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
from ..watch.crash_file import crash_text, describe_crash
from . import InProcessLauncher, refuse_existing_ranks
from .parent_watchdog import watch_parent_process
from .script import num_threads_per_process
from .variables import rank_variables

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch._C._distributed_c10d import Store, TCPStore

    from ...protocols import AnyOutput, Cluster, StateDict

log = logging.getLogger(__name__)

R = TypeVar("R")

START_METHODS = ("spawn", "fork", "forkserver")

_TERMINATED = 128 + signal.SIGTERM
_INTERRUPTED = 128 + signal.SIGINT
# The process that a ProcessLauncher started as a rank; its forks, such as loader workers, are not ranks.
_started_in: int | None = None

_POLL_S = 0.2
_ENDS_BY_ITSELF_S = 1.5
_TERMINATE_S = 3.0
# Raised by objects that cannot be pickled.
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError)
# Messages of a rank whose peer is gone: a consequence, never the cause.
_CONSEQUENCE = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|gloo/transport|Gloo |NCCL|ProcessGroup|DistNetworkError|"
    r"DistStoreError|lost the store|RankFailure"
)


class ProcessLauncher(InProcessLauncher):
    """Starts new processes for all ranks; this process waits and returns rank 0's result.

    Changes that the function makes in memory stay in those processes. "fork" starts in a fraction of a second and needs
    no pickling; it works in notebooks, and cannot be used after CUDA was initialized. "spawn" and "forkserver" start
    fresh interpreters: the function and its arguments must be picklable, and the script must not run when it is
    imported.

    Args:
        start_method: "spawn", "fork" or "forkserver".
        cluster: Provides address and node rank; receives each process's rank.
        num_processes: Number of processes per node.
        num_nodes: Number of nodes.

    Raises:
        ConfigError: The start method is unknown or unavailable on this system.
    """

    def __init__(self, start_method: str, cluster: Cluster, num_processes: int, num_nodes: int = 1) -> None:
        check_start_method(start_method)
        self.start_method = start_method
        self._cluster = cluster
        self._num_processes = num_processes
        self._num_nodes = num_nodes
        self._processes: dict[int, BaseProcess] = {}
        self._server: TCPStore | None = None

    @property
    def starts_processes(self) -> bool:
        """True, except in a process that it started: there it runs in place."""
        return _started_in != os.getpid()

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook: only with "fork", since definitions in a notebook cannot be imported."""
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

    def __getstate__(self) -> StateDict:
        # It is pickled with its Fabric; the processes are children of this process only.
        return {**self.__dict__, "_processes": {}, "_server": None}

    def launch(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call the function in new processes and return the result of the first rank of this node.

        Tensors in the result are on the CPU. Ctrl-C and SIGTERM are forwarded to the processes, and this process waits
        for their end. Within one of these processes the function is called directly.

        Raises:
            LaunchError: Processes cannot be started; the message names the reason.
            RankFailure: The first failure of a rank, with its traceback. The other ranks have been ended.
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
                plan.call, plan.port_pipe = call, os.pipe()
                plan.python_rng = random.getstate()
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
                f"Expected a script that can be imported, which start_method={self.start_method!r} does in every new "
                "process, got a script that starts training while it is imported.",
                fix='put the training under `if __name__ == "__main__":`.',
            )
        if multiprocessing.current_process().daemon:
            raise LaunchError(
                "Expected a process that can start others, got a daemonic one, such as a process of multiprocessing's "
                "Pool.",
                fix="call fit in the main process, or use ProcessPoolExecutor.",
            )
        if self.start_method != "fork":
            refuse_existing_ranks()
            return
        if torch.cuda.is_initialized():
            raise LaunchError(
                "Expected a process that has not used CUDA, got one that has: its forks cannot use CUDA.",
                fix="avoid CUDA tensors and CUDA queries before the launch (in a notebook: restart it and run the "
                "training first), or run a script with strategy='ddp' or 'ddp_spawn'.",
            )
        if dist.is_initialized():
            raise LaunchError(
                "Expected a process outside torch.distributed, got one that is already a rank: forks cannot share its "
                "connections.",
                fix="call torch.distributed.destroy_process_group() first, or use strategy='ddp'.",
            )

    def _num_threads(self) -> int:
        count = num_threads_per_process(self._num_processes)
        if self.start_method != "fork" or torch.get_num_threads() == 1:
            return count
        # A fork has none of OpenMP's threads, but its library expects them: the first parallel loop would hang.
        if count > 1:
            log.info("each forked rank uses one CPU thread; strategy='ddp' and 'ddp_spawn' use more.")
        return 1

    # -- while they run ------------------------------------------------------------------------------------------

    def _run(self, plan: _Plan) -> AnyOutput:
        context = multiprocessing.get_context(self.start_method)
        self._processes = {}
        if self.start_method != "fork":
            self._host(plan)
        with self._forwarding(plan) as signals:
            for local in range(self._num_processes):
                process = context.Process(  # type: ignore[attr-defined]  # every context has it
                    target=_run_rank, args=(local, plan), name=f"loopwright-rank-{plan.rank(local)}"
                )
                process.start()
                self._processes[local] = process
            if self.start_method == "fork":
                # Only now: a fork copies the locks of the store's thread, and some would stay held forever.
                # The forks wait for the port.
                self._host(plan)
                plan.send_port()
            for signum in tuple(signals):  # signals received while they started
                self.kill(signum)
            culprit = self._wait(plan, signals)
        if signals:
            raise KeyboardInterrupt if signal.SIGINT in signals else StopBySignal
        if culprit is not None:
            raise culprit.to_error()
        codes = set(self.local_exits().values())
        if _TERMINATED in codes:
            raise StopBySignal
        if _INTERRUPTED in codes:
            raise KeyboardInterrupt
        # Our own file, from our own child, in a private folder.
        return torch.load(plan.file(0, "result"), map_location="cpu", weights_only=False)

    def _host(self, plan: _Plan) -> None:
        """Open the store on rank 0's node, and set the plan's port."""
        if plan.node_rank == 0:
            self._server = rendezvous.host_store(plan.address, plan.port, is_one_machine=plan.num_nodes == 1)
            plan.port = self._server.port

    def _wait(self, plan: _Plan, signals: list[int]) -> Failure | None:
        """Wait until all have ended; return the first failure, or None."""
        deaths: list[Failure] = []
        failed_at: float | None = None
        living = dict(self._processes)
        while living:
            # Bounded: the system may deliver a signal to another thread, whose handler runs only after a return.
            ready = multiprocessing.connection.wait([process.sentinel for process in living.values()], _POLL_S)
            if failed_at is not None and time.monotonic() >= failed_at + _ENDS_BY_ITSELF_S:
                break
            for local, process in list(living.items()):
                if process.sentinel not in ready:
                    continue
                process.join()
                del living[local]
                code = process.exitcode or 0
                is_done = code == 0 and plan.file(local, "done").exists()
                if is_done or code in (_TERMINATED, _INTERRUPTED) or signals:
                    continue
                failed_at = failed_at or time.monotonic()
                if not plan.file(local, "failure").exists():
                    deaths.append(plan.death(local, process.pid or 0, code, self.start_method))
        if failed_at is None:
            return None
        return _first_failure(plan, self._server, deaths)

    @contextmanager
    def _forwarding(self, plan: _Plan) -> Iterator[list[int]]:
        """Forward Ctrl-C and SIGTERM to the processes, which have their own process groups and receive it once.

        Yields the list of received signals.
        """
        signals: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            yield signals  # only the main thread can have handlers
            return
        pid = os.getpid()

        def forward(signum: int, frame: FrameType | None) -> None:
            if os.getpid() != pid:
                return  # a fork that has not set its own handlers yet; the signal is sent to it below
            signals.append(signum)
            # The third Ctrl-C ends without waiting.
            self.kill(signal.SIGKILL if signals.count(signal.SIGINT) > 2 else signum)

        before: dict[int, Any] = {
            number: signal.signal(number, forward) or signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM)
        }
        if self.start_method == "fork":
            plan.handlers = before
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        """End running processes: SIGTERM first, then SIGKILL; and reap them."""
        # Not left to a stored traceback: a later fork would have a server without its thread, and crash when its copy
        # is collected.
        self._server = None
        ends = time.monotonic() + _TERMINATE_S
        self.kill(signal.SIGTERM)
        for process in self._processes.values():
            process.join(max(0.0, ends - time.monotonic()))
        self.kill(signal.SIGKILL)
        for process in self._processes.values():
            process.join()


def check_start_method(start_method: str) -> None:
    """Raise a ConfigError if the start method is unknown or unavailable on this system."""
    if start_method not in START_METHODS:
        raise ConfigError(
            f"Expected a start method of popen, {', '.join(START_METHODS)}, got start_method={start_method!r}.",
            fix="pass one of these names.",
        )
    if start_method not in multiprocessing.get_all_start_methods():
        raise ConfigError(
            f"Expected a start method of this system ({sys.platform}), got start_method={start_method!r}.",
            fix="use 'ddp' (which runs the script once per process) or 'ddp_spawn'.",
        )


# -- the plan -----------------------------------------------------------------------------------


@dataclass
class _Settings:
    """Process-wide settings, which a fork inherits and a fresh interpreter does not."""

    rng: StateDict
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
    """The data that every process receives."""

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
    port_pipe: tuple[int, int] | None = None
    """For forks: a pipe that delivers the port when the store is open."""
    python_rng: tuple[Any, ...] | None = None
    """For forks, in which Python seeds its generator again: its state before."""
    handlers: dict[int, Any] = field(default_factory=dict)
    """For forks: the signal handlers before the launch."""

    def send_port(self) -> None:
        """Send the port to every fork."""
        assert self.port_pipe is not None
        os.write(self.port_pipe[1], self.port.to_bytes(4, "little") * self.num_processes)

    def receive_port(self) -> None:
        """Wait for the port, in a fork.

        Raises:
            SystemExit: The launching process has ended.
        """
        if self.port_pipe is None:
            return
        os.close(self.port_pipe[1])
        text = os.read(self.port_pipe[0], 4)
        if not text:
            sys.exit(1)
        self.port = int.from_bytes(text, "little")

    def close(self) -> None:
        """Close the pipe in the launching process."""
        for end in self.port_pipe or ():
            os.close(end)

    def rank(self, local: int) -> int:
        return self.node_rank * self.num_processes + local

    def file(self, local: int, what: str) -> Path:
        return Path(self.folder, f"{what}{local}")

    def death(self, local: int, pid: int, code: int, start_method: str) -> Failure:
        """Return the failure of a process that could not report it."""
        how = describe_exit(code)
        if code == 0:
            how += " before the function returned (os._exit?)"
        if not self.file(local, "started").exists() and start_method != "fork":
            how += (
                "; it did not reach the function. Its own message is above; often the script lacks "
                'an `if __name__ == "__main__":`'
            )
        trace = ""
        for file in Path(self.folder).glob(f"loopwright-crash-{pid}-*"):
            text = crash_text(str(file))
            if text:
                crash, trace = describe_crash(text, 0)
                how = f"{how}: {crash}"
        return Failure(self.rank(local), socket.gethostname(), pid, how, trace=trace, when=time.time())


def _write_call(call: object, plan: _Plan, start_method: str) -> None:
    # Not through multiprocessing, which would put tensors into memory that all ranks share.
    try:
        torch.save(call, plan.file(0, "call"))
    except _UNPICKLABLE as error:
        raise LaunchError(
            f"Expected a function and arguments that can be pickled, since start_method={start_method!r} sends them to "
            f"other processes, got: {error}",
            fix="define functions and classes at the top level of a module, and open files and connections in hooks, "
            "or use strategy='ddp' or 'ddp_fork', which do not pickle.",
        ) from error


def _first_failure(plan: _Plan, server: TCPStore | None, deaths: list[Failure]) -> Failure:
    """Return the failure that caused the others."""
    posted = None
    if server is not None and server.check([rendezvous.FAILURE]):
        posted = Failure.from_json(server.get(rendezvous.FAILURE))
    known = [] if posted is None else [posted]
    reported = [
        Failure.from_json(file.read_text())
        for local in range(plan.num_processes)
        if (file := plan.file(local, "failure")).exists()
    ]
    known += sorted(reported, key=lambda failure: failure.when)
    causes = [failure for failure in known if not _CONSEQUENCE.search(failure.how)]
    return (causes + deaths + known)[0]


# -- in the new process ------------------------------------------------------------------------------------------------


def _run_rank(local: int, plan: _Plan) -> None:
    """Run the function as one rank and write its result or failure to a file; the main function of the process."""
    global _started_in
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # the terminal's Ctrl-C goes to the launching process, which forwards it
    for number, handler in plan.handlers.items():
        signal.signal(number, handler)
    watch_parent_process()
    _started_in = os.getpid()
    # Garbage inherited by a fork may own threads that only its parent has (the store of a failed run): collecting it
    # here would wait for them forever.
    gc.freeze()
    rank = plan.rank(local)
    code = 0
    try:
        plan.receive_port()
        plan.file(local, "started").touch()
        _, function, args, kwargs = _prepare(local, plan)
        result = function(*args, **kwargs)
        if local == 0:
            _write_result(result, plan.file(0, "result"))
        plan.file(local, "done").touch()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except StopBySignal:
        code = _TERMINATED
    except BaseException as error:  # the launching process raises it for the user
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
    """Set this process's rank and settings, and return its call."""
    variables = rank_variables(
        plan.address,
        plan.port,
        local_rank=local,
        num_processes=plan.num_processes,
        node_rank=plan.node_rank,
        num_nodes=plan.num_nodes,
    )
    os.environ.update(variables, LOOPWRIGHT_CRASH_FOLDER=plan.folder)
    torch.set_num_threads(plan.num_threads)
    if plan.settings is not None:
        plan.settings.apply()
    if plan.python_rng is not None:
        random.setstate(plan.python_rng)
    # Written by the launching process into a private folder.
    call = plan.call if plan.call is not None else torch.load(plan.file(0, "call"), weights_only=False)
    cluster = call[0]
    cluster.set_world_size(plan.num_processes * plan.num_nodes)
    cluster.set_global_rank(plan.rank(local))
    set_main_port = getattr(cluster, "set_main_port", None)
    if set_main_port is not None:
        set_main_port(plan.port)
    return call


def _write_result(result: object, file: Path) -> None:
    try:
        torch.save(result, file)
    except _UNPICKLABLE as error:
        raise LaunchError(
            f"Expected a result of rank 0 that can be pickled, got: {error}", fix="return tensors and plain values."
        ) from error


def _post(failure: Failure, plan: _Plan) -> None:
    """Notify the other ranks, also on other nodes."""
    store: Store | None = rendezvous.store()
    with suppress(RuntimeError):  # the store is gone, and with it the launching process and every reader
        if store is None:
            store = rendezvous.open_store(_StoreAddress(plan))
        store.compare_set(rendezvous.FAILURE, "", failure.to_json())


class _StoreAddress:
    """Address of the store, for a process whose cluster environment may have failed."""

    def __init__(self, plan: _Plan) -> None:
        self.main_address, self.main_port = plan.address, plan.port

    def world_size(self) -> int:
        return 1

    def global_rank(self) -> int:
        return 0
