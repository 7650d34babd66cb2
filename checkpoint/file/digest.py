"""The digest of a checkpoint file, with which a reader can verify every byte.

torch.save writes a CRC-32 of each record's payload into the archive's directory. The digest is a BLAKE2b hash of all
other bytes: headers, padding, the directory with these CRCs, the end record. It is stored in the archive's comment,
which zip readers, torch's among them, ignore. So the payloads are not read a second time to write it.

    loopwright-checkpoint/1 size=00000000000000001717 blake2b=<64 hexadecimal digits>
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from functools import cache
from io import FileIO
from operator import attrgetter
from typing import IO

from ...messages import counted
from ...protocols import Advance
from .archive import END, ArchiveRecord, Damaged, Directory, payloads, read_directory

FORMAT = "loopwright-checkpoint"
FORMAT_VERSION = 1

_DIGEST_SIZE = 32
_COMMENT_SIZE = len(f"{FORMAT}/{FORMAT_VERSION} size={0:020d} blake2b=") + 2 * _DIGEST_SIZE
_CHUNK = 1 << 20


class Verification:
    """The result of comparing all bytes of a file with its checksums.

    Attributes:
        directory: The records.
        has_digest: Whether the file has a digest.
        is_frame_intact: Whether the digest matches; True without one.
        altered: Records whose payload does not match their CRC.
    """

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.has_digest = False
        self.is_frame_intact = True
        self.altered: list[ArchiveRecord] = []


def append_digest(archive: FileIO) -> int:
    """Append the digest to an archive that torch.save has just written; return its new size in bytes.

    Reads the headers and the directory, not the payloads.

    Args:
        archive: File, open for reading and writing.
    """
    size = os.fstat(archive.fileno()).st_size
    with open(archive.fileno(), "rb", buffering=8192, closefd=False) as file:
        directory = read_directory(file, size)
        if directory.comment:
            raise Damaged("it has a comment already")
        digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
        for _, frame in payloads(file, directory):
            digest.update(frame)
        file.seek(directory.end)
        end = file.read(END.size)
    new_size = size + _COMMENT_SIZE
    text = _text(new_size)
    tail = end[:-2] + _COMMENT_SIZE.to_bytes(2, "little") + text
    digest.update(tail)
    tail += digest.hexdigest().encode()
    archive.seek(directory.end)
    while tail:
        tail = tail[archive.write(tail) :]
    return new_size


def compare_checksums(file: IO[bytes], size: int, advance: Advance | None = None) -> Verification:
    """Read a file of `size` bytes once, from its beginning to its end, and compare it with its checksums.

    Args:
        file: Open for reading.
        size: Size of the file, in bytes.
        advance: Called with the number of bytes whenever some of a record were read.

    Raises:
        Damaged: The structure is broken, so records cannot be verified.
    """
    directory = read_directory(file, size)
    result = Verification(directory)
    comment = directory.comment
    result.has_digest = _is_digest_comment(comment)
    # torch.save without CRCs (an option of torch) leaves zeros: there is nothing to compare with.
    has_checksums = result.has_digest or any(record.crc for record in directory.records)
    largest = max(directory.records, key=attrgetter("size"), default=None)
    buffer = memoryview(bytearray(0 if largest is None else min(_CHUNK, largest.size)))
    digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    for record, frame in payloads(file, directory):
        digest.update(frame)
        if record is not None:
            crc = _crc(file, record.size, buffer, advance)
            if has_checksums and record.is_stored and crc != record.crc:
                result.altered.append(record)
    if result.has_digest:
        file.seek(directory.end)
        tail = file.read(END.size + len(comment))
        digest.update(tail[: -2 * _DIGEST_SIZE])
        is_text_right = comment.startswith(_text(size))
        result.is_frame_intact = is_text_right and tail[-2 * _DIGEST_SIZE :] == digest.hexdigest().encode()
    return result


def has_digest(file: IO[bytes], size: int) -> bool:
    """Return whether a file of `size` bytes ends with a digest, right or wrong, without reading the rest."""
    file.seek(max(0, size - _COMMENT_SIZE))
    return file.read(_COMMENT_SIZE).startswith(FORMAT.encode())


def read_file_digest(file: IO[bytes]) -> str | None:
    """Return the digest at the end of a file without comparing it; None if there is none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _COMMENT_SIZE))
    text = file.read(_COMMENT_SIZE)
    return text[-2 * _DIGEST_SIZE :].decode("ascii", "replace") if text.startswith(FORMAT.encode()) else None


def _is_digest_comment(comment: bytes) -> bool:
    # A comment of this length with another beginning is a digest whose first bytes are altered.
    return len(comment) == _COMMENT_SIZE or comment.startswith(FORMAT.encode())


def _text(size: int) -> bytes:
    return f"{FORMAT}/{FORMAT_VERSION} size={size:020d} blake2b=".encode()


def _crc(file: IO[bytes], size: int, buffer: memoryview, advance: Advance | None) -> int:
    crc, update = 0, _crc32()
    while size > 0:
        count = file.readinto(buffer[: min(size, len(buffer))])  # type: ignore[attr-defined]  # typeshed's IO lacks it
        if not count:
            raise Damaged(f"it ends {counted(size, 'byte')} too early")
        crc = update(buffer[:count], crc)
        size -= count
        if advance is not None:
            advance(count)
    return crc


def crc32(content: bytes | memoryview, value: int = 0) -> int:
    """Return the CRC-32 of bytes, continued from that of earlier bytes. isal takes a fifth of zlib's time for it."""
    return _crc32()(content, value)


@cache
def _crc32() -> Callable[[bytes | memoryview, int], int]:
    try:
        from isal.isal_zlib import crc32
    except ImportError:  # there is no wheel for this platform
        return zlib.crc32
    return crc32
