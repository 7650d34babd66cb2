"""Ranks that start before they are needed: interpreters that import torch before `fit` is called, and wait for it.

A rank that waits becomes what a process started at the launch would be, or it is ended and such a process starts.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, SourceFileLoader
from pathlib import Path

from ...errors import LaunchError
from .command import own_command, run_by
from .parent_watchdog import ParentWatchdog
from .waiting_rank import WAITS

SWITCH = "LOOPWRIGHT_PRESTART"
"""0: ranks start at the launch. 1: they start early also in tests run by pytest, where by default they do not."""

_PROGRAM = str(Path(__file__).with_name("waiting_rank.py"))
_PACKAGE = __name__.partition(".")[0]
# May change until the launch: read by nothing that a waiting rank imports. All others may matter to the interpreter, to
# libraries that torch loads (OMP_*, MKL_*, LD_*), to torch, or to this package.
_MAY_CHANGE = (
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("LOOPWRIGHT_STORE", "LOOPWRIGHT_PARENT", "LOOPWRIGHT_SEED", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
)
_MAY_CHANGE_BEGIN = (
    "WANDB_",
    "MLFLOW_",
    "COMET_",
    "NEPTUNE_",
    "CLEARML_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "NCCL_",
)
_STATUS = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "Cpus_allowed", "Mems_allowed")


@dataclass(frozen=True)
class WaitingRank:
    """A process that waits for its environment.

    Attributes:
        process: It; it has the command of a rank, run by waiting_rank.py.
        watchdog: Delivers the environment, and ends the process with this one.
        command: The rank's own command.
        folder: Where it runs; None for this process's folder.
        environment: Environment variables that it started with.
        inherited: What else it has from this process.
    """

    process: subprocess.Popen[bytes]
    watchdog: ParentWatchdog
    command: list[str]
    folder: str | None
    environment: dict[str, str]
    inherited: tuple[object, ...]


_waiting: dict[int, WaitingRank] = {}
_is_registered = False


def prestart(num_processes: int, variables: Mapping[str, str]) -> None:
    """Start the further ranks of this node, unless that may change what they are or slow this process down.

    Args:
        num_processes: Number of processes on this node; those that wait already are kept.
        variables: Environment variables that decide how torch is imported.
    """
    global _is_registered
    if not _is_possible(num_processes):
        return
    try:
        commands = {local: own_command(local) for local in range(1, num_processes) if local not in _waiting}
    except LaunchError:  # the launch says so
        return
    if not _is_registered:
        atexit.register(end_waiting)
        os.register_at_fork(after_in_child=_forget)
        _is_registered = True
    environment = {**os.environ, **variables}
    with contextlib.suppress(OSError):  # out of processes or descriptors: the launch will say so, if it still is
        for local, (command, folder) in commands.items():
            _waiting[local] = _start(command, folder, environment)


def take(local: int, command: list[str], folder: str | None, environment: Mapping[str, str]) -> WaitingRank | None:
    """Let a waiting rank run the program, if it is what a process started now would be.

    Args:
        local: Local rank.
        command: The command that would start it now.
        folder: Where that would run; None for this process's folder.
        environment: All environment variables that it would have.

    Returns:
        The running rank, or None: the caller starts it.
    """
    rank = _waiting.pop(local, None)
    if rank is None:
        return None
    is_same = (rank.command, rank.folder, rank.inherited) == (command, folder, _inherited())
    if is_same and not _changed(rank.environment, environment) and rank.process.poll() is None:
        text = json.dumps({**environment, **rank.watchdog.variables}).encode()
        with contextlib.suppress(OSError):  # it has ended at this moment
            rank.watchdog.send(len(text).to_bytes(8, "little") + text)
            return rank
    _end(rank)
    return None


def end_waiting() -> None:
    """End the ranks that still wait."""
    while _waiting:
        _end(_waiting.popitem()[1])


def _is_possible(num_processes: int) -> bool:
    """Return whether ranks that start now would be those that start at the launch, and have separate cores."""
    switch = os.environ.get(SWITCH, "").strip().lower()
    if switch in ("0", "false", "off", "no") or ("PYTEST_CURRENT_TEST" in os.environ and not switch):
        return False
    flags = sys.flags
    return (
        sys.platform.startswith("linux")  # elsewhere nothing ends a process that imports as soon as its parent ends
        and len(os.sched_getaffinity(0)) >= num_processes
        and threading.current_thread() is threading.main_thread()  # its end would be taken for the process's
        and not getattr(sys, "frozen", False)
        and _is_script_or_module()
        and (sys.gettrace() is None and sys.getprofile() is None)  # a debugger attaches to what it sees start
        # They would show what they import.
        and not (flags.verbose or flags.inspect or flags.interactive)
        and "importtime" not in sys._xoptions
        and "PYTHONPROFILEIMPORTTIME" not in os.environ
        and "torch_xla" not in sys.modules  # a device may have room for one process
        and not _loads_libraries_before_torch()
    )


def _is_script_or_module() -> bool:
    """Return whether the program is a file of Python text or `-m module`, not a folder, an archive or compiled code."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is None:
        return type(getattr(main, "__loader__", None)) is SourceFileLoader
    name: str = spec.name
    return name != "__main__"


def _loads_libraries_before_torch() -> bool:
    """Return whether the program imported compiled modules of other packages first: libraries load in that order."""
    suffixes = tuple(EXTENSION_SUFFIXES)
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package == "torch":
            return False
        is_compiled = (getattr(module, "__file__", None) or "").endswith(suffixes)
        if is_compiled and package != "numpy" and package not in sys.stdlib_module_names:
            return True
    return True


def _start(command: list[str], folder: str | None, environment: Mapping[str, str]) -> WaitingRank:
    watchdog = ParentWatchdog()
    plan = {"parent": os.getpid(), "pipe": watchdog.descriptors[0], "modules": _modules()}
    try:
        process = subprocess.Popen(
            run_by(_PROGRAM, command),
            env={**environment, WAITS: json.dumps(plan)},
            cwd=folder,
            pass_fds=watchdog.descriptors,
        )
    except OSError:
        watchdog.close_read_end()
        watchdog.close()
        raise
    watchdog.close_read_end()
    return WaitingRank(process, watchdog, command, folder, dict(environment), _inherited())


def _modules() -> dict[str, str | None]:
    """Return names and files of what a rank imports while it waits, in the order in which this process did."""
    return {
        name: getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name in ("torch", _PACKAGE)
        or (name.startswith(f"{_PACKAGE}.") and not name.startswith(f"{_PACKAGE}.compat") and "__main__" not in name)
    }


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return names of the variables that a process should have had from its start."""
    return [
        name
        for name in {**before, **now}
        if before.get(name) != now.get(name) and name not in _MAY_CHANGE and not name.startswith(_MAY_CHANGE_BEGIN)
    ]


def _inherited() -> tuple[object, ...]:
    """Return what a new process has from this one, beside its command and its environment."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return (
        os.getcwd(),
        os.getpgrp(),
        os.getsid(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        Path("/proc/self/limits").read_text(),
        tuple(status.get(name) for name in _STATUS),
        tuple(_identity(descriptor) for descriptor in range(3)),
    )


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Return what file a descriptor refers to; None where it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _end(rank: WaitingRank) -> None:
    rank.process.send_signal(signal.SIGKILL)
    rank.process.wait()
    rank.watchdog.close()


def _forget() -> None:
    """Leave the ranks to the process that started them, in a fork of it."""
    while _waiting:
        rank = _waiting.popitem()[1]
        rank.process.returncode = 0  # else its end warns that it still runs
        rank.watchdog.close()
