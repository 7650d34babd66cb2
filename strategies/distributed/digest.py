"""Digests of tensors: exact integer sums of their bits, made on their devices without a host read.

The bytes are read as 32-bit words. A digest is the sum of `word * (2 * position + 1)`, modulo 2**64: integers add up to
the same sum in any order. One flipped bit always changes it, since no odd number times a power of two below 2**32 is 0
modulo 2**64. So do two different words that are exchanged, unless 2**32 words lie between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_WORDS = 1 << 21  # at a time, with 60 MB of sums
_MANY = 1 << 14  # words per part from which separate sums cost less than a cumulative one


def unwrapped(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor of a subclass wraps, such as a DTensor's shard; a plain one itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]  # of a DTensor its mesh, too
    return [part for one in inner if isinstance(one, Tensor) for part in unwrapped(one)]


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that this rank holds of a tensor: its shard, or what a subclass wraps.

    Nothing is returned for a tensor without readable bits: sparse, nested, quantized, or without memory.
    """
    return [
        one
        for one in unwrapped(tensor)
        if one.layout is torch.strided and not (one.is_nested or one.is_quantized or one.is_meta)
    ]


def digests(groups: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Return one digest for each group of dense tensors: shape (groups,), int64.

    Positions count over all groups, so that only digests of groups with equal sizes before them can be compared.

    Args:
        groups: What `parts_of` has returned for each of several tensors; the memory format of a tensor does not matter.
        device: Device of the tensors.
    """
    with torch.no_grad():
        pieces = [[piece for one in group for piece in _words(one).split(_WORDS)] for group in groups]
        flat = [piece for group in pieces for piece in group]
        sums = [torch.zeros(0, dtype=torch.int64, device=device)]
        first = position = 0
        while first < len(flat):
            last, count = first + 1, len(flat[first])
            while last < len(flat) and count + len(flat[last]) <= _WORDS:
                count += len(flat[last])
                last += 1
            batch = flat[first:last]
            weights = torch.arange(2 * position + 1, 2 * (position + count) + 1, 2, device=device)
            product = weights.mul_(batch[0] if len(batch) == 1 else torch.cat(batch))
            sums.append(_sums(product, list(map(len, batch))))
            first, position = last, position + count
        return _sums(torch.cat(sums), list(map(len, pieces)))


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor as 32-bit words: shape (words,), where possible without a copy."""
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if len(raw) % 4:
        raw = torch.cat([raw, raw.new_zeros(4 - len(raw) % 4)])
    return (raw.clone() if raw.storage_offset() % 4 else raw).view(torch.int32)


def _sums(values: Tensor, lengths: list[int]) -> Tensor:
    """Return the sums of consecutive parts of a vector."""
    if len(values) > _MANY * len(lengths):
        return torch.stack([part.sum() for part in values.split(lengths)])
    borders = torch.tensor([0, *accumulate(lengths)]).to(values.device, non_blocking=True)
    totals = torch.cat([values.new_zeros(1), values.cumsum(0)])
    return totals.index_select(0, borders).diff()
