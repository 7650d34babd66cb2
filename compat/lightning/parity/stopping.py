"""EarlyStopping as in Lightning: each check counts, also of a value that was checked before."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ....callbacks import EarlyStopping
from ....trainer.run import Run
from ....trainer.trainer import Trainer
from ..patch import patch

__all__ = ["judge_at_each_check"]


def judge_at_each_check(run: Run) -> None:
    """Let EarlyStopping judge the latest value at each check."""
    for callback in run.callbacks:
        if isinstance(callback, EarlyStopping):
            patch(callback, "_lw_read", partial(_read_as_new, callback))


def _read_as_new(callback: EarlyStopping, trainer: Trainer) -> tuple[Tensor | None, int | None]:
    value, _ = type(callback)._lw_read(callback, trainer)
    return value, None
