"""`OptimizerSettings`: optimizer and learning rate of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ..cli.names import ClassProblem, find_class
from ..errors import ConfigError, nearest
from ..optim import adamw

__all__ = ["SCHEDULES", "OptimizerSettings", "learning_rate_share", "make_optimizer", "make_schedule"]

# Any in this file: arguments of optimizers and schedules.

SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer and learning rate of a recipe.

    Args:
        learning_rate: Largest learning rate.
        weight_decay: Of matrices; vectors (norms, biases) have none.
        betas: Of AdamW.
        eps: Of AdamW.
        warmup: Share of the steps in which the learning rate increases linearly.
        schedule: "cosine", "linear" or "constant", after the warm-up.
        min_lr: Last learning rate, as a share of the largest.
        optimizer: Another optimizer: `{"class_path": ..., "init_args": {...}}`. It gets the groups of parameters, and
            `learning_rate` where its arguments have no `lr`.
        lr_scheduler: Another schedule, in the same form, stepped after each optimizer step.
    """

    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup: float = 0.03
    schedule: str = "cosine"
    min_lr: float = 0.0
    optimizer: Mapping[str, Any] | None = None
    lr_scheduler: Mapping[str, Any] | None = None

    def problems(self) -> list[str]:
        """Return every invalid setting as `name: Expected ..., got ...`."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        if not 0 < self.learning_rate < math.inf:
            yield f"learning_rate: Expected more than 0, got {self.learning_rate}."
        if not 0 <= self.weight_decay < math.inf:
            yield f"weight_decay: Expected at least 0, got {self.weight_decay}."
        if len(self.betas) != 2 or not all(0 <= one < 1 for one in self.betas):
            yield f"betas: Expected two numbers in [0, 1), got {self.betas}."
        if not self.eps > 0:
            yield f"eps: Expected more than 0, got {self.eps}."
        for name in ("warmup", "min_lr"):
            if not 0 <= getattr(self, name) <= 1:
                yield f"{name}: Expected a share in [0, 1], got {getattr(self, name)}."
        if self.schedule not in SCHEDULES:
            near = nearest(self.schedule, SCHEDULES)
            yield f"schedule: Expected one of {', '.join(SCHEDULES)}, got {self.schedule!r}{near}."
        for name, base in (("optimizer", Optimizer), ("lr_scheduler", LRScheduler)):
            node = getattr(self, name)
            if node is not None:
                yield from _class_problems(name, node, base)


def _class_problems(name: str, node: Any, base: type[Any]) -> Iterator[str]:
    if not isinstance(node, Mapping) or "class_path" not in node or set(node) - {"class_path", "init_args"}:
        yield f"{name}: Expected a mapping with class_path and init_args, got {node!r}."
        return
    try:
        found = find_class(str(node["class_path"]), base)
    except ClassProblem as error:
        yield f"{name}: Expected a class of {base.__name__}, got {node['class_path']} ({error})."
        return
    if issubclass(found, ReduceLROnPlateau):
        yield f"{name}: Expected a schedule of steps, got ReduceLROnPlateau, which needs a metric."


def make_optimizer(settings: OptimizerSettings, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return the optimizer of the parameters that require gradients, vectors without weight decay.

    Args:
        settings: The settings.
        parameters: Names and parameters of the model.
    """
    trained = [(name, one) for name, one in parameters if one.requires_grad]
    matrices = [one for name, one in trained if _decays(name, one)]
    vectors = [one for name, one in trained if not _decays(name, one)]
    groups: list[dict[str, Any]] = [
        {"params": some, "weight_decay": decay}
        for some, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
        if some
    ]
    if settings.optimizer is None:
        return adamw(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)
    made: Any = find_class(str(settings.optimizer["class_path"]), Optimizer)
    arguments = dict(settings.optimizer.get("init_args") or {})
    arguments.setdefault("lr", settings.learning_rate)
    if "weight_decay" in arguments:
        groups[0]["weight_decay"] = arguments["weight_decay"] if matrices else 0.0
    try:
        optimizer: Optimizer = made(groups, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"optimizer: Expected arguments of {made.__name__}, got {sorted(arguments)} ({error}).",
            fix="correct init_args of the optimizer.",
        ) from error
    return optimizer


def _decays(name: str, parameter: nn.Parameter) -> bool:
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 keeps a flat shard
    return len(shape) > 1 and not name.endswith("bias")


def make_schedule(settings: OptimizerSettings, optimizer: Optimizer, num_steps: int) -> LRScheduler:
    """Return the schedule of the learning rate, to be stepped after each optimizer step."""
    if settings.lr_scheduler is None:
        return LambdaLR(optimizer, learning_rate_share(settings, num_steps))
    made: Any = find_class(str(settings.lr_scheduler["class_path"]), LRScheduler)
    schedule: LRScheduler = made(optimizer, **(settings.lr_scheduler.get("init_args") or {}))
    return schedule


def learning_rate_share(settings: OptimizerSettings, num_steps: int) -> Callable[[int], float]:
    """Return the function from the number of completed steps to the learning rate's share of the largest.

    The first step has a learning rate above 0, and the last one, where there is a decrease, one above `min_lr`.
    """
    warmup = round(settings.warmup * num_steps)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if settings.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return settings.min_lr + (1 - settings.min_lr) * left

    return share
