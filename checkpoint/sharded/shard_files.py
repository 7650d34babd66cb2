"""The files of one checkpoint folder as they are read: mapped or not, compared with their checksums or not yet.

What this process has compared, it does not compare again as long as the system says that the file is the same: ranks
verify a checkpoint together first, and then each reads its part.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import IO, TypeVar

from ...protocols import Advance
from ..file.digest import crc32
from .backends import LocalBackend, RemoteBackend
from .manifest import FILE_DIGEST_SIZE, Chunk, Manifest, digest_of
from .mapping import MappedFile, map_file
from .slices import fill, read_bytes

_MOST_THREADS = 8
_BUFFER = 1 << 18  # stays in the cache of a core between reading and summing
_WORTH_A_THREAD = 4 << 20
# Below it, one read of a span with gaps is cheaper than a read for each run of bytes: a page, a request.
_LOCAL_RUN = 4 << 10
_REMOTE_RUN = 1 << 20

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_Item = tuple[str, Chunk, int]  # path of a tensor, a chunk of it, the chunk's size in bytes

# Address of a file -> what the system said of it when its content was compared. Of the latest folder only.
_compared: dict[str, tuple[int, ...]] = {}


class ShardFiles:
    """The files of a folder, as its manifest has them. Threads may share it.

    Args:
        backend: The folder.
        manifest: Manifest of the checkpoint.
        content: The bytes that the manifest was decoded from.

    Attributes:
        least_run_bytes: Bytes in a row that are worth their own read.
    """

    def __init__(self, backend: LocalBackend | RemoteBackend, manifest: Manifest, content: bytes) -> None:
        self.backend = backend
        self.manifest = manifest
        self._digest = digest_of(content)
        self.least_run_bytes = _LOCAL_RUN if isinstance(backend, LocalBackend) else _REMOTE_RUN
        self._mapped: dict[str, tuple[tuple[int, ...] | None, MappedFile | None]] = {}  # with what it was then
        self._lock = threading.Lock()

    def is_of(self, backend: LocalBackend | RemoteBackend, content: bytes) -> bool:
        """Return whether these are the files of this folder, whose manifest has this content now."""
        return self.backend.address("") == backend.address("") and self._digest == digest_of(content)

    def mapped(self, name: str) -> MappedFile | None:
        """Return a file in memory, mapped at its first use; None if it must be read by other means."""
        identity = self._identity(name)
        with self._lock:
            known, mapped = self._mapped.get(name, (None, None))
            # One that was removed is there as long as it is mapped; one that was written to is mapped again.
            if isinstance(self.backend, LocalBackend) and identity is not None and identity != known:
                mapped = map_file(self.backend.folder / name, self.manifest.files[name].size)
                self._mapped[name] = (identity, mapped)
            return mapped

    def is_compared(self, name: str) -> bool:
        """Return whether this process has compared all content of a file, and it is the same file still."""
        identity = self._identity(name) or self._mapped.get(name, (None, None))[0]
        return identity is not None and _compared.get(self.backend.address(name)) == identity

    def not_compared(self) -> set[str]:
        """Return the names of the files whose content is not compared yet in this process."""
        return {name for name in self.manifest.files if not self.is_compared(name)}

    def frame_problems(self, only: set[str] | None = None) -> dict[str, str]:
        """Return what is wrong with the files as such, by name: presence, sizes, headers. Little is read.

        Args:
            only: The files to look at; None is all.
        """
        header_ends: dict[str, int] = {}
        for tensor in self.manifest.tensors.values():
            for chunk in tensor.chunks:
                header_ends[chunk.file] = min(chunk.start, header_ends.get(chunk.file, chunk.start))
        problems = {}
        for name in self.manifest.files:
            if only is None or name in only:
                problem = self._frame_problem(name, header_ends.get(name, 0))
                if problem:
                    problems[name] = problem
        return problems

    def content_problems(
        self, only: set[str] | None = None, *, num_sharing: int = 1, advance: Advance | None = None
    ) -> list[str]:
        """Return which chunks do not match their checksum, and which files cannot be read: all bytes are read once.

        Args:
            only: The files to read; None is all.
            num_sharing: Processes on this machine that do so at the same time.
            advance: Called with the number of bytes whenever a chunk was read, in whatever thread reads.
        """
        by_file: dict[str, list[_Item]] = {}
        for path, entry in self.manifest.tensors.items():
            for chunk in entry.chunks:
                if only is None or chunk.file in only:
                    by_file.setdefault(chunk.file, []).append((path, chunk, entry.chunk_bytes(chunk)))
        identities = {name: self._identity(name) for name in by_file}
        work = [part for name in sorted(by_file) for part in self._cut(name, by_file[name])]
        found = call_in_threads(lambda items: self._compare(items, advance), work, num_sharing=num_sharing)
        damaged_files = {part[0][1].file for part, problems in zip(work, found, strict=True) if problems}
        for name, identity in identities.items():
            if name not in damaged_files and identity is not None:
                self._note_compared(name, identity)
        return list(dict.fromkeys(problem for problems in found for problem in problems))

    def _frame_problem(self, name: str, header_end: int) -> str | None:
        entry = self.manifest.files[name]
        try:
            size = self.backend.size(name)
            if size != entry.size:
                word = "truncated" if size < entry.size else "too long"
                return f"{name} is {word}: it has {size} bytes of {entry.size}{self._held(name)}"
            with closing(self.backend.open(name)) as file:
                if name == self.manifest.state:
                    file.seek(max(0, size - FILE_DIGEST_SIZE))
                    if read_bytes(file, min(size, FILE_DIGEST_SIZE)) != entry.digest.encode():
                        return f"{name} is altered, or is not the one of this save"
                elif digest_of(read_bytes(file, header_end)) != entry.digest:
                    return f"{name} has an altered header{self._held(name)}"
        except FileNotFoundError:
            return f"{name} is missing{self._held(name)}"
        except (OSError, EOFError) as error:
            return _cannot_read(name, error)
        return None

    def _held(self, file: str) -> str:
        """Return which tensors a file holds, as the end of a sentence."""
        tensors = self.manifest.tensors.items()
        held = [path for path, entry in tensors if any(chunk.file == file for chunk in entry.chunks)]
        if not held:
            return ""
        more = f" and {len(held) - 3} more" if len(held) > 3 else ""
        return f" (it holds a part of {', '.join(held[:3])}{more})"

    def _cut(self, name: str, items: list[_Item]) -> Iterator[list[_Item]]:
        """Cut the work on a file so that threads share it; one that is not mapped is read in one go."""
        items.sort(key=lambda item: item[1].start)
        if self.mapped(name) is None:
            yield items
            return
        part: list[_Item] = []
        for item in items:
            part.append(item)
            if sum(size for _, _, size in part) >= _WORTH_A_THREAD:
                yield part
                part = []
        if part:
            yield part

    def _compare(self, items: list[_Item], advance: Advance | None) -> list[str]:
        """Return what is wrong with chunks of one file, in the order of the file."""
        name = items[0][1].file
        problems = []
        try:
            with ExitStack() as stack:
                mapped = self.mapped(name)
                if mapped is not None:
                    crc_of = mapped.crc32
                else:
                    crc_of = partial(_crc_of, stack.enter_context(closing(self.backend.open(name))))
                for path, chunk, size in items:
                    if crc_of(chunk.start, size) != chunk.crc32:
                        problems.append(wrong_content(path, chunk))
                    if advance is not None:
                        advance(size)
        except (OSError, EOFError) as error:
            problems.append(_cannot_read(name, error))
        return problems

    def _identity(self, name: str) -> tuple[int, ...] | None:
        """Return what changes when a file is written to; None if unknown."""
        if not isinstance(self.backend, LocalBackend):
            return None
        try:
            found = os.stat(self.backend.folder / name)
        except OSError:
            return None
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def _note_compared(self, name: str, identity: tuple[int, ...]) -> None:
        addresses = {self.backend.address(name) for name in self.manifest.files}
        for other in [address for address in _compared if address not in addresses]:
            _compared.pop(other, None)  # another thread may have done so
        _compared[self.backend.address(name)] = identity


def wrong_content(path: str, chunk: Chunk) -> str:
    """Return the sentence on a chunk whose bytes are not those that were written."""
    return f"the content of {path} at {list(chunk.offsets)} in {chunk.file} does not match its checksum"


def call_in_threads(
    function: Callable[[ItemT], ResultT], items: Sequence[ItemT], *, num_sharing: int = 1
) -> list[ResultT]:
    """Return a function's results for all items, called in as many threads as there are free cores.

    Args:
        function: Lets other threads run while it works: it reads files, or sums long spans of bytes.
        items: In the order of the results.
        num_sharing: Processes on this machine that do the same at this time.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it, macOS not
    num_cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    num_threads = min(_MOST_THREADS, num_cores // max(1, num_sharing), len(items))
    if num_threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="loopwright-read") as threads:
        return list(threads.map(function, items))


def _cannot_read(name: str, error: OSError | EOFError) -> str:
    return f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"


def _crc_of(file: IO[bytes], start: int, size: int) -> int:
    buffer = memoryview(bytearray(min(size, _BUFFER)))
    file.seek(start)
    crc = 0
    for begin in range(0, size, len(buffer)):
        piece = buffer[: min(len(buffer), size - begin)]
        fill(file, piece)
        crc = crc32(piece, crc)
    return crc
