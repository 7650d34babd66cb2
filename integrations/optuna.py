"""Optuna: reports a metric of each validation to a trial, and ends the training of trials that a pruner stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from ..callbacks.base import AnyModule, Callback, from_rank_zero
from ..errors import ConfigError, MissingDependency, MissingMetric, nearest

if TYPE_CHECKING:
    from ..protocols import StateDict
    from ..trainer import Trainer

try:
    import optuna
except ModuleNotFoundError as error:
    raise MissingDependency("optuna", needed_for="loopwright.integrations.optuna", extra="optuna") from error

__all__ = ["OptunaPruning"]

R = TypeVar("R")


class OptunaPruning(Callback):
    """Report a metric to an Optuna trial, and stop training when the study's pruner says so.

    Each new value is reported once, at the end of validations and of training epochs; Optuna's `step` is its number,
    from 0. Values are reduced over all ranks. Rank 0 alone reports and asks the pruner, and all ranks get its answer:
    they stop after the same step. `fit` ends as at any other stop, with its loggers and checkpoints closed, and then
    raises `optuna.TrialPruned`, which an objective lets through.

    With `strategy="ddp_spawn"` or `"ddp_fork"`, the study stays in the process that called `fit`. Where each rank runs
    the program (torchrun, `strategy="ddp"`), only rank 0 has a trial, and the others pass None; or all pass an
    `optuna_integration.TorchDistributedTrial`.

    A checkpoint has the values reported so far. A trial that resumes from one continues their numbers, and gets those
    that it lacks.

    Args:
        trial: The trial that the objective was given; None on ranks without one.
        monitor: Name of the logged metric.

    Attributes:
        values: What was reported; the index is Optuna's `step`.

    Raises:
        ConfigError: At the beginning of training: ranks have different trials, or rank 0 has none.
        MissingMetric: At the end of an epoch: no metric of this name was logged.
        optuna.TrialPruned: After `fit`: the trial was pruned.
    """

    def __init__(self, trial: optuna.trial.BaseTrial | None, monitor: str) -> None:
        self.trial = trial
        self.monitor = monitor
        self.forget_run()

    def forget_run(self) -> None:
        """Forget what was reported."""
        self.values: list[float] = []
        self._lw_value_step = -1
        self._lw_is_pruned = self._lw_has_validated = False

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint; the monitor distinguishes instances."""
        return self._generate_state_key(monitor=self.monitor)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Check that the ranks have one trial, and report to it what it lacks."""
        own = None if self.trial is None else (getattr(_study(self.trial), "study_name", None), self.trial.number)
        trials = trainer.strategy.gather_objects(own) if trainer.ranks_answer else [own]
        if trials[0] is None or len({one for one in trials if one is not None}) > 1:
            raise ConfigError(
                f"OptunaPruning: expected one trial for all ranks, got (study, trial) = {trials} by rank.",
                fix="pass strategy='ddp_spawn', so that one process has the study; or run it on rank 0 and pass "
                "trial=None on the others.",
            )
        self._lw_on_rank_zero(trainer, self._lw_report_lacking)
        if self._lw_is_pruned:
            trainer.should_stop = True

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Report the metric, if the validation has logged it."""
        self._lw_check(trainer)
        self._lw_has_validated |= not trainer.sanity_checking

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Report the metric, if the epoch has logged it."""
        self._lw_check(trainer)
        if not self.values and (self._lw_has_validated or not trainer.enable_validation) and not trainer.fast_dev_run:
            known = sorted(trainer.callback_metrics)
            raise MissingMetric(
                f"OptunaPruning(monitor={self.monitor!r}): no metric of this name was logged"
                f"{nearest(self.monitor, known)}; there are {known}.",
                fix=f"log it with self.log({self.monitor!r}, ...), or monitor one of those.",
            )

    @override
    def state_dict(self) -> StateDict:
        """Return what was reported."""
        return {"values": list(self.values), "value_step": self._lw_value_step, "is_pruned": self._lw_is_pruned}

    @override
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what was reported."""
        self.values = list(state_dict["values"])
        self._lw_value_step = int(state_dict["value_step"])
        self._lw_is_pruned = bool(state_dict["is_pruned"])

    def _lw_after_fit(self) -> None:
        """Report what was logged in other processes, and raise `optuna.TrialPruned` if the trial was pruned."""
        if self.trial is not None and self._lw_is_of_one_rank():
            self._lw_report_lacking()
        if self._lw_is_pruned:
            raise optuna.TrialPruned(self.stop_reason)

    @property
    def stop_reason(self) -> str | None:  # type: ignore[override]  # read only
        """Reason why this callback stopped training; None if it did not."""
        if not self._lw_is_pruned:
            return None
        return f"the trial was pruned at {self.monitor} = {self.values[-1]:.6g} (value {len(self.values) - 1})"

    def _lw_check(self, trainer: Trainer) -> None:
        """Report the metric if it has a new value, and stop if the pruner says so. On every rank."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run or self._lw_is_pruned:
            return
        trainer.synchronize_metrics(self.monitor)
        step = trainer.metric_step(self.monitor)
        if step is None or step == self._lw_value_step:
            return
        self._lw_value_step = step
        # The CPU waits for the device; we are at the end of a validation or an epoch, where that is paid already.
        value = float(trainer.callback_metrics[self.monitor].detach())
        self.values.append(value)
        self._lw_is_pruned = self._lw_on_rank_zero(trainer, lambda: self._lw_report(value))
        if self._lw_is_pruned:
            trainer.should_stop = True

    def _lw_report(self, value: float) -> bool:
        """Report a value and return whether the trial is to be pruned."""
        assert self.trial is not None
        self.trial.report(value, len(self.values) - 1)
        return bool(self.trial.should_prune())  # some pruners return NumPy's type

    def _lw_report_lacking(self) -> None:
        """Report the values that the trial does not have: of a checkpoint, or of another process."""
        assert self.trial is not None
        study = _study(self.trial)
        known = {} if study is None else study.get_trials(deepcopy=False)[self.trial.number].intermediate_values
        for number, value in enumerate(self.values):
            if number not in known:
                self.trial.report(value, number)

    def _lw_on_rank_zero(self, trainer: Trainer, decide: Callable[[], R]) -> R:
        """Call the function on rank 0, or on all ranks where the trial itself communicates."""
        if self._lw_is_of_one_rank():
            return from_rank_zero(trainer, decide)
        return decide()

    def _lw_is_of_one_rank(self) -> bool:
        """Whether a method of the trial is called on one rank. TorchDistributedTrial's are called on all."""
        return self.trial is None or type(self.trial).__name__ != "TorchDistributedTrial"


def _study(trial: optuna.trial.BaseTrial) -> optuna.Study | None:
    """Return the study of a trial; None for a trial without one, such as `optuna.trial.FixedTrial`."""
    return getattr(trial, "study", None)
