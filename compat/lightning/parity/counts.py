"""Steps and epochs as Lightning counts them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from torch import Tensor

from ....protocols import StateDict
from ....trainer.behavior import Behavior
from ....trainer.loop.fit_loop import FitLoop
from ....trainer.loop.manual import count_own_step
from ....trainer.loop.optimizers import ManagedOptimizer
from ....trainer.run import FitRun
from ....trainer.session.fit import FitSession
from ....trainer.state import Progress
from ....trainer.trainer import Trainer
from ..optimizers import LightningOptimizer

__all__ = [
    "OptimizerProgress",
    "begin_anew",
    "count_cut_epochs",
    "count_optimizers",
    "count_own_steps",
    "estimate_steps",
    "keep_callbacks",
]


@dataclass(slots=True)
class OptimizerProgress(Progress):
    """Counts the steps of each optimizer that the module steps itself; `steps` are the batches with a step.

    Attributes:
        optimizer_steps: Steps of optimizers in manual optimization, in earlier fits.
        managed: The optimizers of the present fit, which count their own steps; none in automatic optimization.
    """

    optimizer_steps: int | None = None
    managed: list[ManagedOptimizer] = field(default_factory=list)

    @property
    def global_step(self) -> int:
        """Steps of all optimizers together."""
        if self.optimizer_steps is None:
            return self.steps
        counted = (one.num_steps - getattr(one, "uncounted", 0) for one in self.managed)
        return self.optimizer_steps + sum(counted)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain numbers."""
        plain = Progress(**{one.name: getattr(self, one.name) for one in fields(Progress)})
        own = {} if self.optimizer_steps is None else {"optimizer_steps": self.global_step}
        return {**plain.state_dict(), **own}


def count_optimizers(trainer: Trainer) -> None:
    """Let the Trainer's steps be those of all optimizers."""
    counts = {one.name: getattr(trainer.progress, one.name) for one in fields(Progress)}
    trainer.progress = OptimizerProgress(**counts)


def count_own_steps(run: FitRun) -> None:
    """Let each batch of manual optimization count as a step of logs, and each optimizer's step as one of limits."""
    progress, plan, loop = run.progress, run.plan, run.trainer.fit_loop
    if not isinstance(progress, OptimizerProgress) or plan.finish_window is not count_own_step:
        return
    before = progress.steps if progress.optimizer_steps is None else progress.global_step
    progress.optimizer_steps, progress.managed = before, run.managed
    for one in run.managed:
        one.num_steps = 0
        if type(one) is LightningOptimizer:
            one.uncounted = 0
    loop.plan_counts_steps = True

    def finish(run: FitRun, loss: Tensor | None) -> bool:
        progress.steps += 1
        loop.is_used_up = loop.is_used_up or progress.global_step >= loop.max_steps != -1
        return True

    plan.finish_window = finish


def count_cut_epochs(behavior: Behavior) -> Behavior:
    """Let `should_stop` trigger a last validation, and let an epoch that a limit or a request cuts short count."""
    seams = behavior.loop
    changed = replace(
        seams,
        close_epoch=partial(_close_epoch, seams.close_epoch),
        validation_is_due=partial(_validation_is_due, seams.validation_is_due),
        when_to_look=_when_to_look,
    )
    return replace(behavior, loop=changed)


def _close_epoch(close: Callable[..., None], loop: FitLoop, run: FitRun, *, is_over: bool, is_stuck: bool) -> None:
    close(loop, run, is_over=is_over, is_stuck=is_stuck)
    if not is_over:
        run.progress.end_epoch()
        run.stream.close()


def _validation_is_due(is_due: Callable[..., bool], loop: FitLoop, run: FitRun, *, is_epoch_over: bool) -> bool:
    if run.progress.epoch_left:  # by a -1 of on_train_batch_start
        return False
    if is_due(loop, run, is_epoch_over=is_epoch_over):
        return True
    trainer, progress, every = run.trainer, run.progress, run.trainer.check_val_every_n_epoch
    if (
        not trainer.enable_validation
        or progress.validated_at == progress.total_batches
        or not progress.batches_in_epoch
    ):
        return False
    is_epoch_to_validate = every is None or (progress.epochs + 1) % every == 0
    return is_epoch_to_validate and loop.stops_here


def _when_to_look(loop: FitLoop, run: FitRun) -> int:
    return 0


def keep_callbacks(behavior: Behavior) -> Behavior:
    """Let callbacks that another Trainer has trained with continue with their state of that run."""
    return replace(behavior, adopt_callbacks=_adopt_as_they_are)


def _adopt_as_they_are(session: FitSession) -> None:
    """Leave callbacks as they are."""


def begin_anew(session: FitSession, before: StateDict | None) -> StateDict | None:
    """Let a fit ignore the states of optimizers, schedules and data from the previous fit."""
    if not session.progress.epoch_open:
        session.begin_data_anew()
    return None


def estimate_steps(trainer: Trainer) -> int | float | None:
    """Return the number of steps with the present accumulation, also where a callback changes it later.

    None outside of fit.
    """
    run, loop = trainer.present_run(), trainer.fit_loop
    if not isinstance(run, FitRun):
        return None
    if loop.epoch_limit == -1:
        return math.inf if loop.max_steps == -1 else loop.max_steps
    run.session.open_data()
    if math.isinf(run.stream.num_batches):
        return loop.max_steps
    scheduler, accumulate = trainer.accumulation_scheduler, trainer.accumulate_grad_batches
    if scheduler is not None and run.is_bound:
        accumulate = scheduler.get_accumulate_grad_batches(trainer.current_epoch)
    steps = math.ceil(run.stream.num_batches / accumulate) * max(loop.epoch_limit, 1)
    return steps if loop.max_steps == -1 else min(steps, loop.max_steps)
