"""A program in a real terminal of a given width, and what it wrote there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(program: Callable[[], object], *, columns: int) -> list[str]:
    """Run a function in a copy of this process whose streams are a terminal; return the lines that were drawn.

    Each line is what stood between two movements of the cursor to a line's beginning, without colors.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    pid = os.fork()
    if pid == 0:
        _become(program, slave)
    os.close(slave)
    written = bytearray()
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # Linux, when the other side is closed
            break
        if not data:
            break
        written += data
    os.close(master)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = written.decode()
    assert code == 0, text
    return [_ESCAPES.sub("", line).rstrip() for line in re.split(r"[\r\n]+|\x1b\[\d*A", text) if line.strip()]


def _become(program: Callable[[], object], slave: int) -> None:
    code = 1
    try:
        os.setsid()
        for number in range(3):
            os.dup2(slave, number)
        os.environ["TERM"] = "xterm"
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "r" if not number else "w") for number in range(3))
        program()
        sys.stdout.flush()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)
