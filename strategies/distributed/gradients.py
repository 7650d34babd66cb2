"""Averaging of gradients over ranks, without hooks in backward passes; and gradients within a step that are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import ModuleError
from ...protocols import AnyFunction, Args, Kwargs
from .shards import local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BUCKET_BYTES = 25 * 2**20


class LostGradients(TorchFunctionMode):
    """Refuses None as a gradient that a step requests with `allow_unused=True`: it would be left out in silence.

    Args:
        error: Makes the error.
        of: Whether a tensor must have a gradient.
    """

    def __init__(self, error: Callable[[], ModuleError], of: Callable[[object], bool]) -> None:
        super().__init__()
        self._error, self._of = error, of

    def __torch_function__(
        self, func: AnyFunction, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is torch.autograd.grad:
            inputs = args[1] if len(args) > 1 else (kwargs or {})["inputs"]
            inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
            if any(got is None and self._of(one) for one, got in zip(inputs, result, strict=True)):
                raise self._error()
        return result


def average_gradients(parameters: Sequence[Tensor], group: ProcessGroup | None = None) -> None:
    """Average the gradients of these parameters over ranks, in place.

    A gradient that is None on some ranks counts as 0 there. If it is None on all ranks, it stays None. Only ranks with
    a missing gradient wait for the device.

    Args:
        parameters: The same parameters in the same order on all ranks, with dense gradients. If a tensor is sharded
            over other ranks than those of the group, its local shards are averaged.
        group: Ranks that take part; None for all.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trained]
    average_tensors(trained, gradients, group=group)
    for parameter, gradient in zip(trained, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient


def average_tensors(
    parameters: Sequence[Tensor],
    gradients: list[Tensor | None],
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Average one tensor per parameter over ranks, in place, as `average_gradients` does for gradients.

    Args:
        parameters: The same parameters in the same order on all ranks.
        gradients: One entry per parameter; None is replaced by zeros if other ranks have a tensor.
        dtype: dtype of these zeros; None for that of the parameter.
        group: Ranks that take part; None for all.
    """
    if not parameters:
        return
    # 1 for a dense gradient, more than there are ranks for a sparse one.
    size = dist.get_world_size(group)
    kinds = [0.0 if one is None else size + 1.0 if one.is_sparse else 1.0 for one in gradients]
    there = torch.tensor(kinds).to(parameters[0].device)
    dist.all_reduce(there, group=group)
    missing = [index for index, gradient in enumerate(gradients) if gradient is None]
    if missing:
        counts = there.tolist()
        for index in missing:
            if counts[index]:
                layout = torch.sparse_coo if counts[index] > size else torch.strided
                gradients[index] = torch.zeros_like(parameters[index], dtype=dtype, layout=layout)
    # A rank with all gradients does not read the counts: each of its parameters has a gradient on some rank, this one.
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.is_sparse:
            gradients[index] = _average_sparse(gradient, size, group)
            if parameters[index].grad is gradient:
                parameters[index].grad = gradients[index]
    present = (gradient for gradient in gradients if gradient is not None and not gradient.is_sparse)
    for bucket in _buckets(local(present)):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat.div_(size)
        dist.all_reduce(flat, group=group)
        pieces = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [p.view_as(g) for p, g in zip(pieces, bucket, strict=True)])


def _average_sparse(gradient: Tensor, size: int, group: ProcessGroup | None) -> Tensor:
    """Return the average of sparse gradients: their rows and values are gathered, because ranks have other ones."""
    mine = gradient.coalesce()
    count = torch.tensor(mine.indices().shape[1], device=mine.device)
    counts = [torch.empty_like(count) for _ in range(size)]
    dist.all_gather(counts, count, group=group)
    most = max(int(one) for one in counts)
    indices = mine.indices().new_zeros((most, mine.sparse_dim()))
    values = mine.values().new_zeros((most, *mine.values().shape[1:]))
    indices[: int(count)], values[: int(count)] = mine.indices().t(), mine.values() / size
    all_indices = [torch.empty_like(indices) for _ in range(size)]
    all_values = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(all_indices, indices, group=group)
    dist.all_gather(all_values, values, group=group)
    everything = torch.cat(all_indices).t(), torch.cat(all_values)
    return torch.sparse_coo_tensor(*everything, gradient.shape, check_invariants=False).coalesce()


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the gradients in order, in buckets of one dtype and device."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        differs = bool(bucket) and (gradient.dtype, gradient.device) != (bucket[0].dtype, bucket[0].device)
        if bucket and (differs or size >= _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket
