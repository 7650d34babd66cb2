"""`PendingQueue`: a queue of unfinished writes in bounded memory; the rest waits in a file."""

from __future__ import annotations

import pickle
import tempfile
from collections import deque
from typing import IO, Any, TypeAlias

Write: TypeAlias = Any  # a row, or a function that is called


class PendingQueue:
    """First in, first out; at most `capacity` items that can be pickled are kept in memory.

    The file is temporary and has no name: it ends with the process. Items that cannot be pickled (functions), and all
    where the file cannot be written, stay in memory.

    Args:
        capacity: Items in memory.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Write] = deque()
        self._later: deque[int | tuple[Write]] = deque()  # a size in the file, or an item in a tuple
        self._file: IO[bytes] | None = None
        self._read = self._written = 0

    def __len__(self) -> int:
        return len(self._items) + len(self._later)

    def append(self, item: Write) -> None:
        """Put an item at the end."""
        if not self._later and len(self._items) < self._capacity:
            self._items.append(item)
            return
        self._later.append((item,) if callable(item) else self._store(item))

    def first(self) -> Write:
        """Return the oldest item and keep it."""
        if not self._items:
            self._fetch()
        return self._items[0]

    def pop(self) -> Write:
        """Remove and return the oldest item."""
        item = self.first()
        self._items.popleft()
        return item

    def clear(self) -> None:
        """Remove all items."""
        self._items.clear()
        self._later.clear()
        self._close()

    def _store(self, item: Write) -> int | tuple[Write]:
        try:
            data = pickle.dumps(item)
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as there is something in it
            self._file.seek(self._written)
            self._file.write(data)
        except (OSError, pickle.PicklingError, AttributeError, TypeError):  # the disk is full, say
            return (item,)
        self._written += len(data)
        return len(data)

    def _fetch(self) -> None:
        while self._later and len(self._items) < self._capacity:
            place = self._later.popleft()
            if isinstance(place, tuple):
                self._items.append(place[0])
                continue
            assert self._file is not None
            self._file.seek(self._read)
            self._items.append(pickle.loads(self._file.read(place)))  # written by this process only
            self._read += place
        if not self._later:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._read = self._written = 0
