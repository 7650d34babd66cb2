"""What a step pays for `Snapshot` and for `reproducible="world"`, beside a plain one; run.py starts it and prints it.

This file is also the program that is measured: `python benchmarks/surviving.py RANKS ROUNDS STEPS` starts the other
rank itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from ranks import run_program
from saving import WIDTH, Wide
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from variants import quiet

import loopwright as lw

MICRO_SHARDS = 8
PARAMETERS = 4_000_000  # a copy has three times as many numbers: 48 MB
BATCH_SIZE = 32
WARM_UP = 3


def measure_surviving(*, num_steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds per optimizer step on one rank and on two, each beside those of a plain run."""
    return [
        {"ranks": ranks, **row}
        for ranks in (1, 2)
        for row in run_program([__file__, str(ranks), str(rounds), str(num_steps)])["rows"]
    ]


class Paced(Wide):
    """Notes when each optimizer step ends."""

    def __init__(self) -> None:
        super().__init__(PARAMETERS)
        self.ended: list[tuple[float, float]] = []  # by the clock, and in CPU time of all threads

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return super().training_step(batch[0], batch_idx)

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.trainer.at_step_boundary:
            self.ended.append((time.perf_counter(), time.process_time()))


def time_step(
    ranks: int, num_steps: int, micro_batches: int, *, every: int | None = None, **arguments: Any
) -> list[float]:
    """Return milliseconds per optimizer step, wall and CPU time of this rank: means over a run."""
    lw.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(num_steps * micro_batches * ranks * BATCH_SIZE, WIDTH))
    module = Paced()
    if every is not None:
        arguments["callbacks"] = [lw.Snapshot(every)]
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = lw.Trainer(
            max_steps=num_steps,
            accelerator="cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **arguments,
        )
        trainer.fit(module, DataLoader(data, batch_size=BATCH_SIZE))
    first, last, count = module.ended[WARM_UP], module.ended[-1], len(module.ended) - 1 - WARM_UP
    return [1e3 * (end - begin) / count for begin, end in zip(first, last, strict=True)]


def main(ranks: int, rounds: int, num_steps: int) -> None:
    """Run all of them in turns, and print the least on rank 0: what other programs take only adds to it."""
    per_rank = MICRO_SHARDS // ranks
    single: dict[str, dict[str, Any]] = {
        "plain": {},
        "`Snapshot(every=20)`": {"every": 20},
        "`Snapshot(every=1)`": {"every": 1},
    }
    window: dict[str, dict[str, Any]] = {
        "plain": {"accumulate_grad_batches": per_rank},
        '`reproducible="world"`': {"reproducible": "world", "micro_shards": MICRO_SHARDS},
    }
    rows = []
    for micro_batches, variants in ((1, single), (per_rank, window)):
        steps = num_steps if micro_batches == 1 else max(num_steps // 4, WARM_UP + 3)
        found: dict[str, list[list[float]]] = {name: [] for name in variants}
        time_step(ranks, steps, micro_batches)  # the first run of a process allocates faster
        for _ in range(rounds):
            for name, arguments in variants.items():
                found[name].append(time_step(ranks, steps, micro_batches, **arguments))
        least = {name: [min(times) for times in zip(*runs, strict=True)] for name, runs in found.items()}
        rows += [
            {
                "name": name,
                "micro_batches": micro_batches,
                "plain_ms": least["plain"],
                "step_ms": times,
            }
            for name, times in least.items()
            if name != "plain"
        ]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(json.dumps({"rows": rows}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:]))
