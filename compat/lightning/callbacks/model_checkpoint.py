"""`ModelCheckpoint` as subclasses for Lightning see it: the steps of a save that they override, the names they assign.

The core saves in steps of its own. Those of Lightning are called where a subclass overrides one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any  # Any: what a subclass assigns

from torch import Tensor, tensor

from ....callbacks import ModelCheckpoint
from ..patch import extend, patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ....callbacks.model_checkpoint.state import CheckpointState
    from ....trainer.trainer import Trainer

__all__: list[str] = []

_save_in_core = ModelCheckpoint._lw_save


def _monitor_candidates(callback: ModelCheckpoint, trainer: Trainer) -> dict[str, Tensor]:
    """Return what scores and file names may use."""
    counts = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    return {**trainer.callback_metrics, **{name: tensor(count) for name, count in counts.items()}}


def _save(callback: ModelCheckpoint, trainer: Trainer) -> None:
    """Save, by Lightning's steps where a subclass overrides one."""
    if not any(_is_overridden(callback, name) for name in _STEPS):
        _save_in_core(callback, trainer)
        return
    candidates = callback._monitor_candidates(trainer)  # type: ignore[attr-defined]  # added below
    callback._save_topk_checkpoint(trainer, candidates)  # type: ignore[attr-defined]
    callback._save_last_checkpoint(trainer, candidates)  # type: ignore[attr-defined]


def _save_topk_checkpoint(callback: ModelCheckpoint, trainer: Trainer, monitor_candidates: object) -> None:
    """Save if the score is among the best; and `last`, unless a subclass does that itself."""
    if _is_overridden(callback, "_save_last_checkpoint"):
        with _without_last(callback):
            _save_in_core(callback, trainer)
    else:
        _save_in_core(callback, trainer)


def _save_last_checkpoint(callback: ModelCheckpoint, trainer: Trainer, monitor_candidates: object) -> None:
    """Save `last`, where the step before has not."""
    if callback.save_last and _is_overridden(callback, "_save_last_checkpoint"):
        callback._lw_write_last_alone(trainer)


_STEPS = ("_monitor_candidates", "_save_topk_checkpoint", "_save_last_checkpoint")


def _is_overridden(callback: ModelCheckpoint, name: str) -> bool:
    return getattr(type(callback), name) is not getattr(ModelCheckpoint, name)


@contextmanager
def _without_last(callback: ModelCheckpoint) -> Iterator[None]:
    kept, callback.save_last = callback.save_last, None
    try:
        yield
    finally:
        callback.save_last = kept


# --- names that programs assign ------------------------------------------------------------------------------------


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _set_scores(state: CheckpointState, scores: Mapping[str, Any]) -> None:
    state.top_k.scores = {path: float(score) for path, score in scores.items()}


def _nothing(state: CheckpointState, value: object) -> None:
    """The core computes it."""


_ASSIGNED: dict[str, Callable[[Any, Any], None]] = {
    "best_model_path": lambda state, value: setattr(state, "best_path", value),
    "best_model_score": lambda state, value: setattr(state, "best_score", _number(value)),
    "last_model_path": lambda state, value: setattr(state, "last_path", value),
    "current_score": lambda state, value: setattr(state, "current_score", _number(value)),
    "best_k_models": _set_scores,
    "kth_best_model_path": _nothing,
    "kth_value": _nothing,
}


def _assignable(name: str, assign: Callable[[Any, Any], None]) -> property:
    def assign_to(callback: ModelCheckpoint, value: object) -> None:
        assign(callback._lw_state, value)

    return getattr(ModelCheckpoint, name).setter(assign_to)  # type: ignore[no-any-return]


for _name, _assign in _ASSIGNED.items():
    patch(ModelCheckpoint, _name, _assignable(_name, _assign))
patch(ModelCheckpoint, "_lw_save", _save)
for _function in (_monitor_candidates, _save_topk_checkpoint, _save_last_checkpoint):
    extend(ModelCheckpoint, _function.__name__, _function)


def _last_step(callback: Any) -> Any:
    return max(callback._lw_written_step, 0)


def _last_path(callback: Any) -> Any:
    return callback.__dict__.get("_lw_own_last_path") or callback.last_model_path or callback.best_model_path


# A program that saves by itself assigns them.
_last_saved = property(_last_step, lambda callback, step: patch(callback, "_lw_written_step", step))
_last_file = property(_last_path, lambda callback, path: callback.__dict__.update(_lw_own_last_path=path))
extend(ModelCheckpoint, "_last_global_step_saved", _last_saved)
extend(ModelCheckpoint, "_last_checkpoint_saved", _last_file)
