"""`ScriptLauncher`: starts the other ranks of this node by running the user's command again (strategy="ddp")."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...errors import LaunchError
from ...strategies.distributed import rendezvous
from ..failure import Failure, describe_exit
from ..watch.shared import stop_watching
from . import InProcessLauncher, refuse_existing_ranks
from .command import own_command, sweep_job
from .parent_watchdog import ParentWatchdog
from .prestart import end_waiting, prestart, take
from .variables import rank_variables

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

    from ...protocols import Cluster

log = logging.getLogger(__name__)

R = TypeVar("R")

_POLL_S = 0.2
_TERMINATE_S = 3.0
_FAILING_S = 4.0
# Exit codes of a process that stopped on request: StopBySignal, and an uncaught KeyboardInterrupt.
_BY_SIGNAL = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGINT}
# The same, or of one that SIGTERM ended before it could stop by itself.
_STOPPED = {*_BY_SIGNAL, -signal.SIGTERM}
_REPORT_S = 30.0
_STORE_S = timedelta(seconds=10)

# The launcher that started processes here: they run the full script, so there cannot be a second set of them.
_started: ScriptLauncher | None = None


class ScriptLauncher(InProcessLauncher):
    """Makes this process the node's local rank 0, and runs the user's command again for each further rank.

    Each process runs the full script. The first `launch` in a process starts them; later calls (of this or another
    launcher with the same numbers) reuse them. They end with this process, for whatever reason. At the end of the
    script this process waits for them, and returns a nonzero exit code if one of them does.

    Args:
        cluster: Provides the address of rank 0 and this node's rank; receives the port.
        num_processes: Number of processes per node.
        num_nodes: Number of nodes; the user starts the command once on each.

    Attributes:
        grace_s: Seconds that this process has to end by itself after a process started here has failed, as it does when
            a collective breaks or the watch ends it. None for no limit.
    """

    def __init__(self, cluster: Cluster, num_processes: int, num_nodes: int = 1) -> None:
        self.grace_s: float | None = 10.0
        self._cluster = cluster
        self._num_processes = num_processes
        self._num_nodes = num_nodes
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._exits: dict[int, int] = {}
        self._watchdogs: list[ParentWatchdog] = []
        self._server: TCPStore | None = None
        self._pid = os.getpid()
        self._is_closing = threading.Event()
        self._left_by: BaseException | None = None
        self._job: str | None = None
        self._replaced: dict[str, str | None] = {}  # environment variables before the launch
        self._num_threads: int | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        """False: a prompt or a notebook has no script to run again."""
        return False

    def prepare(self) -> None:
        """Start the other ranks of this node: they import torch, and wait for the launch."""
        if started_here() is None:
            prestart(self._num_processes, {"OMP_NUM_THREADS": str(num_threads_per_process(self._num_processes))})

    def launch(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Start the other ranks of this node, unless they exist, and call the function as local rank 0.

        Raises:
            LaunchError: There is no command to run again, the port is in use, or processes run already in another
                number.
        """
        global _started
        owner = started_here()
        if owner is None:
            self._start()
            _started = owner = self
        elif (owner._num_processes, owner._num_nodes) != (self._num_processes, self._num_nodes):
            raise LaunchError(
                f"Expected devices and num_nodes of this script's first run ({owner._num_processes} processes on "
                f"{owner._num_nodes} node(s)), got {self._num_processes} processes on {self._num_nodes} node(s). Each "
                "process runs the full script.",
                fix="use the same devices= and num_nodes= for all runs of a script, or start separate processes for "
                "each run with strategy='ddp_spawn'.",
            )
        try:
            return function(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            owner._left_by = error
            raise

    def local_exits(self) -> dict[int, int]:
        """Return the exit codes of the processes started here that have ended, by local rank; negative for a signal."""
        owner = started_here() or self
        return {rank: code for rank, child in owner._children.items() if (code := child.poll()) is not None}

    def kill(self, signum: int) -> None:
        """Send a signal to the processes started here that still run."""
        owner = started_here() or self
        for child in owner._children.values():
            child.send_signal(signum)

    # -- starting ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        cluster, count = self._cluster, self._num_processes
        refuse_existing_ranks()
        cluster.validate_settings(count, self._num_nodes)
        commands = {local: own_command(local) for local in range(1, count)}  # raises before anything is opened
        if cluster.node_rank() == 0:
            self._server = rendezvous.host_store(
                cluster.main_address, cluster.main_port, is_one_machine=self._num_nodes == 1
            )
            rendezvous.keep_store(self._server)
            set_main_port = getattr(cluster, "set_main_port", None)
            if set_main_port is not None:
                set_main_port(self._server.port)
        rendezvous.keep_exits(self._find_ended)
        watchdog = ParentWatchdog()
        self._watchdogs = [watchdog]
        self._job = sweep_job()
        atexit.register(self._finish)
        try:
            for local, (command, folder) in commands.items():
                variables = {**os.environ, **self._variables(local)}
                early = take(local, command, folder, variables)
                if early is not None:
                    self._children[local] = early.process
                    self._watchdogs.append(early.watchdog)
                    continue
                variables.update(watchdog.variables)
                self._children[local] = subprocess.Popen(
                    command, env=variables, cwd=folder, pass_fds=watchdog.descriptors
                )
        except OSError as error:
            self._stop()
            raise LaunchError(
                f"Expected local rank {len(self._children) + 1} to start, got {type(error).__name__}: {error}.",
                fix="check the number of running processes and whether sys.executable is set.",
            ) from error
        finally:
            end_waiting()
        watchdog.close_read_end()
        # From now on this process is one of several, also for a Trainer that the script creates later.
        if "OMP_NUM_THREADS" not in os.environ:
            self._num_threads = torch.get_num_threads()
            torch.set_num_threads(num_threads_per_process(count))
        own = self._variables(0)
        self._replaced = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        if self._children:
            threading.Thread(target=self._supervise, name="loopwright-launcher", daemon=True).start()

    def _variables(self, local: int) -> dict[str, str]:
        cluster, count = self._cluster, self._num_processes
        ranks = rank_variables(
            cluster.main_address,
            cluster.main_port,
            local_rank=local,
            num_processes=count,
            node_rank=cluster.node_rank(),
            num_nodes=self._num_nodes,
        )
        return {**ranks, "OMP_NUM_THREADS": str(num_threads_per_process(count))}

    # -- while they run ------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Reap processes; if one fails, notify the other ranks and ensure that this process ends."""
        while not self._is_closing.wait(_POLL_S):
            # Ranks stopped by a signal may end one after the other, the last after writing a checkpoint.
            ended = {rank: code for rank, code in self.local_exits().items() if code and code not in _BY_SIGNAL}
            if ended:
                local, code = next(iter(ended.items()))
                break
        else:
            return
        failure = self._failure(local, code)
        self._post(failure)
        if self.grace_s is None or self._is_closing.wait(self.grace_s):
            return
        sys.stderr.write(f"\nloopwright: {failure.describe()}; ending the other ranks.\n")
        sys.stderr.flush()
        self._stop()
        os._exit(failure.exit_code)

    def _failure(self, local: int, code: int) -> Failure:
        return Failure(
            rank=self._cluster.node_rank() * self._num_processes + local,
            host=socket.gethostname(),
            pid=self._children[local].pid,
            how=describe_exit(code),
            when=time.time(),
        )

    def _find_ended(self, is_missing: Callable[[int], bool]) -> str | None:
        """Return the failure of a rank that ended before it connected, also with exit code 0; None without one."""
        ended = (self._failure(local, code) for local, code in self.local_exits().items())
        return next((failure.to_json() for failure in ended if is_missing(failure.rank)), None)

    def _post(self, failure: Failure) -> None:
        """Notify the other ranks, which may wait for the failed one. The first report counts."""
        store: Store
        try:
            # A separate connection: the main thread may be waiting on the other one.
            if self._server is None:
                store = rendezvous.open_store(self._cluster, _STORE_S)
            else:
                store = self._server.clone()  # type: ignore[attr-defined]  # missing in torch's types
            store.compare_set(rendezvous.FAILURE, "", failure.to_json())
        except RuntimeError as error:  # rank 0's node is gone, and its own launcher has reported
            log.debug("the failure of rank %d could not be published: %s", failure.rank, error)

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Wait for the started processes at interpreter exit, before the store closes."""
        if os.getpid() != self._pid:
            return  # a fork of this process is ending
        self._is_closing.set()
        # An uncaught exception or a stop: the others fail, stop or hang as well.
        is_failing = self._left_by is not None or getattr(sys, "last_value", None) is not None
        try:
            self._wait(_FAILING_S if is_failing else None)
        except KeyboardInterrupt:
            is_failing = True
        self._stop()
        codes = {rank: code for rank, code in self.local_exits().items() if code}
        if codes and not is_failing:
            if not set(codes.values()) <= _STOPPED:  # after a coordinated stop every rank has reported it
                exits = "; ".join(f"local rank {rank}: {describe_exit(code)}" for rank, code in codes.items())
                sys.stderr.write(f"\nloopwright: not every process ended with exit code 0: {exits}.\n")
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            # The only way to set an exit code while the interpreter is ending; our own cleanup is done.
            rendezvous.disconnect()
            os._exit(max(codes.values()) if max(codes.values()) > 0 else 1)

    def leave(self) -> None:
        """Wait for the processes of a completed job, and reset this process to one that has started none.

        Raises:
            LaunchError: One of them failed.
        """
        global _started
        self._is_closing.set()
        self._wait(None)
        codes = {rank: code for rank, code in self.local_exits().items() if code}
        if codes:
            exits = "; ".join(f"local rank {rank}: {describe_exit(code)}" for rank, code in codes.items())
            raise LaunchError(
                f"Expected exit code 0 from every process of the previous sweep job, got {exits}. This job cannot "
                "start.",
                fix="check the output of these processes, or run each job in its own process (another Hydra launcher).",
            )
        stop_watching()
        rendezvous.disconnect()
        atexit.unregister(self._finish)
        for watchdog in self._watchdogs:
            watchdog.close()
        self._cluster.teardown()
        for name, value in self._replaced.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        self._children, self._server, _started = {}, None, None

    def _wait(self, limit_s: float | None) -> None:
        """Wait until all have ended, or until the limit."""
        began = time.monotonic()
        next_report_s = _REPORT_S
        pause_s = 0.005
        while len(self.local_exits()) < len(self._children):
            waited_s = time.monotonic() - began
            if limit_s is not None and waited_s >= limit_s:
                return
            if waited_s >= next_report_s:
                living = sorted(set(self._children) - set(self.local_exits()))
                log.warning("this script has ended; waiting for local ranks %s to end (%.0f s)", living, waited_s)
                next_report_s *= 2
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)

    def _stop(self) -> None:
        """End running processes: SIGTERM first, then SIGKILL."""
        self._is_closing.set()
        if len(self.local_exits()) == len(self._children):
            return
        self.kill(signal.SIGTERM)
        self._wait(_TERMINATE_S)
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            child.wait()


def started_here() -> ScriptLauncher | None:
    """Return the launcher that has started processes from this one; None without one."""
    return _started if _started is not None and _started._pid == os.getpid() else None


def leave_ended_job() -> None:
    """Reset this process if the processes that it started belong to an earlier job of a sweep.

    The jobs of a sweep (Hydra's `--multirun`) run in this process one after the other, but the processes that it starts
    run one job and end.

    Raises:
        LaunchError: A process of the earlier job failed.
    """
    launcher = started_here()
    if launcher is not None and launcher._job is not None and launcher._job != sweep_job():
        launcher.leave()


def num_threads_per_process(num_processes: int) -> int:
    """Return OMP_NUM_THREADS if it is set, else this process's share of the cores, at least 1."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if requested.isdecimal() and int(requested) > 0:
        return int(requested)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)
