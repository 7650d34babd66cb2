"""`verify`: compares a checkpoint with its checksums."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from ..errors import CheckpointError, nearest
from ..protocols import Advance, StorageOptions
from .file.archive import LOCAL_SIGNATURE, ArchiveRecord, Damaged, payloads
from .file.digest import FORMAT, FORMAT_VERSION, Verification, compare_checksums, has_digest
from .file.remote import Remote, as_local
from .formats import find_format

if TYPE_CHECKING:
    from .file.record_names import Storage

_BUFFER = 1 << 16
_MAX_NAMED = 5
_FIX = "use an older checkpoint (ckpt_path='last' skips damaged ones), or copy this one again from where it came."

PathT = TypeVar("PathT", str, Path)


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path; the message names others in its folder."""

    def __str__(self) -> str:
        return CheckpointError.__str__(self)


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of `verify` for an intact checkpoint.

    Attributes:
        sealed: Whether every byte was compared with a checksum; always true for a folder. A file without a digest (of
            torch.save and other libraries) has checksums for its records only, and one of torch's old format has none.
        size_bytes: Size of the file, or of all files of a folder.
        entries: Number of records in the archive; 0 in torch's old format. For a folder, the chunks of tensors too.
    """

    sealed: bool
    size_bytes: int
    entries: int


def verify(
    path: str | Path, storage_options: StorageOptions | None = None, *, advance: Advance | None = None
) -> Verified:
    """Read a checkpoint once and compare it with its checksums; nothing in it is executed.

    Args:
        path: File, folder of a sharded checkpoint, or URL.
        storage_options: Arguments of the remote file system.
        advance: Called with the number of bytes after each read, in the thread that reads.

    Raises:
        CheckpointNotFound: There is no such file.
        CheckpointError: It is truncated or altered, or is not a checkpoint; names the record and the tensor.
    """
    found = find_format(path, storage_options)
    if found is not None:
        return found.reader.verify(path, storage_options, advance=advance)
    local = as_local(path)
    if local is not None:
        return verify_as(local, str(path), advance)
    remote = Remote(str(path), storage_options)
    if not remote.exists():
        remote.check_readable()
        raise not_found(str(path), remote.neighbours())
    file, size = remote.open()
    with closing(file):
        return _verify_file(file, size, str(path), advance)


def is_folder_checkpoint(path: str | Path, storage_options: StorageOptions | None = None) -> bool:
    """Return whether a path or URL is the folder of a sharded checkpoint."""
    found = find_format(path, storage_options)
    return found is not None and found.name == "sharded"


def verify_as(path: Path, shown: str, advance: Advance | None = None) -> Verified:
    """Verify a local file that messages call `shown`; see `verify`."""
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe would block whoever opens it
            raise CheckpointError(
                f"{shown!r} is a pipe, a socket or a device, not a file or a folder.",
                fix="write its output to a file, and pass the path of that file.",
            )
        with open(path, "rb", buffering=_BUFFER) as file:
            return _verify_file(file, os.fstat(file.fileno()).st_size, shown, advance)
    except FileNotFoundError as error:
        raise not_found(shown, _neighbours(path)) from error
    except OSError as error:
        raise cannot_read(shown, error) from error


def newest_valid(
    paths_newest_first: Iterable[PathT], on_skip: Callable[[PathT, CheckpointError], object]
) -> PathT | None:
    """Return the first path whose checkpoint is intact, or None.

    Args:
        paths_newest_first: Files, folders or URLs.
        on_skip: Called with each damaged or missing one and its error.
    """
    for path in paths_newest_first:
        try:
            verify(path)
        except CheckpointError as error:
            on_skip(path, error)
        else:
            return path
    return None


def not_found(shown: str, neighbours: list[str]) -> CheckpointNotFound:
    """Return the error for a path where nothing is; `neighbours` are the names in its folder, newest first."""
    name = shown.rpartition("/")[2]
    known = [other for other in neighbours if other.endswith((".ckpt", ".pt", ".pth"))]
    what = f"there is no checkpoint at {shown!r}{nearest(name, known)}."
    if known:
        more = f" and {len(known) - _MAX_NAMED} more" if len(known) > _MAX_NAMED else ""
        what += f" That folder has {', '.join(known[:_MAX_NAMED])}{more}."
    return CheckpointNotFound(
        what, fix="pass the path of an existing file, or ckpt_path=None to start from the beginning."
    )


def cannot_read(shown: str, error: OSError) -> CheckpointError:
    """Return the error for a file that the system does not let us read."""
    if error.errno == errno.EISDIR:
        return CheckpointError(
            f"{shown!r} is a folder without manifest.json: not a checkpoint, or one whose save did not finish.",
            fix="pass the path of a .ckpt file, or of the folder of a sharded checkpoint whose save finished.",
        )
    return CheckpointError(
        f"the checkpoint {shown!r} cannot be read: {error.strerror or error}.",
        fix="check the permissions of the file and of the folders above it, and the disk.",
    )


def _verify_file(file: IO[bytes], size: int, shown: str, advance: Advance | None) -> Verified:
    file.seek(0)
    begin = file.read(64)
    if begin[:4] != LOCAL_SIGNATURE:
        if has_digest(file, size):
            raise _damaged(shown, "the header of its first record is altered")
        if begin[:1] == b"\x80":  # a pickle: torch's format before 1.6, which has no checksums
            return Verified(sealed=False, size_bytes=size, entries=0)
        raise _no_checkpoint(shown, size, begin)
    try:
        result = compare_checksums(file, size, advance)
    except Damaged as error:
        raise _damaged(shown, _explain_structure(file, size, error)) from error
    problems = _problems(file, result)
    if problems:
        raise _damaged(shown, "; ".join(problems))
    names = {record.name for record in result.directory.records}
    if "data.pkl" not in names or "constants.pkl" in names:
        kind = "a TorchScript program" if "constants.pkl" in names else "a zip archive that torch.save has not written"
        raise CheckpointError(
            f"{shown!r} is not a checkpoint: it is {kind}.", fix="pass a file that a Trainer has saved."
        )
    return Verified(sealed=result.has_digest, size_bytes=size, entries=len(names))


def _problems(file: IO[bytes], result: Verification) -> list[str]:
    problems = []
    if not result.is_frame_intact:
        comment = result.directory.comment.decode("ascii", "replace")
        format_name, _, rest = comment.partition("/")
        version = rest.partition(" ")[0]
        if format_name == FORMAT and version.isdecimal() and int(version) > FORMAT_VERSION:
            problems.append(
                f"its format has version {version}, and this Loopwright knows versions up to {FORMAT_VERSION}"
            )
        problems.append("its headers, its directory or its digest are altered")
    if result.altered:
        problems.append(_name_records(file, result))
    return problems


def _name_records(file: IO[bytes], result: Verification) -> str:
    from .file.record_names import read_storages  # only a damaged file needs names

    storages = {}
    if all(record.name != "data.pkl" for record in result.altered):
        for record, _ in payloads(file, result.directory):
            if record is not None and record.name == "data.pkl":
                storages = read_storages(file.read(record.size))
                break
    named = [_name_record(record, storages) for record in result.altered[:_MAX_NAMED]]
    more = f" and {len(result.altered) - _MAX_NAMED} more" if len(result.altered) > _MAX_NAMED else ""
    return f"the content does not match its checksum in {', '.join(named)}{more}"


def _name_record(record: ArchiveRecord, storages: dict[str, Storage]) -> str:
    storage = storages.get(record.name.removeprefix("data/"))
    if storage is not None and record.name.startswith("data/"):
        return f"{storage.path} (record {record.name!r})"
    what = " (the structure and all plain values)" if record.name == "data.pkl" else ""
    return f"record {record.name!r}{what}"


def _explain_structure(file: IO[bytes], size: int, error: Damaged) -> str:
    from .file.record_names import read_storages_from_front  # only a damaged file needs names

    needed = sum(storage.size_bytes for storage in read_storages_from_front(file, size).values())
    if needed > size:
        return f"it is truncated: it has {size} bytes, and its tensors alone are {needed} bytes"
    return f"{error} ({size} bytes were found)"


def _damaged(shown: str, problem: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {shown!r} is damaged: {problem}.", fix=_FIX)


def _no_checkpoint(shown: str, size: int, begin: bytes) -> CheckpointError:
    if LOCAL_SIGNATURE.startswith(begin):
        return _damaged(shown, f"it is truncated: it has {size} bytes")
    if begin.startswith(b"version https://git-lfs"):
        return CheckpointError(f"{shown!r} is a Git LFS pointer, not the file itself.", fix="run `git lfs pull`.")
    is_safetensors = begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") < size
    what = "a safetensors file: weights, without a run's state" if is_safetensors else f"it begins with {begin[:16]!r}"
    return CheckpointError(
        f"{shown!r} is not a checkpoint ({what}), or its first bytes are altered; it has {size} bytes.",
        fix="pass a file that a Trainer or torch.save has written.",
    )


def _neighbours(path: Path) -> list[str]:
    entries = []
    with contextlib.suppress(OSError), os.scandir(path.parent) as found:  # not there, or not ours: nothing to name
        for entry in found:
            with contextlib.suppress(OSError):  # a link that leads to itself
                if entry.is_file():
                    entries.append((entry.stat().st_mtime, entry.name))
    return [name for _, name in sorted(entries, reverse=True)]
