"""The layout of a checkpoint file: a zip archive of stored records, read as bytes.

    local header, name, padding | payload | descriptor     for each record
    directory                                              name, CRC-32, size and place of each record
    end record                                             where the directory is; a comment may follow

Everything but the payloads is called the frame here. zipfile is not used: a damaged file must give a damaged-file
error and nothing else, and 100,000 records should take a fraction of a second.

Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from operator import attrgetter
from typing import IO, NamedTuple

LOCAL_SIGNATURE = b"PK\x03\x04"
DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
END_SIGNATURE = b"PK\x05\x06"
ENTRY_SIGNATURE = b"PK\x01\x02"
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_END64_SIGNATURE = b"PK\x06\x06"

LOCAL = struct.Struct("<4s5H3L2H")
END = struct.Struct("<4s4H2LH")
ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")

_FULL_32 = 0xFFFFFFFF
_LONGEST_COMMENT = 0xFFFF


class Damaged(Exception):
    """A problem of a file, as a clause for an error message; storage.verify turns it into a CheckpointError."""


class ArchiveRecord(NamedTuple):
    """One record, as the directory has it.

    Attributes:
        name: Name without the archive's folder, such as `data.pkl` or `data/0`.
        crc: CRC-32 of the content.
        size: Bytes of the payload in the file.
        header: Offset of the local header in the file.
        is_stored: Whether the payload is the content itself, not compressed; torch never compresses.
    """

    name: str
    crc: int
    size: int
    header: int
    is_stored: bool


class Directory(NamedTuple):
    """The records in the order of the file, and what follows the end record.

    Attributes:
        records: All records.
        end: Offset of the end record.
        comment: The archive's comment.
    """

    records: list[ArchiveRecord]
    end: int
    comment: bytes


def read_exactly(file: IO[bytes], count: int) -> bytes:
    """Return the next `count` bytes, or raise Damaged."""
    data = file.read(count)
    if len(data) < count:
        raise Damaged(f"it ends {count - len(data)} bytes too early")
    return data


def read_directory(file: IO[bytes], size: int) -> Directory:
    """Return where everything is, from the end of a file of `size` bytes.

    Raises:
        Damaged: There is no directory, or it contradicts itself.
    """
    tail_start = max(0, size - END.size - _LONGEST_COMMENT)
    file.seek(tail_start)
    tail = read_exactly(file, size - tail_start)
    at = _find_end(tail)
    end = tail_start + at
    count, directory_size, directory_start = _read_end(file, tail[at : at + END.size], end)
    # These are checked before anything is read or allocated by them.
    if directory_start + directory_size > end or count * ENTRY.size > directory_size:
        raise Damaged("its end record contradicts the size of the file")
    file.seek(directory_start)
    raw = read_exactly(file, directory_size)
    records = sorted(_read_entries(raw, count), key=attrgetter("header"))
    return Directory(records, end, tail[at + END.size :])


def payloads(file: IO[bytes], directory: Directory) -> Iterator[tuple[ArchiveRecord | None, bytes]]:
    """Go through the file from its beginning and yield each record with the frame's bytes before its payload.

    The file is at the payload when a record is yielded; the caller may read it or not. The last pair has None
    and the frame's bytes up to the end record.

    Raises:
        Damaged: A local header is malformed, or records overlap.
    """
    position = 0
    file.seek(0)
    for record in directory.records:
        gap = record.header - position
        if gap < 0:
            raise Damaged(f"record {record.name!r} begins before the one before it ends")
        if record.header + LOCAL.size > directory.end:
            raise Damaged(f"its directory puts record {record.name!r} beyond its end")
        file.seek(position)
        frame = read_exactly(file, gap + LOCAL.size)
        fields = LOCAL.unpack_from(frame, gap)
        if fields[0] != LOCAL_SIGNATURE or position + len(frame) + fields[-2] + fields[-1] > directory.end:
            raise Damaged(f"the header of record {record.name!r} is altered")
        frame += read_exactly(file, fields[-2] + fields[-1])
        position += len(frame)
        if position + record.size > directory.end:
            raise Damaged(f"record {record.name!r} is larger than the file")
        yield record, frame
        position += record.size
    file.seek(position)
    yield None, read_exactly(file, directory.end - position)


def _find_end(tail: bytes) -> int:
    """Return where the end record is in the last bytes of a file: the one whose comment ends with the file."""
    at = len(tail)
    while (at := tail.rfind(END_SIGNATURE, 0, at)) >= 0:
        if at + END.size <= len(tail) and at + END.size + END.unpack_from(tail, at)[-1] == len(tail):
            return at
    raise Damaged("it has no end record: it is truncated, or its last bytes are altered")


def _read_end(file: IO[bytes], raw: bytes, end: int) -> tuple[int, int, int]:
    """Return the number of records, and the directory's size and offset."""
    _, _, _, _, count, directory_size, directory_start, _ = END.unpack(raw)
    if end < _LOCATOR.size:
        return count, directory_size, directory_start
    file.seek(end - _LOCATOR.size)
    signature, _, end64, _ = _LOCATOR.unpack(read_exactly(file, _LOCATOR.size))
    if signature != _LOCATOR_SIGNATURE:
        if count == 0xFFFF or _FULL_32 in (directory_size, directory_start):
            raise Damaged("its 64-bit end record is altered")
        return count, directory_size, directory_start
    if end64 + _END64.size > end:
        raise Damaged("its 64-bit end record is altered")
    file.seek(end64)
    fields = _END64.unpack(read_exactly(file, _END64.size))
    if fields[0] != _END64_SIGNATURE:
        raise Damaged("its 64-bit end record is altered")
    return fields[-3], fields[-2], fields[-1]


def _read_entries(raw: bytes, count: int) -> list[ArchiveRecord]:
    at, records = 0, []
    for _ in range(count):
        if at + ENTRY.size > len(raw):
            raise Damaged("its directory is too short")
        entry = ENTRY.unpack_from(raw, at)
        signature, method, crc, size, full_size = entry[0], entry[4], entry[7], entry[8], entry[9]
        name_length, extra_length, comment_length, header = entry[10], entry[11], entry[12], entry[16]
        if signature != ENTRY_SIGNATURE:
            raise Damaged("its directory is altered")
        at += ENTRY.size
        name = raw[at : at + name_length].decode("utf-8", "backslashreplace")
        if _FULL_32 in (size, full_size, header):
            extra = raw[at + name_length : at + name_length + extra_length]
            size, header = _read_extra64(extra, size=size, full_size=full_size, header=header)
        at += name_length + extra_length + comment_length
        records.append(ArchiveRecord(name.partition("/")[2], crc, size, header, method == 0))
    if at != len(raw):
        raise Damaged("its directory is too long")
    return records


def _read_extra64(extra: bytes, *, size: int, full_size: int, header: int) -> tuple[int, int]:
    """Return the stored size and header offset of a record beyond 4 GiB."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        at += 4
        if kind == 1:
            wanted = [full_size, size, header]
            numbers = iter(struct.unpack_from(f"<{min(length, len(extra) - at) // 8}Q", extra, at))
            _, size, header = (next(numbers, value) if value == _FULL_32 else value for value in wanted)
            return size, header
        at += length
    raise Damaged("the entry of a record beyond 4 GiB is altered")
