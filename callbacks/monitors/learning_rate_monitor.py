"""`LearningRateMonitor`: the learning rates that steps used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer

from ...errors import ConfigError
from ...protocols import ParamGroup
from ..base import AnyModule, Callback
from .measuring import require_logger

if TYPE_CHECKING:
    from ...protocols import AnyBatch, AnyOutput
    from ...trainer import Trainer

_log = logging.getLogger(__name__)


class LearningRateMonitor(Callback):
    """Log the learning rate of each parameter group, and optionally momentum and weight decay.

    The value of a step is the rate that the optimizer used in that step, not the rate that the schedule has set for the
    next one. The x value is the index of the step, from 0, as for values logged in training_step.

    Keys: the schedule's `name`, else "lr-" and the optimizer's class ("-1" for the second of a class). With several
    groups, "/pg1", "/pg2", or the group's "name" is appended.

    Args:
        logging_interval: "step" for each step that is logged, "epoch" for the beginning of each epoch. None is
            the interval of each schedule, and "step" for an optimizer without a schedule.
        log_momentum: Whether momentum, or the first of the betas, is logged as `<key>-momentum`.
        log_weight_decay: Whether weight decay is logged as `<key>-weight_decay`.

    Attributes:
        lrs: Key -> all values logged in this run.
        last_momentum_values: Key -> latest value.
        last_weight_decay_values: Key -> latest value.

    Raises:
        ConfigError: The interval is invalid. At the start of training: no logger, or two groups with one name.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigError(
                f"LearningRateMonitor: logging_interval={logging_interval!r}, expected 'step', 'epoch' or None.",
                fix="choose one of them.",
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float] = {}
        self.last_weight_decay_values: dict[str, float] = {}
        self._lw_watched: dict[str, list[tuple[str, Optimizer]]] = {"step": [], "epoch": []}
        self._lw_noted: dict[str, float] = {}
        self._lw_noted_step = -1
        self._lw_has_warned = False

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Find optimizers, schedules and their names."""
        require_logger(trainer, self)
        self._lw_watched = {"step": [], "epoch": []}
        for name, optimizer, interval in _named_optimizers(trainer):
            self._lw_watched[self.logging_interval or interval].append((name, optimizer))
            for key in _group_keys(name, optimizer):
                self.lrs.setdefault(key, [])
        self._lw_noted = {}
        if not trainer.optimizers and trainer.is_global_zero:
            _log.warning("LearningRateMonitor: configure_optimizers returned no optimizer: there is nothing to log.")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Log the rates with interval "epoch", as they are at the beginning of the epoch."""
        if self._lw_watched["epoch"]:
            self._lw_send(trainer, self._lw_values(self._lw_watched["epoch"]), trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int) -> None:
        """Record the rates before the step, if this step is logged."""
        if trainer.should_log and self._lw_watched["step"]:
            self._lw_noted = self._lw_values(self._lw_watched["step"])
            self._lw_noted_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Log the recorded rates after the step."""
        if self._lw_noted and trainer.at_step_boundary:
            noted, self._lw_noted = self._lw_noted, {}
            if trainer.global_step > self._lw_noted_step:
                self._lw_send(trainer, noted, self._lw_noted_step)

    def _lw_values(self, watched: list[tuple[str, Optimizer]]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, optimizer in watched:
            keys = _group_keys(name, optimizer)
            if name in self.lrs and name not in keys:  # it has had a single group until now
                self.lrs[keys[0]] = self.lrs.pop(name)
            for key, group in zip(keys, optimizer.param_groups, strict=True):
                values[key] = float(group["lr"])  # a tensor is read here, at a log boundary only
                if self.log_momentum:
                    values[f"{key}-momentum"] = self._lw_momentum(group)
                if self.log_weight_decay:
                    values[f"{key}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return values

    def _lw_momentum(self, group: ParamGroup) -> float:
        if "betas" in group:
            return float(group["betas"][0])
        if "momentum" not in group and not self._lw_has_warned:
            self._lw_has_warned = True
            _log.warning("LearningRateMonitor: an optimizer has neither momentum nor betas; 0 is logged.")
        return float(group.get("momentum", 0.0))

    def _lw_send(self, trainer: Trainer, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            if key.endswith("-momentum"):
                self.last_momentum_values[key] = value
            elif key.endswith("-weight_decay"):
                self.last_weight_decay_values[key] = value
            else:
                self.lrs.setdefault(key, []).append(value)
        trainer.log_metrics(values, step)


def _named_optimizers(trainer: Trainer) -> Iterator[tuple[str, Optimizer, str]]:
    """Yield (name, optimizer, interval): those with a schedule by it, then those without."""
    taken: dict[str, int] = {}

    def unique(name: str) -> str:
        count = taken[name] = taken.get(name, -1) + 1
        return f"{name}-{count}" if count else name

    optimizers = [_plain(optimizer) for optimizer in trainer.optimizers]
    scheduled = set()
    for config in trainer.lr_scheduler_configs:
        optimizer = getattr(config.scheduler, "optimizer", None)
        optimizer = _plain(optimizer) if optimizer is not None else optimizers[0]
        scheduled.add(id(optimizer))
        yield config.name or unique(f"lr-{type(optimizer).__name__}"), optimizer, config.interval
    for optimizer in optimizers:
        if id(optimizer) not in scheduled:
            yield unique(f"lr-{type(optimizer).__name__}"), optimizer, "step"


def _plain(optimizer: Any) -> Optimizer:  # Any: the trainer's or the strategy's wrapper, if there is one
    wrapped: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return wrapped


def _group_keys(name: str, optimizer: Optimizer) -> list[str]:
    groups = optimizer.param_groups
    if len(groups) == 1:
        return [f"{name}/{groups[0]['name']}" if "name" in groups[0] else name]
    keys = [f"{name}/{group.get('name', f'pg{index}')}" for index, group in enumerate(groups, start=1)]
    if len(set(keys)) < len(keys):
        raise ConfigError(
            f"LearningRateMonitor: parameter groups of {type(optimizer).__name__} share a name: {keys}.",
            fix="give each group its own 'name', or none.",
        )
    return keys
