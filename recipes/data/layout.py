"""`RowLayout`: the rows of training and held-out data, planned once and stored as an index beside the tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .packing import RowPlan, one_per_row, pack
from .pieces import Pieces, cut_samples
from .report import DataReport, mark_trained
from .rows import LengthBatches, Rows, ShuffledRows
from .settings import DataSettings, DataSource
from .shard import Array, TokenShard, publish, temporary_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 1
REPORT = "report.json"
NO_PAD = "The tokenizer has no pad token: rows are padded with its end token, which has no label there."


@dataclass(frozen=True)
class RowLayout:
    """Rows for training and validation.

    Attributes:
        train: Training rows.
        val: Held-out rows; may be none.
        width: Length of all batches; None for the longest row of each.
        report: Counts.
    """

    train: Rows
    val: Rows
    width: int | None
    report: DataReport


@dataclass
class _Counts:
    cut: int = 0
    dropped: int = 0
    split: int = 0
    untrained: int = 0


def find_layout(cache: Path, settings: DataSettings, folders: Sequence[Path]) -> Path:
    """Return the folder of the rows, which may not exist yet.

    Args:
        cache: Folder of the cache.
        settings: Everything that decides about rows.
        folders: Tokens of all sources.
    """
    described = {
        "version": VERSION,
        "tokens": [folder.name if folder.parent == cache else str(folder.resolve()) for folder in folders],
        "weights": [source.weight for source in [*settings.train_sources(), *settings.val_sources()]],
        "val_sources": len(settings.val_sources()),
        **{name: getattr(settings, name) for name in ("val_fraction", "max_length", "too_long", "packing", "seed")},
        "group_by_length": settings.group_by_length,
        "micro_batch": settings.micro_batch,
    }
    return cache / f"rows-{hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]}"


def build_layout(
    folder: Path, settings: DataSettings, folders: Sequence[Path], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Plan the rows and store them; return problems, with which nothing is stored.

    Args:
        folder: From `find_layout`.
        settings: Everything that decides about rows.
        folders: Tokens of all sources, those of `val_data` last.
        tokenizer: Makes text of the first sample.
    """
    shards = [TokenShard(one) for one in folders]
    sources = [*settings.train_sources(), *settings.val_sources()]
    counts = _Counts()
    parts = [_pieces(shard, index, settings, counts) for index, shard in enumerate(shards)]
    num_train = len(settings.train_sources())
    train = Pieces.join(parts[:num_train])
    val = Pieces.join(parts[num_train:]) if parts[num_train:] else train.take(np.zeros(0, np.int64))
    if settings.val_fraction and len(train):
        is_held_out = _held_out(train.group, settings.val_fraction, settings.seed)
        train, val = train.take(~is_held_out), train.take(is_held_out)
    problems = _missing(settings, train, val, counts)
    if problems:
        return problems
    samples, val_samples = len(train), len(val)
    train, val = _weigh(train, sources, settings.seed), _weigh(val, sources, settings.seed)
    plans = [_plan(pieces, settings) for pieces in (train, val)]
    train_rows, val_rows = (Rows(shards, *pair) for pair in zip((train, val), plans, strict=True))
    tokens = int(train.length.sum())
    report = DataReport(
        records=sum(int(shard.manifest["records"]) for shard in shards),
        samples=samples,
        rows=len(train_rows),
        val_samples=val_samples,
        val_rows=len(val_rows),
        tokens=tokens,
        trained_tokens=int(train.trained.sum()),
        padded_tokens=_count_positions(train_rows, settings, _width(train_rows, settings)) - tokens,
        **vars(counts),
        first_sample=_first_sample(shards, train, tokenizer),
        notes=[
            *([NO_PAD] if tokenizer.pad_token_id is None else []),
            *dict.fromkeys(note for shard in shards for note in shard.manifest.get("notes", ())),
        ],
    )
    temporary = temporary_folder(folder)
    for name, pieces, plan in zip(("train", "val"), (train, val), plans, strict=True):
        for values in (pieces, plan):
            for one in fields(values):
                np.save(temporary / f"{name}-{one.name}.npy", getattr(values, one.name))
    (temporary / REPORT).write_text(json.dumps(report.as_dict(), indent=1))
    publish(temporary, folder)
    return []


def read_layout(folder: Path, settings: DataSettings, folders: Sequence[Path]) -> RowLayout:
    """Return the rows that `build_layout` stored; indices are memory-mapped.

    Args:
        folder: From `find_layout`.
        settings: As they were when it was built.
        folders: Tokens of all sources, in that order.
    """
    shards = [TokenShard(one) for one in folders]
    train, val = (Rows(shards, *_read_plan(folder, name)) for name in ("train", "val"))
    report = DataReport.from_dict(json.loads((folder / REPORT).read_text()))
    return RowLayout(train, val, _width(train, settings, val), report)


