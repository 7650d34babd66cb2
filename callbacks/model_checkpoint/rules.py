"""`SaveRules`: the functions of a ModelCheckpoint that a layer for another library can replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .top_k import TopK

if TYPE_CHECKING:
    from torch import Tensor

    from ...trainer import Trainer
    from .callback import ModelCheckpoint


class _Due(Protocol):
    def __call__(self, callback: ModelCheckpoint, trainer: Trainer, *, strict: bool) -> None: ...


class _Fresh(Protocol):
    def __call__(self, callback: ModelCheckpoint, trainer: Trainer, *, strict: bool) -> bool: ...


def _trigger(callback: ModelCheckpoint, trainer: Trainer, *, strict: bool) -> None:
    callback.trigger_save(trainer, strict=strict)


def _is_fresh(callback: ModelCheckpoint, trainer: Trainer, *, strict: bool) -> bool:
    return callback.has_fresh_score(trainer, strict=strict)


def _metrics(callback: ModelCheckpoint, trainer: Trainer) -> dict[str, Tensor | float]:
    return callback.naming_metrics(trainer)


@dataclass(frozen=True, slots=True)
class SaveRules:
    """The replaceable functions of `ModelCheckpoint`; a layer for another library assigns to `callback.rules`.

    Attributes:
        top_k_type: Class that keeps the scores and selects the file to replace.
        number_format: Format of a metric for which the template has none.
        updates_last_alone: Whether `last` is also written if no other checkpoint is.
        trigger: Saves a checkpoint that is due, or makes it wait for its metrics; called on every rank.
        is_fresh: Whether the score may be used now.
        metrics: Returns the values for names and scores.
    """

    top_k_type: type[TopK] = TopK
    number_format: str = ".6g"
    updates_last_alone: bool = True
    trigger: _Due = _trigger
    is_fresh: _Fresh = _is_fresh
    metrics: Callable[[ModelCheckpoint, Trainer], dict[str, Tensor | float]] = _metrics
