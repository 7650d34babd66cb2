"""Accumulation from a wanted global batch: what loaders say of their batch size, and what does not divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from toys import Unsized, loader, pairs

import loopwright as lw
from loopwright.data import CombinedLoader
from loopwright.errors import ConfigError
from loopwright.fabric.global_batch import accumulation_steps, describe_global_batch, micro_batch_size


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(8, 4))


class Lengths:
    """A batch sampler that does not say how large its batches are."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2]])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("made", "size"),
    [
        (loader(8, 4), 4),
        (DataLoader(pairs(8), batch_sampler=torch.utils.data.BatchSampler(range(8), 3, False)), 3),
        (DataLoader(pairs(8), batch_sampler=Lengths()), None),
        (DataLoader(pairs(8), batch_size=None), None),
        (DataLoader(Stream(), batch_size=5), 5),
        (Unsized([torch.ones(2, 4)]), None),
        ([torch.ones(2, 4), torch.ones(2, 4), torch.ones(1, 4)], 2),
        ([torch.ones(2, 4), torch.ones(3, 4), torch.ones(1, 4)], None),
        ([torch.ones(2, 4)], 2),
        ({"a": loader(8, 4), "b": loader(12, 4)}, 4),
        ({"a": loader(8, 4), "b": loader(12, 2)}, None),
        (CombinedLoader([loader(8, 4), loader(8, 4)], "sequential"), 4),
        (CombinedLoader([loader(8, 4), Unsized([torch.ones(4, 4)])], "min_size"), None),
    ],
)
def test_the_micro_batch_is_what_the_loader_says(made: Any, size: int | None) -> None:
    assert micro_batch_size(made) == size


def test_accumulation_makes_up_for_the_rest() -> None:
    assert accumulation_steps(64, 8, 2, loader=None) == 4
    assert accumulation_steps(16, 8, 2, loader=None) == 1


@pytest.mark.parametrize(
    ("wanted", "micro", "ranks", "parts"),
    [
        (100, 8, 4, ["100", "8 samples", "4 ranks", "32", "global_batch_size=96 or 128", "batch_size=5 or 25"]),
        (4, 8, 1, ["global_batch_size=8;", "batch_size=4 in"]),
        (7, 2, 2, ["7", "global_batch_size=4 or 8."]),  # no batch size makes 7 samples on 2 ranks
    ],
)
def test_what_does_not_divide_names_the_nearest_values(wanted: int, micro: int, ranks: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        accumulation_steps(wanted, micro, ranks, loader=None)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_an_unknown_batch_size_is_refused_with_the_loaders_name() -> None:
    with pytest.raises(ConfigError, match=r"(?s)got Unsized.*accumulate_grad_batches"):
        accumulation_steps(8, None, 1, loader=Unsized([]))
    with pytest.raises(ConfigError, match="batch sampler Lengths"):
        accumulation_steps(8, None, 1, loader=DataLoader(pairs(8), batch_sampler=Lengths()))
    with pytest.raises(ConfigError, match="batch sizes 4, 2"):
        accumulation_steps(8, None, 1, loader=[loader(8, 4), loader(8, 2)])


@pytest.mark.parametrize(
    ("micro", "accumulate", "ranks", "line"),
    [
        (8, 4, 2, "global batch: 8 samples x 4 micro-batches x 2 ranks = 64 samples per step"),
        (1, 1, 1, "global batch: 1 sample x 1 micro-batch x 1 rank = 1 sample per step"),
        (None, 4, 2, "global batch: micro-batches of unknown size x 4 micro-batches x 2 ranks"
                     " = 8 micro-batches per step"),
    ],
)  # fmt: skip
def test_the_line_says_what_is_known(micro: int | None, accumulate: int, ranks: int, line: str) -> None:
    assert describe_global_batch(micro, accumulate, ranks) == line


def test_fabric_gives_the_steps_of_a_window() -> None:
    fabric = lw.Fabric(accelerator="cpu", devices=1)
    plain = loader(8, 2)
    assert fabric.accumulation_steps(plain, 8) == 4
    assert fabric.accumulation_steps(fabric.setup_dataloaders(plain), 4) == 2
    with pytest.raises(ConfigError, match="Expected an integer"):
        fabric.accumulation_steps(plain, 0)
