"""Gathering of full tensors from shards over several axes: the values, and that torch has nothing to warn of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mesh_program import Heard
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from loopwright.strategies.distributed.shards import full_tensor

# Any in this file: results that travel between processes.

SHAPES = [(8, 3), (6, 4), (5, 3), (3, 7), (1, 2)]
"""Equal shards of the first dimension, and unequal and empty ones."""


class Tables(nn.Module):
    """Matrices that are split over tp along one dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.tables = nn.ParameterList(
            nn.Parameter(torch.arange(float(rows * columns)).view(rows, columns)) for rows, columns in SHAPES
        )
        self.dim = dim

    def split(self, mesh: Any) -> None:
        for at, one in enumerate(self.tables):
            self.tables[at] = nn.Parameter(distribute_tensor(one.detach(), mesh, [Shard(self.dim)]))


def gather(rank: int, size: int, sizes: tuple[int, ...], dim: int) -> Any:
    heard = Heard()
    names = ("dp", "fsdp", "tp")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    module = Tables(dim)
    module.split(mesh["tp"])
    fully_shard(module, mesh=mesh[names[:-1]])
    found = [full_tensor(one) for one in module.parameters()]
    kinds = {type(placed).__name__ for one in module.parameters() for placed in one.placements}  # type: ignore[attr-defined]
    return found, [one.untyped_storage().nbytes() for one in found], kinds, heard.texts


@pytest.mark.parametrize(("sizes", "dim"), [((2, 2), 0), ((2, 2), 1), ((2, 4), 0), ((2, 2, 2), 0)])
def test_shards_of_two_axes_become_full_tensors(sizes: tuple[int, ...], dim: int) -> None:
    everywhere = run_ranks(gather, torch.Size(sizes).numel(), sizes, dim)
    for found, num_bytes, kinds, texts in everywhere:
        assert ("_StridedShard" in kinds) == (dim == 0)
        for one, wanted in zip(found, Tables(0).tables, strict=True):
            assert torch.equal(one, wanted)
            assert one.is_contiguous()
        if dim == 0:  # else torch gathers, which leaves its padding behind
            assert num_bytes == [4 * rows * columns for rows, columns in SHAPES]
        assert texts == []
