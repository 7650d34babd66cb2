"""`RemoteStore`, a folder at a URL, through fsspec; and how a file that grows is kept there without being sent again.

Most object stores cannot append. A file that grows is therefore a base, `metrics.csv`, and after its first megabyte
also parts, `metrics.csv.part-<size of the base>-<offset of the part>`: they continue a base of exactly that size, so
parts that a new base has made stale are ignored. `cat metrics.csv metrics.csv.part-*` is the full file.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Self

from fsspec import AbstractFileSystem, get_filesystem_class
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from ..errors import ConfigError, LoopwrightError, MissingDependency

PART_BYTES = 1 << 20
_PART = re.compile(r"(?P<name>.+)\.part-(?P<base>\d{12})-(?P<begin>\d{12})")
_CHUNK = 1 << 24
# In these a file appears when it is complete. In others, such as sftp or smb, it is written beside and then moved.
_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "tos", "r2", "memory"})
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created", "modified")


def check_protocol(url: str, argument: str) -> None:
    """Refuse a URL that fsspec cannot open; connects to nothing.

    Args:
        url: The URL.
        argument: How the user calls it.

    Raises:
        MissingDependency: The protocol needs a package that is not installed.
        ConfigError: The protocol is unknown.
    """
    protocol = re.split("::|://", url)[0]
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        raise MissingDependency(package_of(protocol), needed_for=f"{argument}={url!r}") from error
    except ValueError as error:
        raise ConfigError(
            f"{argument}={url!r} cannot be understood: {error}.",
            fix="pass a local directory, or a URL of a protocol that fsspec knows, such as s3://bucket/logs.",
        ) from error


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Name the URL in errors of a store's library while it is read; that nothing is there remains a FileNotFoundError.

    Not as a CheckpointError: for a damaged checkpoint an older one is taken, which must not happen without a network.

    Raises:
        ConfigError: The store cannot be read: wrong credentials, no network.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, LoopwrightError):
        raise
    except Exception as error:  # each store has its own errors
        raise ConfigError(
            f"{url!r} cannot be read: {type(error).__name__}: {error}",
            fix="check the address, the credentials and the network.",
        ) from error


class ExplainedFile:
    """A file of a store, open for reading, whose errors name the URL; see `explained`. Other attributes are the file's.

    Args:
        file: As fsspec opens it.
        url: Its URL.
    """

    def __init__(self, file: IO[bytes], url: str) -> None:
        self._file, self._url = file, url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        with explained(self._url):
            return self._file.read(size)

    def readinto(self, buffer: memoryview) -> int:
        """Read the next bytes into a buffer and return their number."""
        with explained(self._url):
            count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]  # typeshed's IO lacks it
            return count


def make_folder(files: AbstractFileSystem, folder: str) -> None:
    """Make a folder and those above it, in a store that has folders.

    Object stores need none. Their file systems would make the bucket: one whose name is mistyped, for all to pay.
    """
    store = files
    while isinstance(below := getattr(store, "fs", None), AbstractFileSystem):  # of simplecache::, dir:: and the like
        store = below
    if not _is_whole(store):
        files.makedirs(folder, exist_ok=True)


def _is_whole(files: AbstractFileSystem) -> bool:
    protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
    return not _WHOLE.isdisjoint(protocols)


def package_of(protocol: str) -> str:
    """Return the package that fsspec needs for a protocol, as pip calls it."""
    path = known_implementations.get(protocol, {}).get("class", protocol)
    package = path.partition(".")[0]
    return protocol if package == "fsspec" else package


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store.

    Attributes:
        name: Path below the store's folder.
        size: In bytes.
        stamp: What differs between two versions of one size; empty if the store has none.
        modified: Seconds since 1970; 0 if the store does not say.
    """

    name: str
    size: int
    stamp: str
    modified: float = 0.0


