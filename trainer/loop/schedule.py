"""Optimizers and learning-rate schedules: what `configure_optimizers` may return, and when a schedule is stepped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from ...errors import ConfigError, ModuleError, nearest
from ...messages import warn
from ...precision.base import evaluates_again
from ...protocols import Stateful, StepFunction, Tree

if TYPE_CHECKING:
    from ..run import Run

_FORMS = (
    "an optimizer; a list of optimizers; ([optimizers], [schedulers]); {'optimizer': ..., 'lr_scheduler': ...}; "
    "a list of such dicts; or None"
)
_SAID_MISSING = -2
_SCHEDULER_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")

Returned: TypeAlias = object  # what configure_optimizers returned, in one of its forms or a wrong one


@dataclass(slots=True)
class LRSchedulerConfig:
    """A schedule and when it is stepped.

    Attributes:
        scheduler: A torch schedule, or any object with `step`, `state_dict` and `load_state_dict`.
        interval: "step" counts optimizer steps (never micro-batches), "epoch" counts epochs. Where it is not given, it
            is "epoch", except for schedules of `lw.schedules`.
        frequency: Number of intervals between two steps of the schedule.
        monitor: Name of the logged metric that a plateau schedule reads.
        strict: Whether a missing metric is an error; otherwise a warning, and the schedule is not stepped.
        name: Name in the logs of LearningRateMonitor.
        reduce_on_plateau: Whether `scheduler.step` takes the metric.
        last_metric_step: `global_step` of the metric value that it was last stepped with: no value counts twice.
    """

    scheduler: Any  # Any: a schedule of torch, or an object that `lr_scheduler_step` steps
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False
    last_metric_step: int = -1

    def is_due(self, interval: str, count: int) -> bool:
        """Whether the schedule is stepped now that `count` intervals of this kind are complete."""
        return self.interval == interval and count % self.frequency == 0


def read_optimizers(
    returned: Returned,
    *,
    is_automatic: bool,
    may_be_joint: bool,
    has_own_scheduler_step: bool,
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return optimizers and schedules from any accepted form of `configure_optimizers`.

    Raises:
        ModuleError: The form is not accepted, or a schedule is not usable; the message names the forms.
        ConfigError: Several optimizers with automatic optimization, and they may not be joint, or one of them evaluates
            the model itself.
    """
    optimizers, raw_schedulers = _split(returned)
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise _wrong_form(f"item {index} is {type(optimizer).__name__}, no torch optimizer")
    if is_automatic and len(optimizers) > 1:
        _check_joint(optimizers, may_be_joint=may_be_joint)
    configs = [_scheduler_config(raw, is_automatic=is_automatic) for raw in raw_schedulers]
    for config in configs:
        _check_scheduler(config, optimizers, has_own_scheduler_step=has_own_scheduler_step, is_automatic=is_automatic)
    return optimizers, configs


def _check_joint(optimizers: Sequence[Optimizer], *, may_be_joint: bool) -> None:
    if not may_be_joint:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and automatic optimization steps one.",
            fix="set self.automatic_optimization = False and step them in training_step, or return one optimizer with "
            "several parameter groups.",
        )
    names = [type(one).__name__ for one in optimizers]
    evaluating = [name for name, one in zip(names, optimizers, strict=True) if evaluates_again(one)]
    if evaluating:
        raise ConfigError(
            f"Expected optimizers that step once per loss, got {', '.join(names)}: {evaluating[0]} evaluates the model "
            "within its step, and the others would step in between.",
            fix="set self.automatic_optimization = False and step them in training_step, or set evaluates_closure = "
            f"False on {evaluating[0]} if it needs no evaluation.",
        )


def _wrong_form(detail: str) -> ModuleError:
    return ModuleError(f"configure_optimizers: {detail}.", fix=f"return {_FORMS}.")


