"""Crash file: receives a rank's Python stacks from faulthandler when a fatal signal (SIGSEGV, SIGABRT, ...) ends it.

C++ libraries abort a process without a Python traceback: gloo, for one, when ranks reduce tensors of different sizes.
The other ranks of the machine, or a launcher that provides the folder, read the file and report the stack.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.util
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from ...data.worker import CRASH_FILE
from .peers import stack_of

FOLDER = "LOOPWRIGHT_CRASH_FOLDER"
"""Environment variable in which a launcher names the folder; the default is the system's temporary folder."""

_opened: tuple[int, str] | None = None  # process, path
_MOST_BYTES = 1 << 16


def open_crash_file() -> str:
    """Open this process's crash file and return its path; once per process.

    Returns:
        "" where the program, or Python's `-X faulthandler`, has already enabled faulthandler; and in the process that
        started the others, which writes to its standard error instead.
    """
    global _opened
    if _opened is not None and _opened[0] == os.getpid():
        return _opened[1]
    # A fork inherits its parent's file and gets a separate one; a handler that the user enabled is kept.
    if faulthandler.is_enabled() and _opened is None:
        os.environ.pop(CRASH_FILE, None)
        return ""
    if _started_the_others():
        # They end with this process, so that no process is left to read a file.
        with suppress(OSError):
            faulthandler.enable(file=2, all_threads=True)
            os.environ[CRASH_FILE] = "stderr"
        return ""
    folder = os.environ.get(FOLDER)
    _remove_stale(Path(folder or tempfile.gettempdir()))
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"loopwright-crash-{os.getpid()}-", dir=folder)
    except OSError:  # a full or read-only disk: without a file, there is no stack
        return ""
    faulthandler.enable(file=descriptor, all_threads=True)
    _opened = os.getpid(), path
    os.environ[CRASH_FILE] = path  # for loader workers, however they are started
    atexit.register(_remove)
    # Processes that multiprocessing starts do not run atexit at their end, but these.
    multiprocessing.util.Finalize(None, _remove, exitpriority=0)
    return path


def _started_the_others() -> bool:
    # Not imported, or not completely, means that nothing was started.
    script = sys.modules.get(f"{__package__.rpartition('.')[0]}.launch.script")
    started_here = getattr(script, "started_here", None)
    return started_here is not None and started_here() is not None


def _remove_stale(folder: Path) -> None:
    """Remove the files of processes that were killed, so that they do not accumulate."""
    if not Path("/proc/self").exists():  # other processes are not visible
        return
    for path in folder.glob("loopwright-crash-*-*"):
        pid = path.name.split("-")[2]
        with suppress(OSError):  # another user's, or another process was faster
            if pid.isdecimal() and not Path("/proc", pid).exists() and not path.stat().st_size:
                path.unlink()


def _remove() -> None:
    if _opened is not None and _opened[0] == os.getpid():
        with suppress(OSError):
            os.unlink(_opened[1])


def crash_text(path: str) -> str:
    """Return the content of a crash file; "" without one."""
    if not path:
        return ""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return ""


def read_crash(path: str, thread: int) -> tuple[str, str]:
    """Return the cause of a crash and the Python stacks of the crashed and the training thread, outermost line first.

    Args:
        path: The crash file. It is removed, unless a launcher provided the folder.
        thread: Identifier of the training thread; 0 if unknown.

    Returns:
        A cause such as "Fatal Python error: Aborted", and the stacks; both "" without a crash.
    """
    text = crash_text(path)
    if path and FOLDER not in os.environ:
        with suppress(OSError):
            os.unlink(path)
    return describe_crash(text, thread) if text else ("", "")


def describe_crash(text: str, thread: int) -> tuple[str, str]:
    """Return cause and stacks as `read_crash` does, from the content of a crash file."""
    how = next((line for line in text.splitlines() if line.startswith("Fatal Python error")), "Fatal Python error")
    current = text.partition("Current thread 0x")[2].split()
    # The thread that crashed is often one of a library, which has no Python stack.
    idents = [thread, *([int(current[0], 16)] if current else [])]
    found = [stack_of(text, ident) for ident in dict.fromkeys(idents)]
    stacks = [lines for lines in found if any(line.startswith("  File") for line in lines)]
    if not stacks:
        return how, text
    return how, "\n".join("Stack (most recent call last):\n" + "\n".join(lines) for lines in stacks)
