"""`Rows`: the data set of rows, their collation into batches, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from .packing import RowPlan
from .pieces import Pieces
from .shard import Array, TokenShard

_IGNORED = -100
_POOL = 64  # batches whose rows are sorted together


class Rows(Dataset[dict[str, Array]]):
    """Rows of tokens, labels and positions.

    Args:
        shards: Tokens.
        pieces: Ranges of them.
        plan: Which pieces stand in which row.
    """

    def __init__(self, shards: Sequence[TokenShard], pieces: Pieces, plan: RowPlan) -> None:
        self._shards, self._pieces, self._plan = shards, pieces, plan

    def __len__(self) -> int:
        return len(self._plan)

    def lengths(self) -> Array:
        """Return the number of tokens in each row."""
        lengths = self._pieces.length[self._plan.members]
        return np.add.reduceat(lengths, self._plan.starts[:-1]) if len(self) else lengths

    def __getitem__(self, index: int) -> dict[str, Array]:
        parts = [self._piece(int(piece)) for piece in self._plan.row(index)]
        ids, labels = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
        positions = np.concatenate([np.arange(len(part[0])) for part in parts])
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "row": np.asarray(index)}

    def records(self, index: int) -> list[tuple[int, int]]:
        """Return what a row holds: for each piece, the number of its shard and that of its record there."""
        pieces = self._pieces
        found = []
        for piece in self._plan.row(index).tolist():
            shard = self._shards[pieces.shard[piece]]
            sample = int(np.searchsorted(shard.offsets, pieces.start[piece], side="right")) - 1
            found.append((int(pieces.shard[piece]), int(shard.records[sample])))
        return found

    def _piece(self, piece: int) -> tuple[Array, Array]:
        """Return the tokens of a piece, and at each position the token that follows if it is trained."""
        pieces = self._pieces
        shard, start = self._shards[pieces.shard[piece]], int(pieces.start[piece])
        end = start + int(pieces.length[piece])
        last = end + int(pieces.goes_on[piece])
        ids = shard.ids[start:last].astype(np.int64)
        labels = np.full(end - start, _IGNORED, np.int64)
        labels[: last - start - 1] = ids[1:]
        if shard.is_trained is not None:
            labels[: last - start - 1][~shard.is_trained[start + 1 : last]] = _IGNORED
        return ids[: end - start], labels


@dataclass(frozen=True)
class Collate:
    """Makes a batch of rows: pads them on the right.

    `lengths` are the numbers of tokens of the rows, without padding, and `rows` their numbers in the data.

    Padding counts on from the last sample's positions: attention is causal, so nothing before it sees it, and its
    labels are -100.

    Args:
        pad_id: Token of the padding.
        width: Length of all batches; None for the longest row of each.
    """

    pad_id: int
    width: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Array]]) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        width = self.width or max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": np.full((len(rows), width), self.pad_id, np.int64),
            "labels": np.full((len(rows), width), _IGNORED, np.int64),
            "position_ids": np.empty((len(rows), width), np.int64),
            "rows": np.array([int(row["row"]) for row in rows], np.int64),
            "lengths": np.array([len(row["input_ids"]) for row in rows], np.int64),
        }
        for at, row in enumerate(rows):
            length = len(row["input_ids"])
            for name in ("input_ids", "labels", "position_ids"):
                batch[name][at, :length] = row[name]
            next_position = row["position_ids"][-1] + 1
            batch["position_ids"][at, length:] = np.arange(next_position, next_position + width - length)
        return {name: torch.from_numpy(values) for name, values in batch.items()}


class ShuffledRows(Sampler[int]):
    """Rows in an order that depends on seed and epoch only.

    Args:
        count: Number of rows.
        seed: Seed of the order.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed, self._epoch = count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng([self._seed, self._epoch]).permutation(self._count).tolist()


class LengthBatches(Sampler[list[int]]):
    """Batches of rows of similar lengths, in an order that depends on seed and epoch only; each row once.

    Args:
        lengths: Tokens of each row.
        batch_size: Rows in a batch; the last one may have fewer.
        seed: Seed of the order.
    """

    def __init__(self, lengths: Array, batch_size: int, seed: int) -> None:
        self._lengths, self.batch_size, self._seed, self._epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng([self._seed, self._epoch])
        order = random.permutation(len(self._lengths))
        pool = _POOL * self.batch_size
        sorted_pools = [
            part[np.argsort(-self._lengths[part], kind="stable")]
            for part in (order[at : at + pool] for at in range(0, len(order), pool))
        ]
        order = np.concatenate(sorted_pools) if sorted_pools else order
        batches = [order[at : at + self.batch_size].tolist() for at in range(0, len(order), self.batch_size)]
        # The short batch stays last: batches of a loader are distributed over processes by their number.
        full = len(self._lengths) // self.batch_size
        yield from (batches[at] for at in [*random.permutation(full).tolist(), *range(full, len(batches))])