def _read_plan(folder: Path, name: str) -> tuple[Pieces, RowPlan]:
    def load(one: str) -> Array:
        values: Array = np.load(folder / f"{name}-{one}.npy", mmap_mode="r")
        return values

    return (Pieces(*(load(one.name) for one in fields(Pieces))), RowPlan(*(load(one.name) for one in fields(RowPlan))))


def _pieces(shard: TokenShard, index: int, settings: DataSettings, counts: _Counts) -> Pieces:
    """Return the pieces of a shard that have a label, and count the others."""
    is_text = shard.manifest["kind"] == "text"
    is_stream = is_text and not settings.packing
    too_long = "split" if is_text and settings.too_long == "cut" else settings.too_long
    pieces = cut_samples(shard, index, max_length=settings.max_length, too_long=too_long, is_stream=is_stream)
    if not is_stream:
        long = int((np.diff(shard.offsets) > settings.max_length).sum())
        name = {"cut": "cut", "drop": "dropped", "split": "split"}[too_long]
        setattr(counts, name, getattr(counts, name) + long)
    is_trained = pieces.trained > 0
    counts.untrained += int((~is_trained).sum())
    return pieces.take(is_trained)


def _held_out(group: Array, fraction: float, seed: int) -> Array:
    """Return which pieces are held out: those of a random share of the groups, at least one and not all."""
    names, number = np.unique(group, return_inverse=True)
    count = min(max(1, round(fraction * len(names))), len(names) - 1)
    chosen = np.zeros(len(names), np.bool_)
    chosen[np.random.default_rng([seed, 1]).permutation(len(names))[:count]] = True
    held_out: Array = chosen[number]
    return held_out


def _missing(settings: DataSettings, train: Pieces, val: Pieces, counts: _Counts) -> list[str]:
    where = f"of at most {settings.max_length} tokens with a trained one"
    got = f"({counts.dropped} are too long, {counts.untrained} have no trained token within max_length)"
    problems = []
    if not len(train):
        problems.append(f"data: Expected samples {where}, got none {got}.")
    elif (settings.val_data is not None or settings.val_fraction) and not len(val):
        name = "val_data" if settings.val_data is not None else "val_fraction"
        problems.append(f"{name}: Expected held-out samples {where}, got none {got}.")
    return problems


def _weigh(pieces: Pieces, sources: Sequence[DataSource], seed: int) -> Pieces:
    """Repeat each piece by its source's weight; for a fraction, a random part of the pieces."""
    if all(source.weight == 1 for source in sources):
        return pieces
    weights = np.asarray([source.weight for source in sources])
    times = np.floor(weights)[pieces.shard].astype(np.int64)
    for index, weight in enumerate(weights):
        of_source = np.flatnonzero(pieces.shard == index)
        count = round((weight - np.floor(weight)) * len(of_source))
        times[np.random.default_rng([seed, 2, index]).permutation(of_source)[:count]] += 1
    return pieces.take(np.repeat(np.arange(len(pieces)), times))


def _plan(pieces: Pieces, settings: DataSettings) -> RowPlan:
    if settings.packing and len(pieces):
        return pack(pieces.length, settings.max_length, settings.seed)
    return one_per_row(len(pieces))


def _width(train: Rows, settings: DataSettings, val: Rows | None = None) -> int | None:
    """Return the length of batches: that of the longest row if rows are full, so that shapes do not change."""
    if not settings.packing:
        return None
    longest = [int(rows.lengths().max()) for rows in (train, val) if rows is not None and len(rows)]
    return max(longest)


def _count_positions(rows: Rows, settings: DataSettings, width: int | None) -> int:
    """Return the positions of an epoch, padding included."""
    if width is not None:
        return width * len(rows)
    lengths = rows.lengths()
    return sum(len(batch) * int(lengths[batch].max()) for batch in _batches(rows, settings))


def _batches(rows: Rows, settings: DataSettings) -> list[list[int]]:
    """Return the batches of the first epoch."""
    if settings.group_by_length:
        return list(LengthBatches(rows.lengths(), settings.micro_batch, settings.seed))
    order = list(ShuffledRows(len(rows), settings.seed))
    return [order[at : at + settings.micro_batch] for at in range(0, len(order), settings.micro_batch)]


def _first_sample(
    shards: Sequence[TokenShard], pieces: Pieces, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, bool]]:
    row = Rows(shards, pieces, one_per_row(1))[0]
    return mark_trained(row["input_ids"], row["labels"], tokenizer)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token of the padding: the tokenizer's, its end token, or 0. It is never trained."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
