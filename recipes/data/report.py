"""`DataReport`: the numbers of samples, rows and tokens of the data, and the first sample."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .shard import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DataReport:
    """Counts of the data.

    Attributes:
        records: Records read from the training data and `val_data`.
        samples: Training samples; one of a chat may be several.
        rows: Rows of an epoch.
        val_samples: Held-out samples.
        val_rows: Rows of a validation.
        tokens: Tokens of an epoch, without padding.
        trained_tokens: Positions of an epoch that have a label.
        padded_tokens: Positions of padding in an epoch; without packing those of the first epoch.
        cut: Samples whose end was cut off.
        dropped: Samples left out because they are too long.
        split: Samples split into several.
        untrained: Samples left out because no position has a label.
        first_sample: Texts of the first sample, each with whether it is trained.
        notes: What the user should know.
    """

    records: int
    samples: int
    rows: int
    val_samples: int
    val_rows: int
    tokens: int
    trained_tokens: int
    padded_tokens: int
    cut: int
    dropped: int
    split: int
    untrained: int
    first_sample: list[tuple[str, bool]]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:  # Any: plain values for JSON
        """Return the report as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataReport:
        """Return the report that `as_dict` returned."""
        spans = [(str(text), bool(is_trained)) for text, is_trained in values["first_sample"]]
        return cls(**{**values, "first_sample": spans})


def mark_trained(ids: Array, labels: Array, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Return the text of a sample in pieces, each with whether it is trained.

    Args:
        ids: Tokens.
        labels: At each position the token that follows it, or -100.
        tokenizer: Makes text of tokens.
    """
    is_trained = np.concatenate([[False], labels[:-1] != -100])
    changes = np.flatnonzero(np.diff(is_trained)) + 1
    edges = [0, *changes.tolist(), len(ids)]
    return [(str(tokenizer.decode(ids[first:end].tolist())), bool(is_trained[first])) for first, end in pairwise(edges)]
