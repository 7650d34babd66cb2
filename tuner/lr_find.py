"""The learning-rate search: train a copy while the rate rises, and watch the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..callbacks import Callback
from ..errors import ConfigError, DataError
from ..protocols import ParamGroup
from ..trainer.session.optimizers import build_optimizers
from .lr_curve import LearningRateCurve
from .setting import find_setting, write_setting
from .trial import Subject, accumulation_of, isolated, make_trainer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ..protocols import Batch, StateDict, StepOutput
    from ..trainer.trainer import Trainer

_NAMES = ("lr", "learning_rate")
# What a parameter group and a schedule of torch keep as rates.
_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_SCHEDULES = ("base_lrs", "max_lrs", "_last_lr")


def check_search(
    *, min_lr: float, max_lr: float, num_training: int, mode: str, early_stop_threshold: float | None
) -> None:
    """Refuse an invalid search.

    Raises:
        ConfigError: Names everything that is wrong.
    """
    wrong = []
    if mode not in ("exponential", "linear"):
        wrong.append(f"mode={mode!r}, expected 'exponential' or 'linear'")
    if not 0 < min_lr < max_lr:
        wrong.append(f"min_lr={min_lr!r} and max_lr={max_lr!r}, expected 0 < min_lr < max_lr")
    if not isinstance(num_training, int) or num_training < 1:
        wrong.append(f"num_training={num_training!r}, expected at least 1 step")
    if early_stop_threshold is not None and not early_stop_threshold > 1:
        wrong.append(f"early_stop_threshold={early_stop_threshold!r}, expected None or a factor above 1")
    if wrong:
        raise ConfigError(f"learning-rate search: {'; '.join(wrong)}.", fix="correct them; the defaults work for most.")


class _RisingRate(Callback):
    """Raises the learning rate step by step in a trial, and keeps the losses.

    Groups keep the ratios of their rates; the largest has the value of the curve. The loss is the mean over the ranks
    and micro-batches of a step, so that all ranks stop at the same one. Reading it waits for the device at every step.

    Args:
        curve: Filled by the trial.
        threshold: Stop when the smoothed loss is above this factor times the lowest; None: never.
        check: Function called after each step, which ends the search if the surrounding run was requested to stop.
    """

    hears_every_step = True

    def __init__(self, curve: LearningRateCurve, threshold: float | None, check: Callable[[], None]) -> None:
        self.curve = curve
        self._check = check
        self.threshold = threshold
        self._groups: list[ParamGroup] = []
        self._ratios: list[float] = []
        self._is_over = False
        self._steps = 0  # of the trial, after its latest window
        self._total: Tensor | None = None

    # A trial in processes that were started for it comes back by these.
    def state_dict(self) -> StateDict:
        return {"curve": self.curve.state_dict()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        loaded = LearningRateCurve.from_state(state_dict["curve"])
        self.curve.results, self.curve.raw_losses = loaded.results, loaded.raw_losses
        self.curve.num_without_loss = loaded.num_without_loss

    def on_fit_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        count = len(trainer.optimizers)
        if count != 1 and not (count and pl_module.automatic_optimization):
            raise ConfigError(
                f"the learning-rate search needs one optimizer, and configure_optimizers made {count}.",
                fix="search with one of them, with automatic optimization, and set the others' rates manually.",
            )
        trainer.lr_scheduler_configs.clear()  # this callback is the schedule
        self._groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [float(group["lr"]) for group in self._groups]
        largest = max(rates)
        self._ratios = [rate / largest if largest > 0 else 1.0 for rate in rates]
        self._total = torch.zeros(2, device=trainer.fabric.device, dtype=torch.float32)
        self._set_rate()

    def _set_rate(self) -> None:
        lr = self.curve.lr_at(len(self.curve.raw_losses))
        for group, ratio in zip(self._groups, self._ratios, strict=True):
            _put(group, "lr", lr * ratio)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: nn.Module, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        if self._is_over:
            return
        assert self._total is not None
        if isinstance(outputs, Mapping) and "loss" in outputs:
            self._total += torch.stack([outputs["loss"].float(), torch.ones_like(self._total[0])])
        if not trainer.at_step_boundary:
            return
        self._check()
        # Every rank must see the same loss: a lone rank that stops leaves the others waiting.
        total, count = trainer.fabric.all_reduce(self._total, reduce_op="sum").tolist()
        self._total.zero_()
        # A step without a loss counts, too: it has its rate, and a module may choose what it skips by `global_step`.
        if not count and trainer.progress.steps == self._steps:
            trainer.progress.steps += 1
        self._steps = trainer.progress.steps
        is_over = self.curve.add(total / count, self.threshold) if count else self.curve.add_nothing()
        if is_over:
            self._is_over = trainer.should_stop = True
            return
        self._set_rate()


def find_learning_rate(subject: Subject, curve: LearningRateCurve, threshold: float | None) -> LearningRateCurve:
    """Run the search and return the curve, filled. On every rank: it communicates.

    Raises:
        ConfigError: The module has several optimizers with manual optimization, or none.
        DataError: No step had a loss.
    """
    trainer = subject.trainer
    sweep = _RisingRate(curve, threshold, subject.check_signals)
    with isolated(subject), subject.lent() as (module, datamodule):
        scheduler = trainer.accumulation_scheduler
        accumulation = accumulation_of(trainer)
        if scheduler is not None:
            accumulation = {"accumulate_grad_batches": scheduler.get_accumulate_grad_batches(trainer.current_epoch)}
        trial = make_trainer(
            subject, trainer.fabric, [sweep], max_epochs=-1, max_steps=curve.num_training, **accumulation
        )
        val_loaders = subject.given.get("validation") if trial.limit_val_batches else None
        trial.fit(module, subject.given.get("train"), val_loaders, datamodule=datamodule)
        del trial, module, datamodule
    if sweep.curve.num_without_loss == len(sweep.curve.raw_losses):
        raise DataError(
            "the learning-rate search saw no loss: every batch was skipped, or there was none.",
            fix="let training_step return a loss (in manual optimization too), and look at limit_train_batches.",
        )
    return sweep.curve


def name_of_rate(subject: Subject, attr_name: str) -> str:
    """Return the name under which module or data module keep the learning rate.

    Raises:
        ConfigError: Neither has it; an AttributeError, too.
    """
    names = (attr_name,) if attr_name else _NAMES
    return find_setting(subject.owners, names, requested_by="the learning-rate search (update_attr=True)")[0]


def set_learning_rate(subject: Subject, name: str, lr: float) -> None:
    """Set the rate on the module, and within a run in its optimizer and schedules.

    At the beginning of training they are created again from the module's attribute. Later they keep their states, and
    all rates in them are scaled, so that the largest of the groups is `lr`.
    """
    write_setting(subject.owners, name, lr)
    run = subject.run
    if run is None:
        return
    if not run.progress.total_batches:
        build_optimizers(run)
        return
    rates = [float(group["lr"]) for optimizer in run.optimizers for group in optimizer.param_groups]
    largest = max(rates, default=0.0)
    if largest <= 0:
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                _put(group, "lr", lr)
        return
    for optimizer in run.optimizers:
        _scale_groups(optimizer, lr / largest)
    for config in run.schedulers:
        _scale_schedule(config.scheduler, lr / largest)


def _put(holder: ParamGroup, key: str, value: float) -> None:
    """Set a rate; where it is a tensor (capturable optimizers), in place: others hold it, too."""
    if isinstance(holder[key], Tensor):
        holder[key].fill_(value)
    else:
        holder[key] = value


def _scale_groups(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for key in _RATES_OF_GROUPS:
            if key in group:
                _put(group, key, float(group[key]) * factor)


def _scale_schedule(schedule: Any, factor: float) -> None:  # torch's, and users' own
    for name in _RATES_OF_SCHEDULES:
        rates = getattr(schedule, name, None)
        if isinstance(rates, list):
            setattr(schedule, name, [float(rate) * factor for rate in rates])
    for part in getattr(schedule, "_schedulers", ()):
        _scale_schedule(part, factor)
