"""`Peer`: another process of this machine, its state and its Python stack."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


def machine_key() -> str:
    """Return a key that two processes share if and only if each can look up the other by its pid.

    A host's name is not enough: containers on one machine may share it and not see each other's processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux, or a hardened one
        boot = space = ""
    return f"{socket.gethostname()}|{boot}|{space}"


@dataclass(frozen=True, slots=True)
class Peer:
    """The process of a rank.

    Attributes:
        rank: Global rank.
        local_rank: Rank on its host.
        host: Name of its host.
        machine: See `machine_key`.
        pid: Id of the process.
        started: Start time of the process in the kernel's ticks, which distinguishes it from a later process with the
            same pid; 0 where it is unknown.
        trace_signal: Signal on which it writes its Python stack to `trace_file`, even while it holds the interpreter's
            lock; 0 for none.
        trace_file: File that receives the stack.
        thread: Identifier of the training thread (`threading.get_ident`).
        crash_file: File that receives its Python stacks when a fatal signal ends it; "" for none.
    """

    rank: int
    local_rank: int
    host: str
    machine: str
    pid: int
    started: int
    trace_signal: int = 0
    trace_file: str = ""
    thread: int = 0
    crash_file: str = ""

    @classmethod
    def of_this_process(
        cls, rank: int, local_rank: int, *, trace_signal: int = 0, trace_file: str = "", thread: int = 0
    ) -> Peer:
        """Return this process as a peer."""
        host, pid = socket.gethostname(), os.getpid()
        return cls(rank, local_rank, host, machine_key(), pid, _stat(pid)[1], trace_signal, trace_file, thread)

    def to_dict(self) -> dict[str, object]:
        """Return the attributes as plain values."""
        return asdict(self)

    def ask_for_stack(self) -> int:
        """Request its Python stack, if possible; `read_stack` returns it a moment later.

        Returns:
            The size of its file before: where the stack will begin.
        """
        if not self.trace_signal or self.state() == "gone":
            return 0
        try:
            size = os.stat(self.trace_file).st_size
            os.kill(self.pid, self.trace_signal)
        except OSError:  # it has just ended, or belongs to another user
            return 0
        return size

    def read_stack(self, begin: int) -> list[str]:
        """Return the stack of the training thread, outermost line first; empty without one."""
        try:
            with open(self.trace_file, encoding="utf-8", errors="replace") as file:
                file.seek(begin)
                return stack_of(file.read(), self.thread)
        except OSError:
            return []

    def state(self) -> str:
        """Return the state of the process, on its machine only: "gone", or the kernel's letter (R, S, D, T)."""
        if not sys.platform.startswith("linux"):
            return "S" if _exists(self.pid) else "gone"
        letter, started = _stat(self.pid)
        # A zombie has ended; its parent has not read its exit code yet.
        if letter in ("", "Z", "X") or (self.started and started != self.started):
            return "gone"
        return letter


def _stat(pid: int) -> tuple[str, int]:
    """Return the state's letter and the start time of a process; ("", 0) without one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    # The name in brackets may itself hold blanks and brackets.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def stack_of(text: str, thread: int) -> list[str]:
    """Return the lines of one thread from a faulthandler dump, outermost line first."""
    lines: list[str] = []
    is_inside = False
    for line in text.splitlines():
        if "hread 0x" in line:
            is_inside = int(line.partition("0x")[2].split()[0], 16) == thread
        elif is_inside and line.startswith("  "):
            lines.append(line)
    return lines[::-1]


class StackOnSignal:
    """Makes this process's Python stack readable by neighbors, also while a C function blocks Python.

    faulthandler writes it from the C level, into a file in memory that neighbors read through /proc. Linux only. It
    stays for the life of the process: a neighbor's signal may still be pending, and would kill the process without it.

    Attributes:
        number: The signal; 0 where this is unsupported, or the program uses the signal itself.
        file: Path of the file for other processes.
    """

    def __init__(self) -> None:
        self.number = 0
        self.file = ""
        if not hasattr(os, "memfd_create") or not hasattr(signal, "SIGRTMAX"):
            return
        number = int(signal.SIGRTMAX) - 5
        if signal.getsignal(number) is not signal.SIG_DFL:
            return
        descriptor = os.memfd_create("loopwright-stack")
        faulthandler.register(number, file=descriptor, all_threads=True)
        self.number, self.file = number, f"/proc/{os.getpid()}/fd/{descriptor}"
