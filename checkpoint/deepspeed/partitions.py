"""Full tensors from the flat tensors in the files of DeepSpeed's ranks.

In stages 1 and 2 ZeRO concatenates the parameters of a group, and each rank has a slice of the result. In stage 3 it
partitions each parameter over the ranks, and each rank concatenates its slices. The layouts follow from the saved
shapes; tests compare the result with DeepSpeed's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensors import StoredTensor, narrow


class Misfit(Exception):
    """The lengths of saved tensors do not fit the saved shapes."""


class MergedTensor(StoredTensor):
    """A tensor whose pieces are in several files, not read yet."""

    def __init__(self, path: str, shape: Sequence[int], pieces: Sequence[Tensor], dtype: torch.dtype) -> None:
        super().__init__(path, shape, dtype)
        self._pieces = tuple(pieces)
        found = sum(piece.numel() for piece in pieces)
        if found != self.shape.numel():
            raise Misfit(f"{path} has the shape {tuple(shape)}, and there are {found} elements of it")

    def _read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        full = torch.empty(self.shape.numel(), dtype=self.dtype)
        at = 0
        for piece in self._pieces:
            full.narrow(0, at, piece.numel()).copy_(piece)
            at += piece.numel()
        full = full.reshape(self.shape)
        return full if sizes == self.shape else narrow(full, offsets, sizes).clone()


class Flat:
    """The concatenation of flattened tensors, without a copy.

    Attributes:
        size: Number of elements.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = [part.detach().reshape(-1) for part in parts]
        self.size = sum(part.numel() for part in self._parts)

    def pieces(self, start: int, size: int) -> list[Tensor]:
        """Return the elements from `start` on as views of the parts; fewer elements where it ends before."""
        found = []
        for part in self._parts:
            piece = part[start : start + size]
            if piece.numel():
                found.append(piece)
            start, size = max(0, start - part.numel()), size - piece.numel()
        return found


@dataclass(frozen=True, slots=True)
class PartitionLayout:
    """The location of a parameter.

    Attributes:
        shape: Shape of the full parameter.
        group: Number of its group, or in stage 3 of its subgroup.
        slices: (number of a flat tensor, offset in it, number of elements) of each slice of the parameter.
    """

    shape: torch.Size
    group: int
    slices: tuple[tuple[int, int, int], ...]

    def merged(self, path: str, flats: Sequence[Flat], dtype: torch.dtype) -> MergedTensor:
        """Return the parameter, or a tensor of its optimizer's state, from the flat tensors."""
        pieces = [piece for number, start, size in self.slices for piece in flats[number].pieces(start, size)]
        return MergedTensor(path, self.shape, pieces, dtype)


Shapes = Sequence[Mapping[str, Sequence[int]]]
"""Shapes of parameters by name, in order, for each group or subgroup."""


def group_layouts(
    shapes: Shapes, sizes: Sequence[int], paddings: Sequence[Sequence[int]] | None, num_ranks: int
) -> dict[str, PartitionLayout]:
    """Return the layouts in the flat tensors of the groups: stages 1 and 2.

    Args:
        shapes: Of each group.
        sizes: Number of elements of each group on all ranks.
        paddings: Number of padding elements after each parameter; None: no padding.
        num_ranks: Groups are padded to a multiple of twice this number.

    Raises:
        Misfit: There are more or fewer elements than the shapes need.
    """
    layouts = {}
    for group, members in enumerate(shapes):
        at = 0
        for position, (name, shape) in enumerate(members.items()):
            size = math.prod(shape)
            layouts[name] = PartitionLayout(torch.Size(shape), group, ((group, at, size),))
            at += size + (paddings[group][position] if paddings is not None else 0)
        step = 2 * num_ranks
        if math.ceil(at / step) != math.ceil(sizes[group] / step):
            raise Misfit(f"the parameters of group {group} need {at} elements, and the files have {sizes[group]}")
    return layouts


def parameter_layouts(shapes: Shapes, sizes: Sequence[int]) -> dict[str, PartitionLayout]:
    """Return the layouts in the flat tensors of the ranks: stage 3.

    Args:
        shapes: Of each subgroup.
        sizes: Number of elements on each rank.

    Raises:
        Misfit: There are more or fewer elements than the shapes need.
    """
    layouts, at, num_ranks = {}, 0, len(sizes)
    for group, members in enumerate(shapes):
        for name, shape in members.items():
            size = math.prod(shape)
            share = math.ceil(size / num_ranks)
            slices = tuple((rank, at, max(0, min(share, size - rank * share))) for rank in range(num_ranks))
            layouts[name] = PartitionLayout(torch.Size(shape), group, slices)
            at += share
    for rank, size in enumerate(sizes):
        if size != at:
            raise Misfit(f"the parameters need {at} elements on each rank, and the file of rank {rank} has {size}")
    return layouts
