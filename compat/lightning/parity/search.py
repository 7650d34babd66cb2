"""Searches as in Lightning: rates, losses and suggestion of a learning rate; sizes of batches; trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import override

from ....callbacks import Callback
from ....data.rng import capture_rng, restore_rng
from ....trainer.behavior import Behavior
from ....trainer.run import FitRun
from ....trainer.trainer import Trainer
from ....tuner.batch_size import Search, Trials
from ....tuner.lr_curve import SMOOTHING, LearningRateCurve
from ..loops import fit_session_of
from .random_numbers import share_generators
from .reading import fetch_batches

if TYPE_CHECKING:
    from ....protocols import StateDict as RngState

__all__ = ["SearchCurve", "choose_batch_sizes", "choose_learning_rates", "train_in_trials", "try_sizes"]

_LARGEST = 8192  # of sizes that mode "power" tries, whatever max_val is


@dataclass(slots=True)
class SearchCurve(LearningRateCurve):
    """A curve that leaves out the second rate, and divides the first smoothed losses by too much.

    The fields are those of `LearningRateCurve`.
    """

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        share = (step + 1) / self.num_training if step else 0.0
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** share)

    def add(self, loss: float, threshold: float | None) -> bool:
        """Add the loss of the next step, and return whether the search is over."""
        self.results["lr"].append(self.lr_at(len(self.raw_losses)))
        self.raw_losses.append(loss)
        count = len(self.raw_losses)
        self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
        smoothed = self._average / (1 - SMOOTHING ** (count + 1))
        has_exploded = threshold is not None and count > 1 and smoothed > threshold * self._best
        if count == 1 or smoothed < self._best:
            self._best = smoothed
        self.results["loss"].append(smoothed)
        return has_exploded or count >= self.num_training

    @override
    def index_of_rate(self, skip_begin: int, skip_end: int, method: str) -> int | None:
        """Return the step whose rate `suggestion` is about."""
        if method != "steepest":
            # Not super(): a dataclass with slots is another class than the one that this method was defined in.
            return LearningRateCurve.index_of_rate(self, skip_begin, skip_end, method)
        losses = torch.tensor(self.results["loss"][skip_begin:-skip_end])
        rates = torch.tensor(self.results["lr"][skip_begin:-skip_end])
        kept = torch.isfinite(losses)
        if int(kept.sum()) < 2:
            return None
        slopes = torch.gradient(losses[kept], spacing=[rates[kept]])[0]
        return skip_begin + int(torch.arange(len(losses))[kept][slopes.argmin()])


def choose_learning_rates(behavior: Behavior) -> Behavior:
    """Let a learning-rate search try and judge the rates that Lightning tries."""
    return replace(behavior, learning_rate_curve=SearchCurve)


def choose_batch_sizes(behavior: Behavior) -> Behavior:
    """Let a batch-size search try the sizes that Lightning tries."""
    return replace(behavior, batch_size_rule=try_sizes)


def try_sizes(search: Search, most: int, trials: Trials) -> int:
    """Return the size that the search ends with: it need not have been tried, nor be smaller than the data.

    Args:
        search: How to search.
        most: Not used: sizes are limited when they are chosen.
        trials: Tries sizes.
    """
    trials.refuses_unused, trials.keeps_draws = False, True
    size, known = search.init_val, {}
    if size < search.max_val:
        known[size] = trials.fits(size)
    if trials.most_samples is not None and trials.before >= trials.most_samples:
        size = trials.before
    bisect = search.mode == "binsearch"
    largest = search.max_val if bisect else _LARGEST
    low, high, num_fits = 1, 0, 0
    for number in range(search.max_trials if not bisect else 10**6):
        if size >= search.max_val:
            trials.open_loaders(size)
            break
        has_fitted = known.pop(size) if size in known else trials.fits(size)
        is_full = trials.most_samples is not None and size >= trials.most_samples
        if has_fitted:
            num_fits, low = num_fits + 1, size
            is_last = num_fits >= search.max_trials if bisect else number + 1 >= search.max_trials
            if is_last or is_full or (high and high - low <= 1):
                break
            following = min((high + low) // 2 if high else size * 2, largest)
            if following == size:
                break
            size = following
        else:
            high = size
            if not is_full:
                size = (high + low) // 2 if bisect else size // 2
            if high - low <= 1 if bisect else num_fits:
                trials.open_loaders(size)
                break
    found = max(1, int(size * (1 - search.margin))) if bisect else size
    trials.open_loaders(found)
    return found


def train_in_trials(behavior: Behavior) -> Behavior:
    """Let the trials of searches draw, read, validate and end as the training does."""
    return replace(behavior, prepare_trial=_prepare)


def _prepare(trainer: Trainer, trial: Trainer) -> None:
    share_generators(trial)
    fetch_batches(trial)
    trial.callbacks.append(_NoteDraws(trainer))
    if trial.max_steps != -1:
        trial.fit_loop.max_epochs = trainer.max_epochs
        trial.limit_val_batches = trial.max_steps


class _NoteDraws(Callback):
    """Lets training begin its loaders with the random numbers after a trial, where Lightning begins them.

    Args:
        searching: The Trainer of the search; it may be in a fit that has not opened its loaders.
    """

    def __init__(self, searching: Trainer) -> None:
        self._searching = searching

    def teardown(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Note where the generators are when the trial ends."""
        run = self._searching.present_run()
        if isinstance(run, FitRun) and self._searching.state.status == "running" and run.opened is None:
            fit_session_of(run).opening = partial(_drawing_from, capture_rng())


@contextmanager
def _drawing_from(drawn: RngState) -> Iterator[None]:
    now = capture_rng()
    restore_rng(drawn)
    yield
    restore_rng(now)