def _split(returned: Returned) -> tuple[list[Any], list[object]]:  # Any: checked by `read_optimizers`
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _split_dict(returned)
    if isinstance(returned, list | tuple):
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], list | tuple):
            optimizers, schedulers = returned
            if not isinstance(schedulers, list | tuple):
                schedulers = [schedulers]
            return list(optimizers), list(schedulers)
        if len(returned) == 2 and all(isinstance(part, list) for part in returned):
            return list(returned[0]), list(returned[1])
        if returned and all(isinstance(item, Mapping) for item in returned):
            pairs = [_split_dict(item) for item in returned]
            return [o for pair in pairs for o in pair[0]], [s for pair in pairs for s in pair[1]]
        if all(isinstance(item, Optimizer) for item in returned):
            return list(returned), []
    if isinstance(returned, type) and issubclass(returned, Optimizer):
        raise ModuleError(
            f"configure_optimizers: expected an optimizer, got the class {returned.__name__}.",
            fix=f"return {returned.__name__}(self.parameters(), lr=...).",
        )
    raise _wrong_form(f"expected an optimizer, got {_describe(returned)}")


def _describe(returned: Returned) -> str:
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return f"{type(returned).__name__} of {[type(item).__name__ for item in returned]}"
    return type(returned).__name__


def _split_dict(returned: Mapping[str, Tree]) -> tuple[list[object], list[object]]:
    if "optimizer" not in returned:
        raise _wrong_form(f"the dict has the keys {sorted(map(str, returned))} and no 'optimizer'")
    extra = set(returned) - {"optimizer", "lr_scheduler", "monitor"}
    if extra:
        hints = [f"{key!r}{nearest(key, ('optimizer', 'lr_scheduler', 'monitor'))}" for key in sorted(extra)]
        warn(f"configure_optimizers: unknown keys are ignored: {', '.join(hints)}")
    scheduler = returned.get("lr_scheduler")
    if scheduler is None:
        return [returned["optimizer"]], []
    monitor = returned.get("monitor")
    if monitor is not None:
        scheduler = dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
        scheduler.setdefault("monitor", monitor)
    return [returned["optimizer"]], [scheduler]


def _scheduler_config(raw: Tree, *, is_automatic: bool) -> LRSchedulerConfig:
    if not isinstance(raw, Mapping):
        interval = getattr(type(raw), "_lw_interval", "epoch")
        return LRSchedulerConfig(raw, interval=interval, reduce_on_plateau=isinstance(raw, ReduceLROnPlateau))
    if "scheduler" not in raw:
        raise ModuleError(
            f"configure_optimizers: the lr_scheduler dict has the keys {sorted(map(str, raw))} and no 'scheduler'.",
            fix="put the schedule itself under the key 'scheduler'.",
        )
    unknown = [key for key in raw if key not in _SCHEDULER_KEYS]
    if unknown:
        hints = ", ".join(f"{key!r}{nearest(str(key), _SCHEDULER_KEYS)}" for key in unknown)
        warn(f"configure_optimizers: unknown keys of lr_scheduler are ignored: {hints}")
    values = {key: raw[key] for key in _SCHEDULER_KEYS if key in raw}
    values.setdefault("interval", getattr(type(raw["scheduler"]), "_lw_interval", "epoch"))
    values.setdefault("reduce_on_plateau", isinstance(raw["scheduler"], ReduceLROnPlateau))
    config = LRSchedulerConfig(**values)
    if config.interval not in ("step", "epoch"):
        raise ModuleError(
            f"configure_optimizers: lr_scheduler has interval={config.interval!r}, expected 'step' or 'epoch'.",
            fix="choose 'step' (optimizer steps) or 'epoch'.",
        )
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ModuleError(
            f"configure_optimizers: lr_scheduler has frequency={config.frequency!r}, expected a whole number >= 1.",
            fix="pass how many intervals lie between two steps of the schedule.",
        )
    if not is_automatic and (config.monitor or config.reduce_on_plateau) and "monitor" in raw:
        warn("manual optimization steps no schedule by itself: 'monitor' is ignored")
    return config


