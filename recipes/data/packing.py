"""The plan of rows: the pieces of each row, by best fit, so that few positions are padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .shard import Array


@dataclass(frozen=True)
class RowPlan:
    """Rows of pieces.

    Attributes:
        members: Indices of pieces, row after row.
        starts: Where each row begins in `members`, and the end of the last one.
    """

    members: Array
    starts: Array

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> Array:
        """Return the pieces of a row."""
        return self.members[self.starts[index] : self.starts[index + 1]]


def one_per_row(count: int) -> RowPlan:
    """Return the plan in which each row has one piece."""
    return RowPlan(np.arange(count), np.arange(count + 1))


def pack(lengths: Array, capacity: int, seed: int) -> RowPlan:
    """Return a plan by best fit decreasing: the longest piece first, each into the fullest row that has space for it.

    Pieces of one length are in random order, so that neighbors in the data do not stay neighbors in rows. The time
    grows with the number of pieces, not with that of open rows.

    Args:
        lengths: Tokens of each piece, at most `capacity`.
        capacity: Tokens in a row.
        seed: Of the random order.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    open_spaces = 0  # bit n is set if a row has n free positions
    row_of = np.empty(len(lengths), np.int64)
    count = 0
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = open_spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                open_spaces ^= 1 << space
        else:
            row, space = count, capacity
            count += 1
        row_of[piece] = row
        left = space - length
        if left:
            rows_by_space[left].append(row)
            open_spaces |= 1 << left
    members = order[np.argsort(row_of[order], kind="stable")]
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(row_of, minlength=count), out=starts[1:])
    return RowPlan(members, starts)
