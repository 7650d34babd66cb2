"""What of a pipeline's step its ranks wait: measured with blocks that sleep, so that a shared machine does not matter.

    PYTHONPATH=benchmarks python -m model_parallel.bubbles [--ranks 4] [--schedules gpipe 1f1b] [--counts 8 16] [--json]

A block sleeps in its forward pass, and twice as long in its backward pass. The rest of a step, beside the time in which
a rank's own blocks run, is the bubble. In theory it is (P - 1) / (V M + P - 1) of a step with P ranks, V stages on each
of them, and M micro-batches, for gpipe, 1f1b and interleaved. zero-bubble fills waiting ranks with gradients of
weights; here these take no time, so that the formula of interleaved applies.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import MeshStrategy
from loopwright.strategies.mesh.pipeline import Pipeline
from loopwright.strategies.mesh.pipeline.options import SCHEDULES

# Any in this file: batches and contexts of autograd.

FORWARD_S = 0.01
BLOCKS_PER_RANK = 4
STEPS = 4


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * FORWARD_S)
        return gradient.clone()


class Block(nn.Module):
    """Multiplies by a parameter, slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Sleep.apply(x * self.weight))  # type: ignore[no-untyped-call]


class Net(lw.Module):
    """Blocks in a row."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(num_blocks)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cast(Tensor, self.blocks(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Clock(lw.Callback):
    """Prints the share of waiting in the fastest step that runs in the order of the schedule."""

    def __init__(self, schedule: str, ranks: int, count: int, *, is_json: bool) -> None:
        self.schedule, self.ranks, self.count, self.is_json = schedule, ranks, count, is_json
        self.ends_s: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note the time."""
        self.ends_s.append(time.perf_counter())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Print."""
        if not trainer.is_global_zero:
            return
        step_s = min(end - start for start, end in zip(self.ends_s, self.ends_s[1:], strict=False))
        bubble = 1 - self.count * BLOCKS_PER_RANK * 3 * FORWARD_S / step_s
        theory = bubble_in_theory(self.schedule, self.ranks, self.count)
        if self.is_json:
            stages = STAGES_PER_RANK.get(self.schedule, 2)
            row = {"schedule": self.schedule, "ranks": self.ranks, "stages_per_rank": stages, "count": self.count}
            print(json.dumps({**row, "step_s": step_s, "bubble": bubble, "theory": theory}), flush=True)
            return
        expected = "-" if theory is None else f"{theory:.3f}"
        print(
            f"{self.schedule:12} M={self.count:<3} {step_s:.3f} s a step, bubble {bubble:.3f} ({expected})", flush=True
        )


STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}


def bubble_in_theory(schedule: str, ranks: int, count: int) -> float | None:
    """Return (P - 1) / (V M + P - 1); None for schedules with another formula."""
    stages = STAGES_PER_RANK.get(schedule)
    return None if stages is None else (ranks - 1) / (stages * count + ranks - 1)


def measure(schedule: str, ranks: int, count: int, *, is_json: bool) -> None:
    """Train some steps with that many micro-batches, in processes of their own."""
    trainer = lw.Trainer(
        accelerator="cpu", devices=ranks, max_steps=STEPS, logger=False, accumulate_grad_batches=count,
        strategy=MeshStrategy(pp=ranks, pipeline=Pipeline(schedule=schedule), start_method="fork"),
        callbacks=[Clock(schedule, ranks, count, is_json=is_json)], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.ones(STEPS * count, 2))
    trainer.fit(Net(ranks * BLOCKS_PER_RANK), DataLoader(data))


def main() -> None:
    """Measure the chosen schedules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--counts", nargs="+", type=int, help="micro-batches in a step; twice and four times the ranks")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each measurement")
    args = parser.parse_args()
    for schedule in args.schedules:
        for count in args.counts or (2 * args.ranks, 4 * args.ranks):
            measure(schedule, args.ranks, count, is_json=args.json)


if __name__ == "__main__":
    main()