def _check_scheduler(
    config: LRSchedulerConfig, optimizers: list[Optimizer], *, has_own_scheduler_step: bool, is_automatic: bool
) -> None:
    scheduler = config.scheduler
    name = type(scheduler).__name__
    if not isinstance(scheduler, Stateful):
        raise ModuleError(
            f"configure_optimizers: {name} has no state_dict and load_state_dict, so it could not be resumed.",
            fix="use a schedule from torch.optim.lr_scheduler, or give your class both methods.",
        )
    if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau) and not has_own_scheduler_step and is_automatic:
        raise ModuleError(
            f"configure_optimizers: {name} is not a torch schedule, so when and how to step it is unknown.",
            fix="override lr_scheduler_step(self, scheduler, metric) in your module.",
        )
    owner = getattr(scheduler, "optimizer", None)
    if owner is not None and not any(owner is optimizer for optimizer in optimizers):
        raise ModuleError(
            f"configure_optimizers: {name} belongs to an optimizer that was not returned.",
            fix="return the optimizer that the schedule was built with.",
        )
    if config.reduce_on_plateau and config.monitor is None and is_automatic:
        raise ModuleError(
            f"configure_optimizers: {name} needs the name of a metric and has none.",
            fix="return {'optimizer': o, 'lr_scheduler': {'scheduler': s, 'monitor': 'val_loss'}}.",
        )
    if isinstance(scheduler, OneCycleLR) and config.interval == "epoch" and is_automatic:
        warn("OneCycleLR is stepped once per epoch; pass interval='step' if it counts steps")


def step_scheduler(config: LRSchedulerConfig, metric: Tensor | float | None, override: StepFunction | None) -> None:
    """Step one schedule, through the module's own `lr_scheduler_step` where it has one.

    Raises:
        ModuleError: The schedule has rates for fewer parameter groups than its optimizer has by now.
    """
    try:
        if override is not None:
            override(config.scheduler, metric)
        elif metric is None:
            config.scheduler.step()
        else:
            config.scheduler.step(metric)
    except ValueError as error:
        known = len(getattr(config.scheduler, "base_lrs", ()))
        now = len(getattr(getattr(config.scheduler, "optimizer", None), "param_groups", ()))
        if not 0 < known < now:
            raise
        raise ModuleError(
            f"{type(config.scheduler).__name__} has rates for {known} parameter groups, and its optimizer has {now}: "
            "groups were added during training, as callbacks that unfreeze layers do.",
            fix="use a schedule of lw.schedules, or torch's CosineAnnealingLR or StepLR, which follow added groups; or "
            "give the optimizer all groups from the beginning.",
        ) from error


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step_due_schedules(run: Run, interval: str, count: int) -> None:
    """Step the schedules that are due now that `count` intervals are complete.

    Plateau schedules are stepped here when they count steps; those that count epochs wait for `step_plateaus`, because
    the epoch's metrics come after its last step.
    """
    own = run.lifecycle.own("lr_scheduler_step")
    for config in run.schedulers:
        if not config.is_due(interval, count):
            continue
        if not config.reduce_on_plateau:
            step_scheduler(config, None, own)
        elif interval == "step":
            _step_plateau(run, config, own)


def step_plateaus(run: Run, epochs: int) -> None:
    """Step the plateau schedules that count epochs, once the epoch's metrics are available."""
    if not run.is_automatic:
        return
    own = run.lifecycle.own("lr_scheduler_step")
    for config in run.schedulers:
        if config.reduce_on_plateau and config.is_due("epoch", epochs):
            _step_plateau(run, config, own)


def _step_plateau(run: Run, config: LRSchedulerConfig, own: StepFunction | None) -> None:
    """Step a plateau schedule with its metric, unless it was already stepped with this value. On every rank."""
    name = config.monitor
    assert name is not None
    run.metrics.synchronize([name])  # ranks with different rates would diverge
    at = run.metrics.metric_step(name)
    if at is None:
        if run.trainer.enable_validation and run.progress.validated_at < 0:
            return  # the metric may be one of the validation that is still to come
        known = sorted(run.metrics.callback_metrics())
        if config.strict:
            raise ModuleError(
                f"the schedule {type(config.scheduler).__name__} monitors {name!r}{nearest(name, known)}, which was "
                f"not logged; logged are {known}.",
                fix=f"log it with self.log({name!r}, value), or set strict=False in the schedule's dict.",
            )
        if config.last_metric_step != _SAID_MISSING:
            config.last_metric_step = _SAID_MISSING
            warn(f"the schedule's metric {name!r} was not logged; it is not stepped")
        return
    if at != config.last_metric_step:
        config.last_metric_step = at
        step_scheduler(config, run.metrics.callback_metrics()[name], own)
