"""What of a pipeline's step its ranks wait: measured with blocks that sleep, so that a shared machine does not matter.

    python benchmarks/pipeline.py [--ranks 4]

A block sleeps in its forward pass, and twice as long in its backward pass. The rest of a step, beside the time in which
a rank's own blocks run, is the bubble. In theory it is (P - 1) / (V M + P - 1) of a step with P ranks, V stages on each
of them, and M micro-batches, for gpipe, 1f1b and interleaved.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import MeshStrategy
from loopwright.strategies.mesh.pipeline import Pipeline

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

    def __init__(self, schedule: str, ranks: int, count: int) -> None:
        self.schedule, self.ranks, self.count = schedule, ranks, count
        self.ends_s: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note the time."""
        self.ends_s.append(time.perf_counter())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Print."""
        if not trainer.is_global_zero:
            return
        step_s = min(end - start for start, end in zip(self.ends_s, self.ends_s[1:], strict=False))
        busy_s = self.count * BLOCKS_PER_RANK * 3 * FORWARD_S
        stages = 2 if self.schedule == "interleaved" else 1
        waits = self.ranks - 1
        theory = f"{waits / (stages * self.count + waits):.3f}" if self.schedule in _WITH_THEORY else "-"
        print(
            f"{self.schedule:12} M={self.count:<3} {step_s:.3f} s a step, bubble {1 - busy_s / step_s:.3f} ({theory})"
        )
        sys.stdout.flush()


_WITH_THEORY = ("gpipe", "1f1b", "interleaved")


def measure(schedule: str, ranks: int, count: int) -> None:
    """Train some steps with that many micro-batches, in processes of their own."""
    trainer = lw.Trainer(
        accelerator="cpu", devices=ranks, max_steps=STEPS, logger=False, accumulate_grad_batches=count,
        strategy=MeshStrategy(pp=ranks, pipeline=Pipeline(schedule=schedule), start_method="fork"),
        callbacks=[Clock(schedule, ranks, count)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.ones(STEPS * count, 2))
    trainer.fit(Net(ranks * BLOCKS_PER_RANK), DataLoader(data))


def main() -> None:
    """Measure all schedules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"):
        for count in (2 * ranks, 4 * ranks):
            measure(schedule, ranks, count)


if __name__ == "__main__":
    main()
