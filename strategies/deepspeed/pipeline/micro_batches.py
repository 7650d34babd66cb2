"""Batches for a PipelineModule, cut into the micro-batches that its stages work on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....errors import DataError, ModuleError

__all__ = ["cut", "pair_of", "shapes_of"]

# Any in this file: the batches of users.


def pair_of(batch: Any) -> Sequence[Any]:
    """Return the batch, which is a pair of inputs and labels.

    Raises:
        ModuleError: It is something else.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch
    shown = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, list | tuple) else "")
    raise ModuleError(
        f"a batch for a PipelineModule is a {shown}, expected a pair of inputs and labels.",
        fix="pass (inputs, labels), each a tensor or a tuple of tensors.",
    )


def cut(batch: Sequence[Any], count: int) -> list[tuple[Any, Any]]:
    """Return a batch in equal parts along the first dimension: `count`, or as many fewer as divide it.

    Args:
        batch: Inputs and labels; each a tensor or a list or tuple of them.
        count: At least 1.

    Raises:
        DataError: The tensors have unequally many samples, or there is something else among them.
    """
    sizes = {len(one) for one in _tensors(batch) if one.ndim}
    if len(sizes) != 1:
        raise DataError(
            f"the tensors of a batch have {sorted(sizes)} samples, and micro-batches are cut from all alike.",
            fix="let the first dimension of inputs and labels be that of samples; or pass an iterator of "
            "micro-batches.",
        )
    size = sizes.pop()
    number = next(one for one in range(min(count, size), 0, -1) if size % one == 0)
    step = size // number
    return [(_narrow(batch[0], begin, step), _narrow(batch[1], begin, step)) for begin in range(0, number * step, step)]


def _tensors(data: Any) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    if isinstance(data, list | tuple):
        return [one for item in data for one in _tensors(item)]
    raise DataError(
        f"a batch for a PipelineModule has a {type(data).__name__} in it, and stages exchange tensors.",
        fix="let inputs and labels be tensors, or tuples of tensors.",
    )


def _narrow(data: Any, begin: int, size: int) -> Any:
    if isinstance(data, Tensor):
        return data.narrow(0, begin, size) if data.ndim else data
    return tuple(_narrow(one, begin, size) for one in data)


def shapes_of(data: Any) -> list[tuple[int, ...]]:
    """Return the shapes of inputs: a tensor, or a list or tuple of them."""
    return [tuple(one.shape) for one in _tensors(data)]
