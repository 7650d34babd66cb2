"""Reading a checkpoint through whatever checkpoint IO there is. Called by Fabric and the Trainer, on every rank."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

__all__ = ["read_checkpoint"]


# Any: a user's own IO, and what it returns.
def read_checkpoint(io: Any, path: str | Path, *, is_safe: bool, by_parts: bool) -> Any:
    """Return the content of a checkpoint, on the CPU.

    Args:
        io: A CheckpointIO.
        path: File, folder or URL.
        is_safe: Whether to read tensors and plain values only.
        by_parts: Whether tensors may stay in the file until a part of them is read (`protocols.StoredTensor`, or
            memory that the file is mapped to). An IO whose `load_checkpoint` takes no argument `lazy` reads all.
    """
    options = {}
    if by_parts and "lazy" in inspect.signature(io.load_checkpoint).parameters:
        options["lazy"] = True
    return io.load_checkpoint(path, map_location="cpu", weights_only=is_safe, **options)
