"""Types of optimizers and schedules in annotations, and objects made of `class_path` and `init_args`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ....settings.make import make

__all__ = [
    "LRSchedulerCallable",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "instantiate_class",
    "instantiate_module",
]

# Any in this file: classes of users, their arguments, and what is made of them.


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's schedule with the name of the metric that it reads."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]
OptimizerCallable = Callable[[Any], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRSchedulerTypeUnion]


def instantiate_class(args: object, init: Mapping[str, Any]) -> object:
    """Return an object of the class that `class_path` names, made of `init_args`.

    Args:
        args: Positional arguments: one, or a tuple of them.
        init: {"class_path": ..., "init_args": {...}}.
    """
    module, _, name = init["class_path"].rpartition(".")
    given = args if isinstance(args, tuple) else (args,)
    return getattr(import_module(module), name)(*given, **init.get("init_args", {}))


def instantiate_module(class_type: type[Any], config: Mapping[str, Any]) -> Any:
    """Return an object of a class, made of the settings in a configuration; `_class_path` may name a subclass."""
    return make(class_type, {key: value for key, value in config.items() if key != "_instantiator"})
