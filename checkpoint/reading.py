"""Reading a checkpoint through whatever checkpoint IO there is. Called by Fabric and the Trainer, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .checkpoint_io import load_through

__all__ = ["prepare_on_all_ranks", "read_checkpoint"]


# Any in this file: a user's own IO, and what it returns.
def read_checkpoint(io: Any, path: str | Path, *, is_safe: bool, by_parts: bool, is_verified: bool = False) -> Any:
    """Return the content of a checkpoint, on the CPU.

    Args:
        io: A CheckpointIO.
        path: File, folder or URL.
        is_safe: Whether to read tensors and plain values only.
        by_parts: Whether tensors may stay in the file until a part of them is read (`protocols.StoredTensor`, or
            memory that the file is mapped to). An IO whose `load_checkpoint` takes no argument `lazy` reads all.
        is_verified: What `prepare_on_all_ranks` returned.
    """
    optional = {**({"lazy": True} if by_parts else {}), **({"verify": False} if is_verified else {})}
    return load_through(io, path, map_location="cpu", weights_only=is_safe, optional=optional)


def prepare_on_all_ranks(
    io: Any,
    path: str | Path,
    together: Callable[[Callable[[], bool]], bool],
    *,
    by_parts: bool,
    rank: int,
    size: int,
) -> bool:
    """Wait for saves in the background, and if ranks read parts, let them verify the checkpoint together.

    Args:
        io: A CheckpointIO.
        path: File, folder or URL.
        together: Calls a function on every rank, and raises an error of one on all.
        by_parts: Whether each rank reads its parts only; where each reads all, each verifies what it reads.
        rank: Of this process.
        size: Number of processes.

    Returns:
        Whether it is verified: each file by one of the ranks.

    Raises:
        CheckpointError: On every rank, if the share of one is damaged; or a save to this path failed.
    """
    wait_for = getattr(io, "wait_for", None) if getattr(io, "is_background", False) else None
    if size == 1 or not (by_parts or wait_for is not None):
        return False

    def prepare() -> bool:
        if wait_for is not None:  # which rank writes depends on the form: on others nothing is on its way
            wait_for(path)
        share = getattr(io, "verify_share", None) if by_parts else None
        return share is not None and bool(share(path, rank, size))

    return together(prepare)
