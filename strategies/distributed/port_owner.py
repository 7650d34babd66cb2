"""The local process that listens on a port, for error messages. Linux only, and only processes of the same user."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"  # the state TCP_LISTEN in /proc/net/tcp


def port_owner(port: int) -> str | None:
    """Return the process that listens on a port of this machine, as "process 12 (python train.py)".

    Args:
        port: Number of the port.

    Returns:
        None if the process is not found: it does not exist, belongs to another user, or the system has no /proc.
    """
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net", table), port)}
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if not inodes.isdisjoint(_open_files(process)):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({command[:120]})"
    return None


def _open_files(process: Path) -> list[str]:
    """Return what the descriptors of a process refer to, without those that it closes meanwhile.

    In this process, the descriptor that lists the folder is one of them.
    """
    files = []
    for number in os.listdir(process / "fd"):
        with suppress(FileNotFoundError):
            files.append(os.readlink(process / "fd" / number))
    return files


def _listening(table: Path, port: int) -> list[str]:
    """Return the inodes of the sockets that listen on a port."""
    found = []
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rsplit(":", 1)[1], 16) == port:
                found.append(fields[9])
    return found
