"""What a training step returns as its loss, and how the losses of a window add up.

A loss is a sum and a weight. Over a window of micro-batches the gradient wanted is

    d/dw  (sum_1 + ... + sum_n) / (weight_1 + ... + weight_n)

which does not depend on how the samples were cut into micro-batches. The total weight is known only after the last
forward pass, so each backward pass runs on `sum_i / reference` with a reference chosen at the first micro-batch, and
the gradients are multiplied once by `reference / total`. A plain mean counts as one micro-batch of weight 1; there the
reference is the planned size of the window, which makes a full window bit-equal to `(loss / n).backward()`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ModuleError
from ..metrics.accumulators import accumulation_dtype

__all__ = ["Loss", "WindowLoss"]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a sum over elements and the weight of these elements.

    Args:
        sum: Sum of the element losses: shape (), any floating dtype, with its autograd graph.
        weight: How much the sum counts, in any unit that is the same for all micro-batches of a run (tokens, pixels,
            samples): a non-negative number, or a tensor of shape () on any device, which is never read by the host.
    """

    sum: Tensor
    weight: Tensor | float

    def mean(self) -> Tensor:
        """Return sum / weight, and 0 where the weight is 0: shape (), on the device of the sum."""
        weight = self.weight
        if isinstance(weight, Tensor):
            weight = weight.reshape(()).to(self.sum.device, non_blocking=True)
            return torch.where(weight > 0, self.sum / weight, torch.zeros_like(self.sum))
        return self.sum / weight if weight > 0 else torch.zeros_like(self.sum)


def read_loss(output: Any) -> Tensor | Loss | None:  # Any: whatever the user's step returned
    """Return the loss in what `training_step` returned, or None where the batch is to be skipped.

    Raises:
        ModuleError: The value is none of the accepted forms.
    """
    if output is None or isinstance(output, Tensor | Loss):
        return output
    if isinstance(output, Mapping):
        if "loss_sum" in output and "weight" in output:
            return Loss(output["loss_sum"], output["weight"])
        if "loss" in output:
            loss = output["loss"]
            if isinstance(loss, Tensor | Loss):
                return loss
            raise ModuleError(
                f"training_step returned a dict whose 'loss' is {type(loss).__name__}, expected a tensor or lw.Loss.",
                fix="return {'loss': loss} where loss is a scalar tensor with its graph.",
            )
        raise ModuleError(
            f"training_step returned a dict with the keys {sorted(map(str, output))}, "
            "expected 'loss', or 'loss_sum' and 'weight'.",
            fix="add the key 'loss', or return None to skip the batch.",
        )
    raise ModuleError(
        f"training_step returned {type(output).__name__}, expected a tensor, lw.Loss, a dict with 'loss', or None.",
        fix="return the scalar loss tensor, or None to skip the batch.",
    )


class WindowLoss:
    """The losses of one window as they come: gives each micro-batch its share, then the factor for the gradients.

    One object serves a whole run: `begin` starts the next window.
    """

    __slots__ = ("count", "device", "planned", "reference", "total")
    has_nothing = False  # whether a window that other ranks skip, too, is skipped because nothing counts on any of them

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin(1)

    def begin(self, planned: int) -> None:
        """Start a window that is planned to have `planned` micro-batches; it may end earlier, never later."""
        self.planned = planned
        self.count = 0
        self.reference: Tensor | float | None = None
        self.total: Tensor | float = 0.0

    def share(self, loss: Tensor | Loss) -> Tensor:
        """Return what this micro-batch calls backward on: shape (), with graph.

        Raises:
            ModuleError: The loss is no scalar, or means and sums are mixed in one window.
        """
        if isinstance(loss, Loss):
            return self._share_of_sum(loss)
        if self.reference is not None:
            raise _mixed_forms()
        if loss.ndim and loss.numel() != 1:
            raise ModuleError(
                f"training_step returned a loss of shape {tuple(loss.shape)}, expected a scalar.",
                fix="reduce it, for example with loss.mean(), or return lw.Loss(losses.sum(), losses.numel()).",
            )
        self.count += 1
        return loss if self.planned == 1 else loss / self.planned

    def _share_of_sum(self, loss: Loss) -> Tensor:
        if self.count:
            raise _mixed_forms()
        total, weight = loss.sum, loss.weight
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise ModuleError(
                f"the sum of a loss is {_describe(total)}, expected a scalar tensor.",
                fix="pass the sum over all elements, for example losses.sum().",
            )
        if isinstance(weight, Tensor) and weight.numel() == 1:
            weight = weight.detach().reshape(()).to(self.device, non_blocking=True)
        elif isinstance(weight, Tensor) or not isinstance(weight, int | float) or not weight >= 0:
            raise ModuleError(
                f"the weight of a loss is {_describe(weight)}, expected a number of at least 0.",
                fix="pass the number of elements in the sum, as a number or a tensor of one element.",
            )
        if self.reference is None:
            if isinstance(weight, Tensor):
                if self.planned == 1:  # no factor comes after it: a sum that weighs nothing gets its gradient of 0 here
                    self.reference = torch.where(weight > 0, weight.to(total.dtype), math.inf)
                else:
                    self.reference = torch.where(weight > 0, weight, torch.ones_like(weight))
            else:
                self.reference = float(weight) if weight > 0 else 1.0
        self.total = self.total + weight
        return total / self.reference

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch of this window had a loss, so that there is nothing to step with.

        A loss of weight 0 is a loss: its gradient is 0. Whether a weight is 0 may be known to the device only.
        """
        return self.reference is None and self.count == 0

    def gradient_factor(self) -> Tensor | float | None:
        """Return what the accumulated gradients are to be multiplied with, or None where they are right as they are."""
        if self.reference is None:
            return None if self.count == self.planned else self.planned / self.count
        if isinstance(self.total, Tensor):
            if self.planned == 1:
                return None
            # Counts are integers, and torch would divide those in float32.
            total = self.total.to(accumulation_dtype(self.device))
            return torch.where(total > 0, self.reference / total, torch.zeros_like(total))
        if not self.total:
            return 0.0
        return None if self.total == self.reference else self.reference / self.total


def _describe(value: Any) -> str:  # Any: what the user passed
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _mixed_forms() -> ModuleError:
    return ModuleError(
        "training_step returned a mean for one micro-batch and a sum with a weight for another of the same window.",
        fix="return the same form for every batch: lw.Loss(sum, weight) counts exactly, a mean counts as one batch.",
    )
