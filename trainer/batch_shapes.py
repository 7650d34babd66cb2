"""Shapes and dtypes of a batch as a line of text. Imported when a step fails."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..protocols import Batch

_MOST = 8  # entries of one collection
_DEEPEST = 3


def shapes_of(batch: Batch, depth: int = 0) -> str:
    """Return what a batch is made of: "[Tensor (32, 28) float32, Tensor (32,) int64]".

    Args:
        batch: Tensors in lists, tuples and mappings, or any other object, whose type is named.
        depth: Collections around it.
    """
    if isinstance(batch, Tensor):
        where = "" if batch.device.type == "cpu" else f" on {batch.device}"
        dtype = str(batch.dtype).removeprefix("torch.")
        return f"{type(batch).__name__} {tuple(batch.shape)} {dtype}{where}"
    if (
        isinstance(batch, torch.Size | str | bytes)
        or depth == _DEEPEST
        or not isinstance(batch, Mapping | list | tuple)
    ):
        return type(batch).__name__
    if isinstance(batch, Mapping):
        entries = [f"{key!r}: {shapes_of(value, depth + 1)}" for key, value in list(batch.items())[:_MOST]]
    else:
        kinds = {type(one).__name__ for one in batch}
        if len(batch) > _MOST and len(kinds) == 1 and not isinstance(batch[0], Tensor):
            return f"{type(batch).__name__} of {len(batch)} {kinds.pop()}"
        entries = [shapes_of(value, depth + 1) for value in batch[:_MOST]]
    if len(batch) > _MOST:
        entries.append(f"... ({len(batch)} in all)")
    text = ", ".join(entries)
    if isinstance(batch, Mapping):
        return f"{{{text}}}"
    return f"({text})" if isinstance(batch, tuple) else f"[{text}]"
