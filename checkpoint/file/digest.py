"""The seal: a digest that makes every byte of a checkpoint file checked.

torch.save writes a CRC-32 of each record's payload into the archive's directory. The seal is a BLAKE2b digest of all
other bytes - headers, padding, the directory with these CRCs, the end record - and stands in the archive's comment,
where zip readers, torch's among them, do not mind it. So the payloads are not read a second time to seal a file.

    loopwright-checkpoint/1 size=00000000000000001717 blake2b=<64 hexadecimal digits>
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from io import FileIO
from typing import IO

from .archive import END, Damaged, Directory, Record, payloads, read_directory

__all__ = ["FORMAT", "FORMAT_VERSION", "Audit", "audit", "is_sealed", "read_file_digest", "seal"]

FORMAT = "loopwright-checkpoint"
FORMAT_VERSION = 1

_DIGEST_SIZE = 32
_SEAL_SIZE = len(f"{FORMAT}/{FORMAT_VERSION} size={0:020d} blake2b=") + 2 * _DIGEST_SIZE
_CHUNK = 1 << 20


class Audit:
    """What a reading of all bytes found.

    Attributes:
        directory: The records.
        sealed: Whether the file has a seal.
        is_frame_intact: Whether the seal matches; True without one, since then nothing can be said.
        altered: Records whose payload does not match their CRC.
    """

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.sealed = False
        self.is_frame_intact = True
        self.altered: list[Record] = []


def seal(archive: FileIO) -> int:
    """Seal the archive that torch.save has just written; return its new size in bytes.

    Reads the headers and the directory, not the payloads.

    Args:
        archive: File, open for reading and writing.
    """
    size = os.fstat(archive.fileno()).st_size
    with open(archive.fileno(), "rb", buffering=8192, closefd=False) as file:
        directory = read_directory(file, size)
        if directory.comment:
            raise Damaged("it has a comment already")
        digest = _frame_digest(file, directory, read_payload=None)
        file.seek(directory.end)
        end = file.read(END.size)
    sealed_size = size + _SEAL_SIZE
    text = _text(sealed_size)
    tail = end[:-2] + _SEAL_SIZE.to_bytes(2, "little") + text
    digest.update(tail)
    tail += digest.hexdigest().encode()
    archive.seek(directory.end)
    while tail:
        tail = tail[archive.write(tail) :]
    return sealed_size


def audit(file: IO[bytes], size: int, advance: Callable[[int], object] | None = None) -> Audit:
    """Read a file of `size` bytes once, from its beginning to its end, and compare it with its checksums.

    Args:
        file: Open for reading.
        size: Of the file, in bytes.
        advance: Called with the number of bytes whenever some of a record were read.

    Raises:
        Damaged: The structure is broken, so that no record can be judged.
    """
    directory = read_directory(file, size)
    result = Audit(directory)
    comment = directory.comment
    result.sealed = _is_seal(comment)
    # torch.save without CRCs (an option of torch) leaves zeros: there is nothing to compare with.
    has_checksums = result.sealed or any(record.crc for record in directory.records)
    buffer = memoryview(bytearray(min(_CHUNK, max((record.size for record in directory.records), default=0))))

    def read_payload(record: Record) -> None:
        crc = _crc(file, record.size, buffer, advance)
        if has_checksums and record.is_stored and crc != record.crc:
            result.altered.append(record)

    digest = _frame_digest(file, directory, read_payload)
    if result.sealed:
        file.seek(directory.end)
        tail = file.read(END.size + len(comment))
        digest.update(tail[: -2 * _DIGEST_SIZE])
        is_text_right = comment.startswith(_text(size))
        result.is_frame_intact = is_text_right and tail[-2 * _DIGEST_SIZE :] == digest.hexdigest().encode()
    return result


def is_sealed(file: IO[bytes], size: int) -> bool:
    """Return whether a file of `size` bytes ends with a seal, right or wrong, without reading the rest."""
    file.seek(max(0, size - _SEAL_SIZE))
    return file.read(_SEAL_SIZE).startswith(FORMAT.encode())


def read_file_digest(file: IO[bytes]) -> str | None:
    """Return the digest in the seal at the end of a file, which nobody has compared; None without a seal."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _SEAL_SIZE))
    text = file.read(_SEAL_SIZE)
    return text[-2 * _DIGEST_SIZE :].decode("ascii", "replace") if text.startswith(FORMAT.encode()) else None


def _is_seal(comment: bytes) -> bool:
    # A comment of this very length with another beginning is a seal whose first bytes are altered.
    return len(comment) == _SEAL_SIZE or comment.startswith(FORMAT.encode())


def _text(size: int) -> bytes:
    return f"{FORMAT}/{FORMAT_VERSION} size={size:020d} blake2b=".encode()


def _frame_digest(
    file: IO[bytes], directory: Directory, read_payload: Callable[[Record], None] | None
) -> hashlib.blake2b:
    digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    for record, frame in payloads(file, directory):
        digest.update(frame)
        if record is not None and read_payload is not None:
            read_payload(record)
    return digest


def _crc(file: IO[bytes], size: int, buffer: memoryview, advance: Callable[[int], object] | None) -> int:
    crc = 0
    while size > 0:
        count = file.readinto(buffer[: min(size, len(buffer))])  # type: ignore[attr-defined]  # typeshed's IO lacks it
        if not count:
            raise Damaged(f"it ends {size} bytes too early")
        crc = zlib.crc32(buffer[:count], crc)
        size -= count
        if advance is not None:
            advance(count)
    return crc
