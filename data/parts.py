"""Parts of a batch along its first dimension, which run as micro-batches of a pipeline; and their outputs, joined."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import DataError
from ..protocols import AnyBatch, AnyOutput, Batch, StepOutput, Tree
from .move import find_batch_size, find_leaves, find_tensors, map_tree


def split_batch(
    batch: Batch, num_parts: int, *, num_samples: int | None = None, by: str = "micro_batches="
) -> tuple[list[AnyBatch], list[int]]:
    """Return a batch in parts of nearly equal size, the larger ones first, and the number of samples in each.

    Tensors are split along their first dimension. So are lists with as many entries as there are samples, and tuples of
    as many strings, unless there are tensors in them. Numbers, strings, None and tensors without dimensions are in
    every part. Containers keep their types. A batch with fewer samples than parts gives parts of one sample.

    Args:
        batch: A tensor or any nesting of lists, tuples, mappings and dataclasses; tensors of parts are views of it.
        num_parts: Number of parts.
        num_samples: Samples in the batch, if known otherwise: the first dimension must have them.
        by: The argument that asks for the parts, for the message, such as "micro_batches=".

    Raises:
        DataError: The tensors have no first dimension in common, or there is an object that cannot be split.
    """
    size = find_batch_size(batch)
    strange = sorted({type(value).__name__ for value in find_leaves(batch) if not _is_plain(value)})
    if size is None or strange or (num_samples is not None and num_samples != size):
        raise _unsplittable(batch, f"{by}{num_parts}", strange, num_samples)
    if size == 0:
        return [batch], [0]
    num_parts = min(num_parts, size)
    sizes = [size // num_parts + (index < size % num_parts) for index in range(num_parts)]
    parts = []
    start = 0
    for length in sizes:
        parts.append(_rows_of(batch, size, slice(start, start + length)))
        start += length
    return parts, sizes


def join_outputs(outputs: Sequence[AnyOutput], sizes: Sequence[int]) -> AnyOutput:
    """Return what a step returned for the parts of a batch as one output.

    Of dicts, each entry is joined: tensors with the samples of their part along the first dimension are concatenated,
    other values become a list with one value per part, None for a part without it. If the outputs are not dicts, the
    first one that is not None is returned: only their loss is read.
    """
    first = next((output for output in outputs if output is not None), None)
    if len(outputs) == 1 or not isinstance(first, dict):
        return first
    found = [output if isinstance(output, dict) else {} for output in outputs]
    return {key: _join([output.get(key) for output in found], sizes) for key in first}


def _join(values: list[AnyOutput], sizes: Sequence[int]) -> StepOutput:
    are_rows = all(
        isinstance(value, Tensor) and value.ndim and value.size(0) == size
        for value, size in zip(values, sizes, strict=True)
    )
    return torch.cat([value.detach() for value in values]) if are_rows else values


def _rows_of(batch: Batch, size: int, rows: slice) -> AnyBatch:
    def is_split(value: Tree) -> bool:
        if isinstance(value, Tensor):
            return bool(value.ndim)
        if not isinstance(value, list | tuple) or len(value) != size or any(True for _ in find_tensors(value)):
            return False
        return type(value) is list or (type(value) is tuple and all(isinstance(one, str) for one in value))

    return map_tree(batch, is_split, lambda value: value[rows])


def _is_plain(value: Tree) -> bool:
    if isinstance(value, Tensor):
        return not value.is_nested
    return value is None or isinstance(value, str | bytes | int | float | complex)


def _unsplittable(batch: Batch, into: str, strange: list[str], num_samples: int | None) -> DataError:
    shapes = dict.fromkeys(str(tuple(tensor.shape)) for tensor in find_tensors(batch) if not tensor.is_nested)
    got = f"tensors of shapes {', '.join(shapes)}" if shapes else "no tensors"
    if strange:
        got = f"a {', a '.join(strange)}"
    elif num_samples is not None:
        got += f" in a batch of {num_samples} samples"
    return DataError(
        f"Expected a batch whose tensors have the samples along their first dimension, to be split into {into}, "
        f"got {got}.",
        fix="let collate_fn return such tensors, and hold what belongs to no sample in the module; or pass "
        "a smaller batch size with accumulate_grad_batches in place of splitting.",
    )
