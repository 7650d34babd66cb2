"""Sums whose bits do not depend on the number of ranks: a fixed binary tree over numbered addends.

With `S` addends on `N` ranks, rank `r` has the addends `r`, `r + N`, `r + 2 N`, ... The lower levels of the tree join
neighbors, which are on different ranks: `sum_scattered`, by recursive halving. The upper levels join what a rank has
got so, one after the other: `TreeSum`, with one partial sum for each level. `S` and `N` are powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .clipping import total_norm
from .shards import is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Any: torch 2.13 has another name for the same.
gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Addend = list[Tensor | None]
"""Tensors to be added one by one to those of other addends; None counts as zero."""


class TreeSum:
    """The sum of addends that come one after the other. It holds log2 of their number, plus one."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Addend]] = []  # level in the tree, and the sum of that subtree

    def add(self, addend: Addend) -> None:
        """Add the next one; its tensors may be changed in place."""
        level = 0
        while self._parts and self._parts[-1][0] == level:
            addend = _added(self._parts.pop()[1], addend)
            level += 1
        self._parts.append((level, addend))

    def total(self) -> Addend:
        """Return the sum of what has come, as if zeros had filled the tree, and start over."""
        parts, self._parts = self._parts, []
        total = parts.pop()[1]
        while parts:
            total = _added(parts.pop()[1], total)
        return total

    def clear(self) -> None:
        """Start over."""
        self._parts.clear()


def _added(left: Addend, right: Addend) -> Addend:
    both = [(one, other) for one, other in zip(left, right, strict=True) if one is not None and other is not None]
    if both:
        torch._foreach_add_([one for one, _ in both], [other for _, other in both])
    return [other if one is None else one for one, other in zip(left, right, strict=True)]


def sum_scattered(rows: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's row of the sum over ranks, added as a binary tree over the ranks. On every rank.

    Each rank sends and receives as many bytes as in a reduce-scatter: half of the rows to its neighbor, then a quarter
    to the rank at distance two, and so on.

    Args:
        rows: Shape (ranks, n); may be changed in place.
        group: Ranks that take part, a power of two; None for all.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    # Halving by the lowest bit of the rank first leaves row `r` where the bits of `r` are reversed.
    bits = size.bit_length() - 1
    part = rows[[int(f"{row:0{bits}b}"[::-1], 2) for row in range(size)]] if bits > 1 else rows
    distance = 1
    while distance < size:
        halves = part.chunk(2)
        kept, sent = halves if not rank & distance else halves[::-1]
        received = torch.empty_like(kept)
        peer = rank ^ distance
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()
        part = kept.add_(received)
        distance *= 2
    return part.reshape(-1)


def tree_norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients as one vector; its bits do not depend on their sharding. On every rank.

    For the 2-norm. Each row of the sharded dimension is summed where it is; the sums of rows are gathered. Of another
    order it is that of `clipping.total_norm`.

    Args:
        gradients: Sharded along one axis of a mesh, or equal on all ranks.
        norm_type: Order of the norm.

    Returns:
        Shape (), float32 or the gradients' wider dtype, on their device.
    """
    if norm_type != 2.0 or not gradients:
        return total_norm(gradients, norm_type)
    dtype = torch.float32
    for one in gradients:
        dtype = torch.promote_types(dtype, one.dtype)
    sums: list[Tensor] = []
    chunks: list[tuple[int, int, Tensor]] = []  # place in `sums`, rows on all ranks, sums of this rank's rows
    mesh = None
    for number, one in enumerate(gradients):
        if not is_sharded(one):
            sums.append(_folded(_folded(_squares(one, 0, dtype)).reshape(1, -1)))
            continue
        mesh = one.device_mesh
        dim = int(getattr(one.placements[-1], "dim", 0))
        own = _folded(_squares(one.to_local(), dim, dtype))
        padded = own.new_zeros(-(-one.shape[dim] // mesh.size()))
        padded[: own.numel()] = own
        chunks.append((number, one.shape[dim], padded))
        sums.append(padded)
    if mesh is not None:
        mine = torch.cat([chunk for *_, chunk in chunks])
        everywhere = mine.new_empty(mesh.size() * mine.numel())
        gather_single(everywhere, mine, group=mesh.get_group())
        columns = everywhere.view(mesh.size(), -1).split([chunk.numel() for *_, chunk in chunks], dim=1)
        for (number, num_rows, _), column in zip(chunks, columns, strict=True):
            sums[number] = _folded(column.reshape(1, -1)[:, :num_rows].clone())
    return _folded(torch.cat([one.to(sums[0].device) for one in sums]).reshape(1, -1)).sqrt().reshape(())


def _squares(tensor: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the squares, shape (rows of the dimension, elements of a row), in new memory."""
    value = tensor.detach().to(dtype)
    rows = value.movedim(dim, 0) if value.ndim else value.reshape(1)
    return (rows * rows).reshape(rows.shape[0], math.prod(rows.shape[1:]))


def _folded(rows: Tensor) -> Tensor:
    """Return the sum of each row, shape (rows,), by adding halves: no kernel chooses the order. Changes `rows`."""
    while rows.shape[1] > 1:
        half = (rows.shape[1] + 1) // 2
        rows[:, : rows.shape[1] - half].add_(rows[:, half:])
        rows = rows[:, :half]
    return rows.reshape(-1)
