"""EarlyStopping as in Lightning: each check counts, also of a value that was checked before."""

from __future__ import annotations

from dataclasses import replace

from ....callbacks import EarlyStopping
from ....trainer.run import Run

__all__ = ["judge_at_each_check"]


def judge_at_each_check(run: Run) -> None:
    """Let EarlyStopping judge the latest value at each check."""
    for callback in run.callbacks:
        if isinstance(callback, EarlyStopping):
            callback.rules = replace(callback.rules, judges_again=True)
