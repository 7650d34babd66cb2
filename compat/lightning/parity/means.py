"""Logged values as Lightning adds them up: one after the other, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ....trainer.metrics.accumulators import Number, ScalarAccumulator
from ....trainer.trainer import Trainer

__all__ = ["RunningAccumulator", "add_one_by_one"]


class RunningAccumulator(ScalarAccumulator):
    """Adds the values of an epoch in the order in which they came, without more precision than they have."""

    def sums(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the epoch's reduction so far and, for a mean, its weight."""
        total: Tensor | None = self.total
        total_weight: Number | None = self.total_weight
        self._refuse_changed(self.values, self.version)
        for number, weight in zip(self.values, self.weights, strict=True):
            value = as_float(number, device)
            if self.reduce == "mean":
                total = (torch.zeros((), device=device) if total is None else total) + value * weight
                total_weight = weight + (0 if total_weight is None else total_weight)
            elif total is None:
                total = value + 0.0 if self.reduce == "sum" else value
            elif self.reduce == "sum":
                total = total + value
            else:
                total = torch.minimum(total, value) if self.reduce == "min" else torch.maximum(total, value)
        assert total is not None
        if total_weight is None or isinstance(total_weight, Tensor):
            return total, total_weight
        return total, torch.tensor(total_weight, device=device)

    def step_value(self, device: torch.device) -> Number:
        """Return the value of the latest micro-batch."""
        self._refuse_changed(self.step_values, self.step_version)
        return as_float(self.step_values[-1], device)


def as_float(number: Number, device: torch.device) -> Tensor:
    """Return a number as a tensor of shape (): in float64 if it is one, else in float32."""
    if not isinstance(number, Tensor):
        return torch.tensor(number, dtype=torch.get_default_dtype(), device=device)
    value = number.detach().reshape(()).to(device)
    return value if value.dtype in (torch.float32, torch.float64) else value.to(torch.float32)


def add_one_by_one(trainer: Trainer) -> None:
    """Let values that are logged from now on be added one by one."""
    metrics = trainer.parts.metrics
    metrics.accumulator_type, metrics.pools_objects = RunningAccumulator, True
