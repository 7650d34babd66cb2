"""`SaveRules`: what a ModelCheckpoint does where other libraries do something else."""

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
    """The seams of `ModelCheckpoint`. A layer for another library assigns other rules to `callback.rules`.

    Attributes:
        top_k_type: Keeps the scores, and says which file the next better one replaces.
        number_format: Format of a metric that the template gives none.
        updates_last_alone: Whether `last` is written where no better checkpoint is.
        trigger: Saves where a checkpoint is due, or lets it wait for its metrics; on every rank.
        is_fresh: Whether the score may be used now.
        metrics: Returns the values that names and scores use.
    """

    top_k_type: type[TopK] = TopK
    number_format: str = ".6g"
    updates_last_alone: bool = True
    trigger: _Due = _trigger
    is_fresh: _Fresh = _is_fresh
    metrics: Callable[[ModelCheckpoint, Trainer], dict[str, Tensor | float]] = _metrics
