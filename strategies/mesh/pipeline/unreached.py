"""Stages that no gradient reaches, because a block detaches the hidden state: their parameters keep none.

Stages exchange gradients in any case, here zeros, which an optimizer would take for gradients: decay and moments would
change what one process leaves alone. Ranks compare after the 1st, 2nd, 4th, 8th, ... window which stages a gradient
has reached, and after each window from the first one on in which there was a stage without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ....errors import ModuleError
from .options import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from .split import StageSplit


class UnreachedStages:
    """Takes gradients of zero away from stages before a block that detaches its input.

    Args:
        split: This rank's stages.
        schedule: The name of the schedule.
        device: Where this process computes.
    """

    def __init__(self, split: StageSplit, schedule: str, device: torch.device) -> None:
        self._split, self._schedule, self._device = split, schedule, device
        self._num_windows = 0
        self._first = 0  # the first stage that gradients reach
        self._is_due = False
        self._reached: set[int] = set()
        self._had: set[int] = set()  # ids of parameters that had a gradient before the window

    def begin(self) -> None:
        """Begin a window."""
        self._num_windows += 1
        self._is_due = bool(self._first) or not self._num_windows & (self._num_windows - 1)
        self._reached.clear()
        if self._is_due:
            self._had = {
                id(one)
                for stage in self._split.stages
                for one in self._split.parameters_of(stage)
                if one.grad is not None
            }

    def watch(self, stage: int, received: Iterable[Tensor]) -> None:
        """Note whether a gradient is computed for something that a stage has received."""
        for one in received if self._is_due else ():
            if one.requires_grad:
                one.register_hook(lambda _: self._reached.add(stage))

    def settle(self, pipeline: ProcessGroup, replicas: ProcessGroup | None) -> None:
        """End a window whose gradients are reduced. On every rank: it communicates, after some windows.

        Args:
            pipeline: The ranks of the pipeline.
            replicas: The ranks over which gradients are averaged; None: all.

        Raises:
            ModuleError: A stage was not reached, and the schedule computes gradients of weights from those of inputs.
        """
        if not self._is_due:
            return
        num_stages = self._split.plan.num_stages
        counts = torch.tensor([float(stage in self._reached) for stage in range(num_stages)], device=self._device)
        dist.all_reduce(counts, group=pipeline)
        if dist.get_world_size(replicas) > 1:
            dist.all_reduce(counts, group=replicas)
        unreached = [stage for stage, count in enumerate(counts.tolist()) if stage and not count]
        self._first = unreached[-1] if unreached else 0
        if self._first and SCHEDULES[self._schedule].splits_backward:
            raise ModuleError(
                f"Expected a gradient for the hidden state that stage {self._first} of the pipeline receives with "
                f"schedule={self._schedule!r}, got none: a block detaches it.",
                fix="pass Pipeline(schedule='1f1b') or 'interleaved'; or let gradients flow through all blocks.",
            )
        stages = self._split.stages
        kept = {id(one) for stage in stages if stage >= self._first for one in self._split.parameters_of(stage)}
        for stage in stages:
            for one in self._split.parameters_of(stage) if stage < self._first else ():
                if id(one) not in kept and id(one) not in self._had:
                    one.grad = None
