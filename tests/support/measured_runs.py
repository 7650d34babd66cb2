"""Real trainings whose storages are followed, and those that the planner simulates, of a small Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from ranks import run_ranks
from tensor_models import Llama
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import loopwright as lw
from loopwright.planning.fake_world import SimulatedCluster
from loopwright.planning.live_memory import LiveMemory
from loopwright.planning.simulation import Training, Usage, measure, simulate
from loopwright.strategies import Strategy

__all__ = ["TRIES", "LlamaTask", "allocated_peak", "fitted_peak", "measured", "simulated", "training"]

TRIES = 3
"""Runs of several ranks, of which the smallest counts: a thread of gloo may hold what it has reduced for a moment more,
so that one run in some hundreds has a bucket more at its peak."""


class LlamaTask(lw.Module):
    def __init__(self, optimizer: str = "adam", blocks: int = 3) -> None:
        super().__init__()
        self.model = Llama(width=64, blocks=blocks)
        self.optimizer_name = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[self.optimizer_name]
        return kind(self.parameters(), lr=1e-3)


def training(*, optimizer: str = "adam", precision: str | None = None, accumulate: int = 1) -> Training:
    batch = torch.zeros(4, 32, dtype=torch.int64)
    return Training(lambda: LlamaTask(optimizer), batch, precision, accumulate=accumulate)


def simulated(task: Training, make: Callable[[], str | Strategy], size: int, rank: int = 0) -> Usage:
    """Return what the planner says of a rank, in a process without memory of other worlds."""
    return run_ranks(lambda *_: simulate(task, make(), devices=size, rank=rank), 1, connect=False)[0]


def measured(task: Training, make: Callable[[], str | Strategy], size: int) -> list[Usage]:
    """Return what the ranks of a real training held and sent."""
    runs = [_real(task, make, size, lambda fabric: _measure(fabric, task)) for _ in range(1 if size == 1 else TRIES)]
    return [min(usages, key=_held) for usages in zip(*runs, strict=True)]


def _held(usage: Usage) -> float:
    return usage.peak_bytes + sum(usage.after_backward.values())


def allocated_peak(task: Training, make: Callable[[], str | Strategy], size: int) -> int:
    """Return the most bytes that torch's allocator of rank 0 had handed out, by the events of torch's profiler."""

    def run(fabric: lw.Fabric) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            _measure(fabric, task)
        assert profiled.profiler is not None
        events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
        now = peak = 0
        for one in sorted(events, key=lambda one: one.start_ns()):
            now += one.nbytes()
            peak = max(peak, now)
        return peak

    return _real(task, make, size, run)[0]


def _measure(fabric: lw.Fabric, task: Training) -> Usage:
    module = fabric.precision.convert_module(task.build())
    return measure(fabric, task, module, task.batch.clone(), LiveMemory())


def _real(task: Training, make: Callable[[], str | Strategy], size: int, run: Callable[[lw.Fabric], Any]) -> list[Any]:
    def rank_of(rank: int, size: int) -> Any:
        plugins = [SimulatedCluster(rank, size)] if size > 1 else None
        fabric = lw.Fabric(accelerator="cpu", strategy=make(), devices=size, precision=task.precision, plugins=plugins)
        return fabric.launch(run)

    return run_ranks(rank_of, size, connect=size > 1)


def fitted_peak(trainer: lw.Trainer, module: lw.Module, loader: Any) -> int:
    """Return the most bytes of live storages from the beginning of a fit's second batch to its end."""
    live, starts = LiveMemory(), list[int]()
    trainer.callbacks.append(lw.callbacks.LambdaCallback(on_train_batch_start=lambda *_: starts.append(live.moment)))
    with live:
        live.hold([*module.parameters(), *module.buffers()], "parameters")
        trainer.fit(module, loader)
    return sum(live.peaks([starts[1], live.moment])[0].values())
