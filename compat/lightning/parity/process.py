"""What a process does at its limits: 16 bits on the CPU and of inputs, and the exit code after Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ....fabric import Fabric
from ....lazy import is_core
from ....precision import MixedPrecision
from ....trainer.behavior import Behavior
from ....trainer.trainer import Trainer

__all__ = [
    "cast_all_buffers",
    "cast_at_each_use",
    "cast_inputs",
    "exit_on_interrupt",
    "run_without_autocast",
    "use_bfloat16",
]


def use_bfloat16(arguments: dict[str, Any]) -> None:  # Any: arguments of a Trainer or a Fabric
    """Replace `precision="16-mixed"` on the CPU."""
    accelerator = arguments.get("accelerator", "auto")
    is_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    if is_cpu and arguments.get("precision") in ("16-mixed", "16", 16):
        arguments["precision"] = "bf16-mixed"


def run_without_autocast(fabric: Fabric, module: nn.Module, name: str) -> Callable[..., object] | None:
    """Return a method of a Fabric module as it is, on one device; None for `forward`, and on several."""
    if name == "forward" or fabric.world_size > 1:
        return None
    method: Callable[..., object] = getattr(module, name)
    return method


def cast_inputs(fabric: Fabric) -> None:
    """Cast what modules of a Fabric get to the 16 bits of its mixed precision."""
    precision = fabric.precision
    if isinstance(precision, MixedPrecision) and is_core(type(precision)):
        precision.converts_input = True


def cast_all_buffers(owner: Trainer | Fabric) -> None:
    """Let conversions to 16 bits keep no buffers as they are, unless the program says which."""
    precision = owner.fabric.precision if isinstance(owner, Trainer) else owner.precision
    if precision.keep_buffers is None:
        precision.keep_buffers = ()


def cast_at_each_use(trainer: Trainer) -> None:
    """Let autocast of a Trainer cast a weight at each use, so that the gradients of several uses add up in float32."""
    if isinstance(trainer.fabric.precision, MixedPrecision):
        trainer.fabric.precision.caches_weights = False


def exit_on_interrupt(behavior: Behavior) -> Behavior:
    """Let a Trainer end the process with exit code 1 after Ctrl-C."""
    return replace(behavior, error_to_raise=_exit_for_interrupt)


def _exit_for_interrupt(error: BaseException) -> BaseException:
    return SystemExit(1) if isinstance(error, KeyboardInterrupt) else error
