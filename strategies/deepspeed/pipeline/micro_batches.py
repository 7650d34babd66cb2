"""Batches for a PipelineModule, split into micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from torch import Tensor

from ....errors import DataError, ModuleError
from ....protocols import Batch

__all__ = ["micro_batches_of", "pair_of", "shapes_of"]


def micro_batches_of(data: Batch, count: int) -> list[Sequence[Batch]]:
    """Return the micro-batches of a batch, or the next ones of an iterator; each a pair of inputs and labels.

    Args:
        data: Inputs and labels, each a tensor or a list or tuple of them; or an iterator of such pairs.
        count: Number of micro-batches, at least 1. A batch whose size it does not divide gives fewer.

    Raises:
        ModuleError: An item is not a pair.
        DataError: The iterator has ended, or the tensors differ in their number of samples.
    """
    if not isinstance(data, Iterator):
        return _split(pair_of(data), count)
    pairs = [pair_of(one) for one in islice(data, count)]
    if len(pairs) < count:
        raise DataError(
            f"Expected {count} micro-batches for a batch of the pipeline, got {len(pairs)} from the iterator.",
            fix="stop before the iterator ends, or pass batches, which are split into micro-batches.",
        )
    return pairs


def pair_of(batch: Batch) -> Sequence[Batch]:
    """Return the batch, which is a pair of inputs and labels.

    Raises:
        ModuleError: It is something else.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch
    shown = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, list | tuple) else "")
    raise ModuleError(
        f"Expected a pair of inputs and labels for a PipelineModule, got a {shown}.",
        fix="pass (inputs, labels), each a tensor or a tuple of tensors.",
    )


def _split(batch: Sequence[Batch], count: int) -> list[Sequence[Batch]]:
    sizes = {len(one) for one in _tensors(batch) if one.ndim}
    if len(sizes) != 1:
        raise DataError(
            f"Expected the same number of samples in all tensors of a batch for a PipelineModule, got {sorted(sizes)}.",
            fix="use the first dimension of inputs and labels for samples, or pass an iterator of micro-batches.",
        )
    size = sizes.pop()
    number = next(one for one in range(min(count, size), 0, -1) if size % one == 0)
    step = size // number
    return [tuple(_narrow(one, begin, step) for one in batch) for begin in range(0, size, step)]


def _tensors(data: Batch) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    if isinstance(data, list | tuple):
        return [one for item in data for one in _tensors(item)]
    raise DataError(
        f"Expected tensors in a batch for a PipelineModule, got a {type(data).__name__}.",
        fix="return inputs and labels as tensors or tuples of tensors.",
    )


def _narrow(data: Batch, begin: int, size: int) -> Batch:
    if isinstance(data, Tensor):
        return data.narrow(0, begin, size) if data.ndim else data
    assert isinstance(data, Iterable)  # see `_tensors`
    return tuple(_narrow(one, begin, size) for one in data)


def shapes_of(data: Batch) -> list[tuple[int, ...]]:
    """Return the shapes of inputs: a tensor, or a list or tuple of them."""
    return [tuple(one.shape) for one in _tensors(data)]
