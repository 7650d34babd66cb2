"""Optimizer and schedule from the sections of a DeepSpeed configuration, for modules that configure none.

They are made here, not by the engine, so that the Trainer steps, logs and saves them like all others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...errors import ConfigError, nearest
from .config import Config
from .ops import takes_cpu_adam

if TYPE_CHECKING:
    from .engine_types import State

# DeepSpeed's own parameters of Adam, which torch's do not have. Its "Adam" is AdamW unless adam_w_mode says otherwise.
_OWN_PARAMETERS = ("adam_w_mode", "torch_adam", "bias_correction")


def make_optimizer(config: Config, module: nn.Module, where: str) -> Config:
    """Return an optimizer of the trained parameters and its schedule, in the form of `configure_optimizers`.

    Args:
        config: A configuration with a section "optimizer" or "scheduler".
        module: The module.
        where: Location of the configuration, for messages.

    Raises:
        ConfigError: There is a schedule without an optimizer, a type is unknown, or its parameters are wrong.
    """
    if "optimizer" not in config:
        raise ConfigError(
            f'Expected an optimizer for the section "scheduler" of {where}, got neither a section "optimizer" nor an '
            "optimizer from configure_optimizers.",
            fix='add the section "optimizer", or define configure_optimizers.',
        )
    optimizer = _optimizer(config, [one for one in module.parameters() if one.requires_grad], where)
    if "scheduler" not in config:
        return {"optimizer": optimizer}
    schedule = _schedule(config, optimizer, module, where)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _optimizer(config: Config, parameters: list[nn.Parameter], where: str) -> Optimizer:
    section = config["optimizer"]
    name = str(section.get("type"))
    options = dict(section.get("params", {}))
    own = {key: options.pop(key) for key in _OWN_PARAMETERS if key in options}
    if own.get("bias_correction", True) is not True:
        raise ConfigError(
            f"{where}: optimizer.params.bias_correction=false is not supported.",
            fix="create the optimizer in configure_optimizers.",
        )
    kind = name.lower()
    made: Callable[..., Optimizer]
    if kind in ("adam", "adamw"):
        is_decoupled = kind == "adamw" or bool(own.get("adam_w_mode", True))
        if takes_cpu_adam(config):
            from deepspeed.ops.adam import DeepSpeedCPUAdam  # it may be compiled

            made = functools.partial(DeepSpeedCPUAdam, adamw_mode=is_decoupled)
        else:
            made = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    else:
        known = {one.__name__.lower(): one for one in vars(torch.optim).values()
                 if isinstance(one, type) and issubclass(one, Optimizer) and one is not Optimizer}  # fmt: skip
        if kind not in known:
            names = [one.__name__ for one in known.values()]
            raise ConfigError(
                f"{where}: Expected the name of an optimizer, got optimizer.type={name!r}{nearest(name, names)}.",
                fix="use Adam, AdamW or another optimizer of torch.optim, or create DeepSpeed's optimizer in "
                "configure_optimizers.",
            )
        made = known[kind]
    try:
        return made(parameters, **options)
    except TypeError as error:
        raise ConfigError(f"{where}: optimizer.params: {error}.", fix="remove this parameter.") from error


def _schedule(config: Config, optimizer: Optimizer, module: nn.Module, where: str) -> LRScheduler:
    from deepspeed.runtime import lr_schedules

    section = config["scheduler"]
    name = str(section.get("type"))
    options = dict(section.get("params") or {})
    if options.get("warmup_max_lr") == "auto":
        options["warmup_max_lr"] = optimizer.param_groups[0]["lr"]
    if options.get("total_num_steps") == "auto":
        trainer = getattr(module, "_lw_trainer", None)
        total = math.inf if trainer is None else trainer.estimated_stepping_batches
        if math.isinf(total):
            raise ConfigError(
                f'{where}: Expected a known number of steps for scheduler.params.total_num_steps="auto", but it is '
                "unknown.",
                fix="write the number, or pass max_steps to the Trainer.",
            )
        options["total_num_steps"] = int(total)
    kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(kind, type):
        raise ConfigError(
            f"{where}: Expected the name of a scheduler, got scheduler.type={name!r}"
            f"{nearest(name, lr_schedules.VALID_LR_SCHEDULES)}.",
            fix=f"use one of {', '.join(lr_schedules.VALID_LR_SCHEDULES)}, or one of torch.optim.lr_scheduler.",
        )
    try:
        schedule = kind(optimizer, **options)
    except TypeError as error:
        raise ConfigError(f"{where}: scheduler.params: {error}.", fix="correct this parameter.") from error
    return schedule if isinstance(schedule, LRScheduler) else ConfiguredSchedule(schedule)


class ConfiguredSchedule(LRScheduler):
    """A schedule of DeepSpeed as one of torch: stepped after each optimizer step, as in the engine.

    Args:
        inner: DeepSpeed's schedule, which has set the first rate.
    """

    def __init__(self, inner: Any) -> None:  # Any: deepspeed has no types
        # Not through torch's __init__, which would step it.
        self.inner = inner
        self.optimizer = inner.optimizer
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._last_lr = list(self.base_lrs)
        self.last_epoch = 0

    def step(self, epoch: int | None = None) -> None:
        """Set the rate of the next optimizer step."""
        self.inner.step()
        self.last_epoch += 1
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> State:
        """Return the position of the schedule."""
        return {**self.inner.state_dict(), "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: State) -> None:
        """Load what `state_dict` returned; rates are in the optimizer's state."""
        self.inner.load_state_dict(state_dict)
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
