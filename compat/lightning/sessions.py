"""The sessions of a Trainer for programs of Lightning: what its verbs do in addition, and what parity changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from typing_extensions import override

from ...protocols import StateDict
from ...trainer.run import Run
from ...trainer.session import evaluation, fit
from .actions import MeasuredLifecycle
from .errors import PossibleUserWarning
from .iterating_steps import taking_batches
from .loops import count_evaluations
from .own_parts import call_strategy_hooks
from .parity import switches
from .utilities.combined import with_plain_loaders

if TYPE_CHECKING:
    from ...trainer.session.session import Session
    from .metrics import LightningMetrics
    from .trainer import Trainer

__all__ = ["LightningEvaluationSession", "LightningFitSession"]


class LightningFitSession(fit.FitSession):
    """One fit of a program for Lightning.

    Attributes:
        opening: Opens the context in which the training data are opened; None for no context.
        is_within_window: Whether a validation takes place within an accumulation window: it keeps the gradients, and
            its rows stand at the step that the window will make.
        counting_window: Opens the context in which the micro-batches of the present window count as done.
    """

    lifecycle_type = MeasuredLifecycle
    trainer: Trainer

    def __init__(self, *arguments: Any, **options: Any) -> None:  # Any: those of the core's session
        super().__init__(*arguments, **options)
        self.opening: Callable[[], AbstractContextManager[object]] | None = None
        self.is_within_window = False
        self.counting_window: Callable[[], AbstractContextManager[object]] | None = None

    @override
    def open_data(self) -> None:
        """Request the training data, in the context that parity needs."""
        opening, self.opening = self.opening, None
        with nullcontext() if opening is None else opening():
            super().open_data()

    @override
    def free_gradients(self) -> None:
        """Zero the gradients before a validation, unless the window continues after it."""
        if not self.is_within_window:
            super().free_gradients()

    def begin(self, model: nn.Module) -> None:
        """Begin with the limits that Lightning shows, and without gradients."""
        self.trainer.has_fitted = True
        loop = self.loop
        loop.max_epochs = loop.epoch_limit
        loop.min_epochs = int(loop.min_steps is not None) if loop.min_epochs is None else loop.min_epochs
        self.attachment.enter_context(taking_batches(model))
        super().begin(model)
        _forget_gradients(self.run)

    def make_run(self) -> Run:
        """Return the run, whose accelerator is set up."""
        return _complete(self, super().make_run())

    def restore(self, before: StateDict | None) -> Callable[[], None] | None:
        """Restore, and change what parity changes when the functions of a step are bound."""
        trainer = self.trainer
        for change in switches.functions("before"):
            before = change(self, before)
        every = trainer.check_val_every_n_epoch or 1
        is_checked = bool(trainer.num_sanity_val_steps) or self.ckpt_path is not None
        self.loaders.waits_for_validation = not is_checked and bool((trainer.current_epoch + 1) % every)
        put_back = super().restore(before)
        if all(parameter.grad is None for parameter in self.module.parameters()):
            self.module.zero_grad()  # where Lightning calls it, after on_fit_start
        resting = sum(not module.training for module in self.module.modules())
        if resting:
            text = f"{resting} modules are in eval mode when training begins; call .train() on them unless intended"
            warnings.warn(text, PossibleUserWarning, stacklevel=2)
        for change in switches.functions("step"):
            change(self.run)
        return put_back

    @override
    def results_to_keep(self, results: Mapping[str, float]) -> Mapping[str, float]:
        """Return what is logged with `logger=True`."""
        return _of_loggers(self, results)

    def release_trainer(self) -> None:
        """Stay with the module, which programs ask for its Trainer when they have dropped their own reference."""


class LightningEvaluationSession(evaluation.EvaluationSession):
    """One validate, test or predict of a program for Lightning."""

    lifecycle_type = MeasuredLifecycle
    trainer: Trainer

    def start(self) -> None:
        """Begin, and change what parity changes in an evaluation."""
        super().start()
        for change in switches.functions("evaluation"):
            change(self.run)

    def begin(self, model: nn.Module) -> None:
        """Begin without gradients."""
        self.attachment.enter_context(taking_batches(model))
        super().begin(model)
        self.module.zero_grad()
        _forget_gradients(self.run)

    def make_run(self) -> Run:
        """Return the run, whose accelerator is set up."""
        return _complete(self, super().make_run())

    @override
    def results_to_keep(self, results: Mapping[str, float]) -> Mapping[str, float]:
        """Return what is logged with `logger=True`."""
        return _of_loggers(self, results)

    def release_trainer(self) -> None:
        """Stay with the module, which programs ask for its Trainer when they have dropped their own reference."""


def _complete(session: Session, run: Run) -> Run:
    run.loaders.prepare = with_plain_loaders
    for change in switches.functions("hooks"):
        change(run)
    count_evaluations(session.trainer, run)
    call_strategy_hooks(run)
    for change in switches.functions("run"):
        change(run)
    setup = getattr(session.trainer.accelerator, "setup", None)
    if setup is not None:
        setup(session.trainer)
    return run


def _forget_gradients(run: Run) -> None:
    for parameter in run.module.parameters():
        parameter.grad = None  # of an earlier run; those of a checkpoint are restored later


def _of_loggers(session: Session, results: Mapping[str, float]) -> Mapping[str, float]:
    left_out = cast("LightningMetrics", session.metrics).keys_without_logger("validation", "test")
    return {name: value for name, value in results.items() if name not in left_out}
