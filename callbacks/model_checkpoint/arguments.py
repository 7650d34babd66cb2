"""Validation of the arguments of a ModelCheckpoint."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ..averaging.base import Averaging, StepAveraging
from . import files as files
from .names import check_template

if TYPE_CHECKING:
    from ...trainer import Trainer
    from .callback import ModelCheckpoint


def check_arguments(
    *,
    monitor: str | None,
    mode: str,
    filename: str | None,
    dirpath: str | None,
    save_last: bool | str | None,
    save_top_k: int,
    keep_last: int | None,
    restore_best: bool,
    every_n_train_steps: int | None,
    every_n_epochs: int | None,
    train_time_interval: timedelta | None,
) -> None:
    """Refuse invalid arguments.

    Raises:
        ConfigError: Names all of them.
    """
    problems = []
    if mode not in ("min", "max"):
        problems.append(f"mode={mode!r} (expected 'min' or 'max')")
    if not isinstance(save_top_k, int) or save_top_k < -1:
        problems.append(f"save_top_k={save_top_k!r} (expected -1, 0 or more)")
    if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
        problems.append(f"keep_last={keep_last!r} (expected 1 or more, or None)")
    if restore_best and (monitor is None or save_top_k == 0):
        problems.append("restore_best=True without monitor or with save_top_k=0 (no checkpoint is the best)")
    if save_last not in (None, True, False, "link"):
        problems.append(f"save_last={save_last!r} (expected True, False, 'link' or None)")
    if save_last == "link" and dirpath is not None and not files.is_local(dirpath):
        problems.append(f"save_last='link' with dirpath={dirpath!r} (links need a local folder)")
    problems += _cadence_problems(
        {"every_n_train_steps": every_n_train_steps, "every_n_epochs": every_n_epochs}, train_time_interval
    )
    if problems:
        raise ConfigError(f"ModelCheckpoint: {'; '.join(problems)}.", fix="correct these arguments.")
    if filename is not None:
        check_template(filename, "filename")


def check_restore_best(callback: ModelCheckpoint, trainer: Trainer) -> None:
    """Refuse `restore_best=True` where something else decides on the weights that fit leaves.

    Raises:
        ConfigError: Another callback does, or the file would not hold the weights that had the score.
    """
    others = [one for one in trainer.checkpoint_callbacks if getattr(one, "restore_best", False)]
    averages = [one for one in trainer.callbacks if isinstance(one, Averaging)]
    final = next((type(one).__name__ for one in averages if not isinstance(one, StepAveraging)), None)
    if trainer._lw_arguments.fault_tolerance is not None:
        problem = "with fault_tolerance, where one group of several writes files"
        fix = "leave it out, and call trainer.test(ckpt_path='best') after fit."
    elif len(others) > 1:
        problem = f"in {len(others)} callbacks, which would load different weights"
        fix = "pass it to one of them."
    elif final is not None:
        problem = f"with {final}, which ends fit with an average that no score was computed for"
        fix = "leave out one of them."
    elif averages and callback.save_weights_only:
        problem = f"with save_weights_only=True and {type(averages[0]).__name__}: files would not hold the average"
        fix = "pass save_weights_only=False."
    else:
        return
    raise ConfigError(f"ModelCheckpoint: restore_best=True {problem}.", fix=fix)


def _cadence_problems(counts: dict[str, int | None], interval: timedelta | None) -> list[str]:
    """Return what is wrong with how often checkpoints are written."""
    problems = [
        f"{name}={count!r} (expected an integer, 0 or more)"
        for name, count in counts.items()
        if not isinstance(count, int) or count < 0
    ]
    if interval is not None and not isinstance(interval, timedelta):
        problems.append(f"train_time_interval={interval!r} (expected a timedelta)")
    elif interval is not None and interval < timedelta(0):
        problems.append(f"train_time_interval={interval!r} (expected a time that is not negative)")
    active = [name for name, count in counts.items() if isinstance(count, int) and count >= 1]
    active += ["train_time_interval"] if interval is not None else []
    if len(active) > 1:
        problems.append(f"{' and '.join(active)} (expected one of them; use two ModelCheckpoints for two cadences)")
    return problems
