"""Samples that are too long are cut, dropped or split, and labels are counted as a loop counts them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loopwright.recipes.data.pieces import cut_samples
from loopwright.recipes.data.shard import ShardWriter, TokenShard

LENGTHS = [1, 4, 5, 6, 8, 9, 12, 3]


@pytest.fixture
def shard(tmp_path: Path) -> TokenShard:
    """Samples of these lengths, with a random mask."""
    random = np.random.default_rng(0)
    writer = ShardWriter(tmp_path, 1 << 17, has_mask=True)
    for record, length in enumerate(LENGTHS):
        writer.append(np.arange(length) + 70_000 + 100 * record, random.random(length) < 0.5)
        writer.close_sample(record)
    writer.finish({"kind": "chat", "records": len(LENGTHS)})
    return TokenShard(tmp_path)


def labels(shard: TokenShard, sample: int) -> list[int]:
    """Return the positions of a sample that have a label: those before a trained token."""
    first, end = shard.offsets[sample : sample + 2].tolist()
    return [at for at in range(first, end - 1) if shard.is_trained[at + 1]]


def test_tokens_are_read_as_they_were_written(shard: TokenShard) -> None:
    assert shard.ids[int(shard.offsets[3]) :][:6].tolist() == [70_300 + at for at in range(6)]


@pytest.mark.parametrize("too_long", ["cut", "drop", "split"])
def test_pieces_are_those_of_a_loop(shard: TokenShard, too_long: str) -> None:
    pieces = cut_samples(shard, 0, max_length=4, too_long=too_long, is_stream=False)
    expected = []
    for sample, length in enumerate(LENGTHS):
        first = int(shard.offsets[sample])
        if length <= 4:
            expected.append((first, length, False, sample))
        elif too_long == "cut":
            expected.append((first, 4, False, sample))
        elif too_long == "split":
            rest, at = length, first
            while rest > 4:
                expected.append((at, 4, True, sample))
                rest, at = rest - 4, at + 4
            if rest > 1:  # a last token by itself has no label; it is that of the position before
                expected.append((at, rest, False, sample))
    columns = (pieces.start, pieces.length, pieces.goes_on, pieces.group)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_a_split_loses_no_label(shard: TokenShard) -> None:
    pieces = cut_samples(shard, 0, max_length=4, too_long="split", is_stream=False)
    assert int(pieces.trained.sum()) == sum(len(labels(shard, sample)) for sample in range(len(LENGTHS)))


def test_labels_of_cut_samples_are_counted(shard: TokenShard) -> None:
    pieces = cut_samples(shard, 0, max_length=4, too_long="cut", is_stream=False)
    firsts = shard.offsets[:-1].tolist()
    expected = [len([at for at in labels(shard, one) if at < firsts[one] + 3]) for one in range(len(LENGTHS))]
    assert pieces.trained.tolist() == expected


def test_a_stream_ignores_the_ends_of_samples(shard: TokenShard) -> None:
    pieces = cut_samples(shard, 0, max_length=10, too_long="cut", is_stream=True)
    assert pieces.length.tolist() == [10, 10, 10, 10, 8]
    assert pieces.goes_on.tolist() == [True] * 4 + [False]
