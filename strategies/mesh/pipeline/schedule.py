"""Schedules of torch over the stages of this rank, with shapes that are known before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from .options import SCHEDULES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .shapes import StageShapes
    from .split import StageSplit

# Any in this file: torch's schedules have no common public type.


_Forward = Callable[[int, int, tuple[Tensor, ...] | None], tuple[Tensor, ...]]


class _StageModule(nn.Module):
    """The module that torch runs as a stage."""

    def __init__(self, split: StageSplit, stage: int, forward: _Forward) -> None:
        super().__init__()
        self._stage = stage
        # Not through nn.Module: the user's module has other stages, too.
        self.__dict__["_split"] = split
        self.__dict__["_run"] = forward

    def forward(self, *received: Tensor, number: Tensor) -> tuple[Tensor, ...] | Tensor:
        """Run the stage on a micro-batch, which is given by its number."""
        output: tuple[Tensor, ...] = self.__dict__["_run"](self._stage, int(number), received if self._stage else None)
        return output[0] if len(output) == 1 else output

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the stage's parameters as they are now: gathered while a step runs."""
        yield from self.__dict__["_split"].parameters_of(self._stage)


def can_run(name: str, num_stages: int, num_ranks: int, num_batches: int) -> bool:
    """Return whether torch's schedule takes that number of micro-batches."""
    if name in ("1f1b", "dualpipev"):
        return num_batches >= num_stages
    if name in ("interleaved", "zero-bubble"):
        return num_batches % max(1, num_batches // num_ranks) == 0
    return True


def make_schedule(
    split: StageSplit,
    name: str,
    shapes: dict[int, StageShapes],
    num_batches: int,
    forward: _Forward,
    *,
    group: ProcessGroup,
    device: torch.device,
) -> Any:
    """Return torch's schedule for windows of that many micro-batches of these shapes.

    Args:
        split: This rank's stages.
        name: A name in `SCHEDULES`.
        shapes: Of each stage of this rank.
        num_batches: Micro-batches in a window.
        forward: (stage, number of the micro-batch, received) -> what the next stage needs, or the share of the loss.
        group: The ranks of the pipeline.
        device: Where this process computes.
    """
    number = torch.empty(1, dtype=torch.int64, device="meta")
    stages = [
        pipelining.PipelineStage(
            _StageModule(split, stage, forward),
            stage,
            split.plan.num_stages,
            device,
            input_args=shapes[stage].received or (number,),
            output_args=shapes[stage].returned,
            group=group,
        )
        for stage in split.stages
    ]
    kind = getattr(pipelining, SCHEDULES[name].torch_name)
    only = stages[0] if issubclass(kind, pipelining.schedules.PipelineScheduleSingle) else stages
    # The stage's output is the share of the loss already: nothing of it is scaled by the schedule.
    return kind(only, n_microbatches=num_batches, loss_fn=lambda share, _: share, scale_grads=False)


def run_schedule(schedule: Any, split: StageSplit, num_batches: int) -> None:
    """Run forward and backward passes of a window."""
    numbers = torch.arange(num_batches)
    inputs = (numbers,) if split.has_first else ()
    target = numbers if split.has_last else None
    schedule.step(*inputs, number=numbers, target=target, return_outputs=False)
