"""Reading a checkpoint through whatever checkpoint IO there is.

All ranks read the same checkpoint, also where a save replaces it under its name meanwhile: they agree on what rank 0
sees, and each looks again when it has read. What differs is read once more by all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..protocols import CheckpointPlugin
from .checkpoint_io import load_through, saves_in_background

# Before each further attempt; a network file system may show other hosts what was there before for some seconds.
_PAUSES_S = (0.05, 0.2, 1.0, 4.0)


# Any in this file: what an IO returns, and what ranks exchange.
@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that read a checkpoint.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        gather: Returns the objects of all ranks, in rank order, on every rank.
        together: Calls a function on every rank, and raises an error of one on all.
    """

    rank: int
    size: int
    gather: Callable[[object], list[Any]]
    together: Callable[[Callable[[], object]], Any]


def read_on_all_ranks(io: CheckpointPlugin, path: str | Path, ranks: Ranks, *, is_safe: bool, by_parts: bool) -> Any:
    """Wait for saves in the background, and return the content of a checkpoint, on the CPU. On every rank.

    Args:
        io: Reads the checkpoint. Ranks can agree only on what it can `identify`.
        path: File, folder or URL. A rank that passes another path than rank 0 reads what is there.
        ranks: The processes that read.
        is_safe: Whether to read tensors and plain values only.
        by_parts: Whether tensors may stay in the file until a part of them is read (`protocols.StoredTensor`, or
            memory that the file is mapped to), and each rank verifies a share of the files. An IO whose
            `load_checkpoint` takes no argument `lazy` reads all.

    Raises:
        CheckpointError: On every rank: a save to this path failed, or it is damaged on one, or ranks see different
            ones again and again.
    """
    if ranks.size == 1:
        return _read(io, path, is_safe=is_safe, by_parts=by_parts, is_verified=False)
    share = getattr(io, "verify_share", None) if by_parts else None
    for pause_s in (0.0, *_PAUSES_S):
        time.sleep(pause_s)
        if saves_in_background(io):  # which rank writes depends on the format: on others nothing is pending
            ranks.together(lambda: io.wait_for(path))
        attempt = _Attempt(io, path, ranks)
        # Only the others' success makes this rank's share enough.
        is_verified = share is not None and bool(attempt.run(partial(share, path, ranks.rank, ranks.size)))
        content = attempt.run(partial(_read, io, path, is_safe=is_safe, by_parts=by_parts, is_verified=is_verified))
        others = [rank for rank, is_other in enumerate(ranks.gather(attempt.is_other)) if is_other]
        if not others:
            return content
    raise CheckpointError(
        f"rank {', '.join(map(str, others))} found another checkpoint at {str(path)!r} than rank 0 saw first, "
        f"{1 + len(_PAUSES_S)} times: it is replaced while it is read, or hosts have separate disks.",
        fix="read it when no program saves to this path; on separate disks, copy one checkpoint to all hosts.",
    )


class _Attempt:
    """One attempt to read the checkpoint that rank 0 sees when this is made, on every rank.

    Attributes:
        is_other: Whether this rank saw another one, before or after what it did.
    """

    def __init__(self, io: CheckpointPlugin, path: str | Path, ranks: Ranks) -> None:
        self._identify: Callable[[Any], str | None] = getattr(io, "identify", lambda path: None)
        self._path = path
        self._ranks = ranks
        named, expected = ranks.gather((str(path), self._identity()))[0]
        self._expected = expected if named == str(path) else None
        self.is_other = False

    def _identity(self) -> str | None:
        try:
            return self._identify(self._path)
        except Exception:  # of a user's plugin: on this rank alone, it is raised when the ranks read together
            return None

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function on every rank; an error of one is raised on all.

        Returns:
            What it returned; None if this rank sees another checkpoint, which also excuses an error of the function.
        """
        return self._ranks.together(lambda: self._run(function))

    def _run(self, function: Callable[[], Any]) -> Any:
        if self._sees_other():
            return None
        try:
            result = function()
        except Exception:  # of any kind: what was read was being replaced, or it is raised
            if self._sees_other():
                return None
            raise
        return None if self._sees_other() else result

    def _sees_other(self) -> bool:
        if not self.is_other:
            self.is_other = self._expected is not None and self._identify(self._path) != self._expected
        return self.is_other


def _read(io: CheckpointPlugin, path: str | Path, *, is_safe: bool, by_parts: bool, is_verified: bool) -> Any:
    optional = {**({"lazy": True} if by_parts else {}), **({"verify": False} if is_verified else {})}
    return load_through(io, path, map_location="cpu", weights_only=is_safe, optional=optional)
