"""`Pieces`: samples within `max_length`. Longer ones are cut, dropped or split; text may be one stream of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from .shard import Array, TokenShard

_BLOCK = 1 << 16  # pieces whose trained tokens are counted at a time


@dataclass(frozen=True)
class Pieces:
    """Ranges of tokens; each of them is in one row.

    Attributes:
        shard: Index of the shard that a piece is from.
        start: Where it begins in the shard.
        length: Number of its tokens.
        goes_on: Whether its last position is trained on the token that follows it: it is not the end of its sample.
        group: Pieces with the same number are held out together, or not at all.
        trained: Number of its positions that have a label.
    """

    shard: Array
    start: Array
    length: Array
    goes_on: Array
    group: Array
    trained: Array

    def __len__(self) -> int:
        return len(self.start)

    def take(self, chosen: Array) -> Pieces:
        """Return some of the pieces.

        Args:
            chosen: Indices or booleans.
        """
        return Pieces(*(getattr(self, one.name)[chosen] for one in fields(self)))

    @staticmethod
    def join(parts: Sequence[Pieces]) -> Pieces:
        """Return the pieces of several sources as one; groups of different sources are different."""
        first = np.cumsum([0, *(int(part.group.max(initial=-1)) + 1 for part in parts)])
        groups = [part.group + first[at] for at, part in enumerate(parts)]
        joined = {one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(Pieces)}
        return Pieces(**{**joined, "group": np.concatenate(groups)})


def cut_samples(shard: TokenShard, index: int, *, max_length: int, too_long: str, is_stream: bool) -> Pieces:
    """Return the pieces of a shard's samples.

    Args:
        shard: The samples.
        index: Its number among the shards.
        max_length: Tokens in the longest piece.
        too_long: "cut" keeps the beginning of a longer sample, "drop" leaves it out, "split" makes several pieces.
        is_stream: Whether the samples follow each other in rows of `max_length`, wherever they end.
    """
    offsets = shard.offsets
    groups = shard.records
    if is_stream:
        offsets, groups, too_long = offsets[[0, -1]], groups[:1], "split"
    starts, lengths = offsets[:-1], np.diff(offsets)
    if too_long == "drop":
        kept = lengths <= max_length
        starts, lengths, groups = starts[kept], lengths[kept], groups[kept]
    goes_on = np.zeros(len(starts), np.bool_)
    if too_long == "cut":
        lengths = np.minimum(lengths, max_length)
    elif too_long == "split":
        starts, lengths, goes_on, groups = _split(starts, lengths, groups, max_length)
    if shard.manifest["kind"] == "text":
        groups = np.arange(len(starts))  # a few long documents can be held out in part
    trained = _count_trained(shard, starts, lengths - 1 + goes_on)
    return Pieces(np.full(len(starts), index, np.int32), starts, lengths, goes_on, groups, trained)


def _split(starts: Array, lengths: Array, groups: Array, max_length: int) -> tuple[Array, Array, Array, Array]:
    """Split samples. A single last token makes no piece: it is the label of the position before it."""
    counts = np.maximum(1, -(-(lengths - 1) // max_length))
    owner = np.repeat(np.arange(len(starts)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    rest = lengths[owner] - number * max_length
    return starts[owner] + number * max_length, np.minimum(rest, max_length), rest > max_length, groups[owner]


def _count_trained(shard: TokenShard, starts: Array, counts: Array) -> Array:
    """Return how many of the tokens that follow each piece's first one are trained.

    Args:
        shard: Tokens.
        starts: First token of each piece, ascending.
        counts: Number of tokens that follow it.
    """
    if shard.is_trained is None:
        return counts
    trained = np.empty(len(starts), np.int64)
    for at in range(0, len(starts), _BLOCK):
        first = starts[at : at + _BLOCK] + 1
        last = first + counts[at : at + _BLOCK]
        sums = np.concatenate([[0], np.cumsum(shard.is_trained[first[0] : last[-1]], dtype=np.int64)])
        trained[at : at + _BLOCK] = sums[last - first[0]] - sums[first - first[0]]
    return trained
