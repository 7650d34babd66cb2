"""Whole tensors out of the flat ones that DeepSpeed's ranks have saved.

ZeRO lays the parameters of a group one after the other into a long tensor, of which each rank has a run (stages 1 and
2); in stage 3 it cuts each parameter into as many runs as there are ranks, and each rank lays its runs one after the
other. The layouts follow from the saved shapes; tests compare the result with what DeepSpeed itself makes of the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensors import StoredTensor, narrow

__all__ = ["Flat", "Layout", "MergedTensor", "cut_groups", "cut_parameters"]


class Misfit(Exception):
    """The lengths of saved tensors do not fit the saved shapes; says how."""


class MergedTensor(StoredTensor):
    """A tensor that lies in pieces in several files, and has not been read yet."""

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
    """Tensors that lie one after the other, as one long tensor.

    Attributes:
        size: Number of elements.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = [part.detach().reshape(-1) for part in parts]
        self.size = sum(part.numel() for part in self._parts)

    def pieces(self, start: int, size: int) -> list[Tensor]:
        """Return what lies at `start`, as views of the parts; fewer elements where it ends before."""
        found = []
        for part in self._parts:
            take = min(size, part.numel() - start)
            if start < part.numel() and take > 0:
                found.append(part.narrow(0, start, take))
                start, size = 0, size - take
            else:
                start = max(0, start - part.numel())
            if size <= 0:
                break
        return found


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a parameter lies.

    Attributes:
        shape: Of the whole parameter.
        group: Number of the group, or in stage 3 of the subgroup, that it belongs to.
        runs: Number of a long tensor, where in it a run of the parameter begins, and how many elements it has.
    """

    shape: torch.Size
    group: int
    runs: tuple[tuple[int, int, int], ...]

    def merged(self, path: str, flats: Sequence[Flat], dtype: torch.dtype) -> MergedTensor:
        """Return the parameter, or a tensor of its optimizer's state, out of the long tensors."""
        pieces = [piece for number, start, size in self.runs for piece in flats[number].pieces(start, size)]
        return MergedTensor(path, self.shape, pieces, dtype)


def cut_groups(
    shapes: Sequence[Mapping[str, Any]],  # Any: torch.Size, or a tuple
    sizes: Sequence[int],
    paddings: Sequence[Sequence[int]] | None,
    num_ranks: int,
) -> dict[str, Layout]:
    """Return where parameters lie in the long tensors of their groups: stages 1 and 2.

    Args:
        shapes: Of each group, by name and in order.
        sizes: How many elements the ranks have of each group together.
        paddings: How many elements without meaning follow each parameter; None where there are none.
        num_ranks: Groups are filled up to a multiple of twice this number.

    Raises:
        Misfit: There are more or fewer elements than the shapes need.
    """
    layouts = {}
    for group, members in enumerate(shapes):
        at = 0
        for position, (name, shape) in enumerate(members.items()):
            size = math.prod(shape)
            layouts[name] = Layout(torch.Size(shape), group, ((group, at, size),))
            at += size + (paddings[group][position] if paddings is not None else 0)
        step = 2 * num_ranks
        if math.ceil(at / step) != math.ceil(sizes[group] / step):
            raise Misfit(f"the parameters of group {group} need {at} elements, and the files have {sizes[group]}")
    return layouts


def cut_parameters(shapes: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Layout]:
    """Return where parameters lie in the long tensors of the ranks: stage 3.

    Args:
        shapes: Of each subgroup, by name and in order.
        sizes: How many elements each rank has.

    Raises:
        Misfit: There are more or fewer elements than the shapes need.
    """
    layouts, at, num_ranks = {}, 0, len(sizes)
    for group, members in enumerate(shapes):
        for name, shape in members.items():
            size = math.prod(shape)
            share = math.ceil(size / num_ranks)
            runs = tuple((rank, at, max(0, min(share, size - rank * share))) for rank in range(num_ranks))
            layouts[name] = Layout(torch.Size(shape), group, runs)
            at += share
    wrong = [rank for rank, size in enumerate(sizes) if size != at]
    if wrong:
        raise Misfit(
            f"the parameters need {at} elements on each rank, and the file of rank {wrong[0]} has {sizes[wrong[0]]}"
        )
    return layouts