class RemoteStore:
    """The files below a URL; every call reads the store.

    Pickling and forks are allowed: each process connects for itself.

    Args:
        url: Address of a folder that fsspec understands; it need not be there.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._process = -1
        self._connection: tuple[AbstractFileSystem, str] | None = None
        self._made: set[str] = set()

    def __reduce__(self) -> tuple[type[RemoteStore], tuple[str]]:
        return (RemoteStore, (self.url,))

    def address(self, name: str) -> str:
        """Return the URL of a file."""
        return posixpath.join(self.url, name) if name else self.url

    def names(self, folder: str = "") -> set[str]:
        """Return the names directly in a folder; none if it is not there."""
        files, key = self._connect()
        files.invalidate_cache()
        path = _join(key, folder)
        try:
            found = files.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        # A store without folders may have an empty object in a folder's place, which lists itself.
        return {posixpath.basename(str(name).rstrip("/")) for name in found if _bare(name) != _bare(path)}

    def files(self, folder: str = "") -> dict[str, RemoteFile]:
        """Return the files in a folder and below it, by their path below the store's own folder."""
        files, key = self._connect()
        files.invalidate_cache()
        try:
            found: Mapping[str, Mapping[str, Any]] = files.find(_join(key, folder), detail=True)
        except FileNotFoundError:
            return {}
        start = _bare(key)
        result = {}
        for path, facts in found.items():
            name = _bare(path).removeprefix(start).lstrip("/")
            stamps = [facts[each] for each in _STAMPS if facts.get(each) is not None]
            modified = next((seconds for each in stamps if (seconds := _seconds(each))), 0.0)
            result[name] = RemoteFile(name, int(facts.get("size") or 0), " ".join(map(str, stamps)), modified)
        return result

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of a file from `begin` to before `end`."""
        files, key = self._connect()
        return bytes(files.cat_file(_join(key, name), start=begin, end=end))

    def write(self, name: str, source: str, begin: int, end: int) -> None:
        """Put bytes of a local file there, over what is there; a reader sees the old content or the new one.

        Args:
            name: Of the remote file.
            source: Path of the local file.
            begin: Offset in it.
            end: Offset of the byte after the last.
        """
        files, key = self._connect()
        path = _join(key, name)
        folder, last = posixpath.split(path)
        if folder not in self._made:
            make_folder(files, folder)
            self._made.add(folder)
        if _is_whole(files):
            _put(files, path, source, begin, end)
            return
        beside = posixpath.join(folder, f".{last}.tmp-{os.urandom(4).hex()}")
        try:
            _put(files, beside, source, begin, end)
            try:
                files.mv(beside, path)
            except FileExistsError:  # smb, say, moves over nothing
                files.rm_file(path)
                files.mv(beside, path)
        except BaseException:
            if files.exists(beside):
                files.rm_file(beside)
            raise

    def mark(self, name: str) -> None:
        """Put a small file there."""
        files, key = self._connect()
        path = _join(key, name)
        make_folder(files, posixpath.dirname(path))
        files.pipe_file(path, b"\n")

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""
        files, key = self._connect()
        try:
            files.rm_file(_join(key, name))
        except FileNotFoundError:
            return

    def remove_empty(self, folder: str) -> None:
        """Remove a folder that has nothing in it, if the store has folders."""
        files, key = self._connect()
        path = _join(key, folder)
        with contextlib.suppress(OSError, NotImplementedError):  # not empty, or no real folder
            if not self.names(folder) and files.isdir(path):
                files.rmdir(path)

    def _connect(self) -> tuple[AbstractFileSystem, str]:
        if self._connection is None or self._process != os.getpid():  # clients with threads do not survive a fork
            files, key = url_to_fs(self.url)
            self._connection, self._process = (files, key), os.getpid()
            self._made.clear()
        return self._connection


def part_name(name: str, base: int, begin: int) -> str:
    """Return the name of the part that continues a base of this size and begins at this offset of the full file."""
    return f"{name}.part-{base:012d}-{begin:012d}"


def grown_files(files: Iterable[RemoteFile]) -> dict[str, list[RemoteFile]]:
    """Return every file with the parts that continue it, in order; stale parts, and those after a gap, are left out."""
    bases: dict[str, list[RemoteFile]] = {}
    parts: dict[tuple[str, int], dict[int, RemoteFile]] = {}
    for file in files:
        found = _PART.fullmatch(file.name)
        if found is None:
            bases[file.name] = [file]
        else:
            parts.setdefault((found["name"], int(found["base"])), {})[int(found["begin"])] = file
    for name, pieces in bases.items():
        at = pieces[0].size
        following = parts.get((name, at), {})
        while at in following:
            part = following.pop(at)
            pieces.append(part)
            at += part.size
    return bases


def _put(files: AbstractFileSystem, path: str, source: str, begin: int, end: int) -> None:
    with open(source, "rb") as file:
        file.seek(begin)
        if end - begin <= _CHUNK:
            files.pipe_file(path, file.read(end - begin))
            return
        with files.open(path, "wb") as target:  # in blocks: memory for a large file is not taken from the training
            left = end - begin
            while left:
                data = file.read(min(left, _CHUNK))
                if not data:
                    raise OSError(f"{source} became shorter while it was sent")
                target.write(data)
                left -= len(data)


def _join(key: str, name: str) -> str:
    return f"{key.rstrip('/')}/{name}" if name and key else name or key


def _bare(path: str) -> str:
    return str(path).strip("/")


def _seconds(value: Any) -> float:  # Any: each store has another type
    if isinstance(value, int | float):
        return float(value)
    return float(value.timestamp()) if hasattr(value, "timestamp") else 0.0
