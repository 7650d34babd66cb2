"""Optimizer and schedule from the sections of a DeepSpeed configuration, for modules that configure none.

They are made here, and not by the engine, so that the Trainer steps, logs and saves them like all others.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...errors import ConfigError, nearest

__all__ = ["ConfiguredSchedule", "make_optimizer"]

# Any in this file: values of a JSON document; deepspeed has no types.

# DeepSpeed's "Adam" is AdamW, unless its own parameter says otherwise.
_OWN_PARAMETERS = ("adam_w_mode", "torch_adam", "bias_correction")


def make_optimizer(config: dict[str, Any], module: nn.Module, where: str) -> dict[str, Any]:
    """Return what `configure_optimizers` would: an optimizer of the trained parameters, and its schedule.

    Args:
        config: Has a section "optimizer", and may have one "scheduler".
        module: Whose parameters.
        where: Where the configuration stands, for messages.

    Raises:
        ConfigError: There is a schedule without an optimizer, a type is unknown, or its parameters are wrong.
    """
    if "optimizer" not in config:
        raise ConfigError(
            f'{where} has a section "scheduler" and none "optimizer", and the module configures no optimizer either.',
            fix='add the section "optimizer", or define configure_optimizers.',
        )
    optimizer = _optimizer(config, [one for one in module.parameters() if one.requires_grad], where)
    if "scheduler" not in config:
        return {"optimizer": optimizer}
    config = _filled(config, optimizer, module, where)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": _schedule(config, optimizer, where), "interval": "step"},
    }


def _filled(config: dict[str, Any], optimizer: Optimizer, module: nn.Module, where: str) -> dict[str, Any]:
    """Return the configuration without "auto" in its section "scheduler": the run's steps, the optimizer's rate."""
    section = config["scheduler"]
    options = dict(section.get("params") or {})
    if options.get("warmup_max_lr") == "auto":
        options["warmup_max_lr"] = optimizer.param_groups[0]["lr"]
    if options.get("total_num_steps") == "auto":
        trainer = getattr(module, "_trainer", None)
        total = math.inf if trainer is None else trainer.estimated_stepping_batches
        if math.isinf(total):
            raise ConfigError(
                f'{where}: "auto" for scheduler.params.total_num_steps, and nobody knows how many steps the run has.',
                fix="write the number, or pass max_steps to a Trainer.",
            )
        options["total_num_steps"] = int(total)
    return {**config, "scheduler": {**section, "params": options}}


def _optimizer(config: dict[str, Any], parameters: list[nn.Parameter], where: str) -> Optimizer:
    section = config["optimizer"]
    name = str(section.get("type"))
    options = dict(section.get("params", {}))
    own = {key: options.pop(key) for key in _OWN_PARAMETERS if key in options}
    if own.get("bias_correction", True) is not True:
        raise ConfigError(f"{where}: optimizer.params.bias_correction=false.", fix="make it in configure_optimizers.")
    kind = name.lower()
    if kind in ("adam", "adamw"):
        is_decoupled = kind == "adamw" or bool(own.get("adam_w_mode", True))
        made = _cpu_adam(config, is_decoupled) or (torch.optim.AdamW if is_decoupled else torch.optim.Adam)
    else:
        known = {key.lower(): key for key, value in vars(torch.optim).items() if _is_optimizer(value)}
        if kind not in known:
            raise ConfigError(
                f"{where}: optimizer.type={name!r} is unknown{nearest(name, known.values())}.",
                fix="use Adam, AdamW or another one of torch.optim; or make DeepSpeed's own in configure_optimizers.",
            )
        made = getattr(torch.optim, known[kind])
    try:
        optimizer: Optimizer = made(parameters, **options)
    except TypeError as error:
        raise ConfigError(f"{where}: optimizer.params: {error}.", fix="leave that parameter out.") from error
    return optimizer


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


def _cpu_adam(config: dict[str, Any], is_decoupled: bool) -> Any:
    """Return DeepSpeed's own Adam for the host, where the configuration asks for it; None else. It may be built."""
    from .ops import takes_cpu_adam

    if not takes_cpu_adam(config):
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return functools.partial(DeepSpeedCPUAdam, adamw_mode=is_decoupled)


def _schedule(config: dict[str, Any], optimizer: Optimizer, where: str) -> Any:
    from deepspeed.runtime import lr_schedules

    section = config["scheduler"]
    name = str(section.get("type"))
    options = dict(section.get("params", {}))
    kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(kind, type):
        raise ConfigError(
            f"{where}: scheduler.type={name!r} is unknown{nearest(name, lr_schedules.VALID_LR_SCHEDULES)}.",
            fix=f"use one of {', '.join(lr_schedules.VALID_LR_SCHEDULES)}, or one of torch.optim.lr_scheduler.",
        )
    try:
        schedule = kind(optimizer, **options)
    except TypeError as error:
        raise ConfigError(f"{where}: scheduler.params: {error}.", fix="mend that parameter.") from error
    return schedule if isinstance(schedule, LRScheduler) else ConfiguredSchedule(schedule)


class ConfiguredSchedule(LRScheduler):
    """One of DeepSpeed's own schedules as one of torch's: stepped after each optimizer step, as the engine does.

    Args:
        inner: The schedule, which has set the first rate.
    """

    def __init__(self, inner: Any) -> None:
        # Not torch's own beginning, which would step it.
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

    def state_dict(self) -> dict[str, Any]:
        """Return how far the schedule is."""
        return {**self.inner.state_dict(), "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` returned; rates are in the optimizer's state."""
        self.inner.load_state_dict(state_dict)
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
