"""A plateau schedule that a module steps itself, on several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...errors import ModuleError


class RanksPlateau:
    """A schedule whose `step` takes a metric: it gets the mean over ranks, so that all have the same learning rate.

    `isinstance(schedule, ReduceLROnPlateau)` is true for a wrapped one. All but `step` is the wrapped schedule's.

    Args:
        scheduler: The schedule.
        gather: Returns the objects of all ranks in rank order, on every rank.
    """

    def __init__(self, scheduler: Any, gather: Callable[[float], list[float]]) -> None:  # Any: see LRSchedulerConfig
        self.__dict__.update(_scheduler=scheduler, _gather=gather)

    @property  # type: ignore[misc]  # typeshed's __class__ can be assigned; isinstance() asks this one
    def __class__(self) -> Any:  # Any: the schedule's
        return type(self._scheduler)

    def __getattr__(self, name: str) -> Any:  # Any: an attribute of the schedule
        if name in ("_scheduler", "_gather"):
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._scheduler, name, value)

    def step(self, metrics: Tensor | float, *args: object, **kwargs: object) -> object:
        """Step the schedule with the mean of what the ranks pass. On every rank: it communicates.

        Raises:
            ModuleError: A rank passes something else than a number.
        """
        if isinstance(metrics, Tensor) and metrics.numel() != 1:
            raise ModuleError(
                f"{type(self._scheduler).__name__}.step got a tensor of shape {tuple(metrics.shape)}, expected one "
                "number.",
                fix="pass one number, for example values.mean().",
            )
        values = self._gather(float(metrics))
        # Equal ones keep their bits, NaN included.
        mean = values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)
        return self._scheduler.step(mean, *args, **kwargs)

    def __repr__(self) -> str:
        return f"RanksPlateau({self._scheduler!r})"
