"""`refresh_file`: bring a local copy of a remote file that may have grown up to date, reading only what is new."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import BinaryIO

from .store import RemoteFile, RemoteStore

_TAIL = 256
_BLOCK = 1 << 24


def refresh_file(store: RemoteStore, pieces: Sequence[RemoteFile], target: str) -> None:
    """Make a local file equal to a remote one.

    A copy whose end is found again at its place in the remote file is continued; any other is replaced.

    Args:
        store: Where it is.
        pieces: The file and its parts, from `grown_files`.
        target: Path of the copy; its folder is made.

    Raises:
        OSError: A piece was changed or removed after it was listed; list again.
    """
    total = sum(piece.size for piece in pieces)
    try:
        known = os.path.getsize(target)
    except FileNotFoundError:
        known = 0
    if 0 < known <= total:  # also where parts were put together
        with open(target, "r+b") as file:
            begin = file.seek(max(0, known - _TAIL))
            tail = file.read()
            if _read(store, pieces, begin, known) == tail:
                _copy(store, pieces, known, total, file)
                return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = f"{target}.tmp"
    with open(temporary, "wb") as file:
        _copy(store, pieces, 0, total, file)
    os.replace(temporary, target)


def _copy(store: RemoteStore, pieces: Sequence[RemoteFile], begin: int, end: int, file: BinaryIO) -> None:
    for start in range(begin, end, _BLOCK):
        file.write(_read(store, pieces, start, min(end, start + _BLOCK)))


def _read(store: RemoteStore, pieces: Sequence[RemoteFile], begin: int, end: int) -> bytes:
    data, at = b"", 0
    for piece in pieces:
        first, last = max(begin - at, 0), min(end - at, piece.size)
        if first < last:
            data += store.read(piece.name, first, last)
        at += piece.size
    if len(data) != end - begin:
        raise OSError(f"{store.address(pieces[0].name)} was changed while it was read")
    return data
