"""Local SGD: weights are averaged over ranks every few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ...protocols import StateDict


class ModelAveraging:
    """Counts the steps of each optimizer, and averages the weights of its parameters when that is due.

    Args:
        period: Steps between two averagings.
        first_step: Steps before the first one, during which gradients are averaged.

    Source: Lin et al. 2020, "Don't use large mini-batches, use local SGD".
    """

    def __init__(self, period: int, first_step: int) -> None:
        self.period = period
        self.first_step = first_step
        self._steps: dict[int, int] = {}  # by the order in which optimizers stepped first
        self._order: dict[int, int] = {}

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step; average if it is due. On every rank: it communicates."""
        index = self._order.setdefault(id(optimizer), len(self._order))
        step = self._steps.get(index, 0)
        self._steps[index] = step + 1
        if step >= self.first_step and (step - self.first_step) % self.period == 0:
            average([parameter for group in optimizer.param_groups for parameter in group["params"]])

    def state_dict(self) -> StateDict:
        """Return the steps of each optimizer."""
        return {"steps": [self._steps[index] for index in sorted(self._steps)]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue counting where another run stopped."""
        self._steps = dict(enumerate(state_dict["steps"]))


@torch.no_grad()
def average(tensors: list[torch.Tensor]) -> None:
    """Replace tensors by their mean over ranks, in place; one message per dtype and device."""
    kinds: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        offset = 0
        for tensor in alike:
            tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()
