"""The overhead of `MeshStrategy` over the same model parallelized with plain torch, on two processes; run.py prints it.

This file is also the program that is measured, which starts the other process itself:
`python -m model_parallel.steps tp STEPS ROUNDS SIZES`, `python -m model_parallel.steps pp STEPS ROUNDS SIZES`.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from fsdp import WARM_UP, Marks, run_program, silence
from torch import Tensor
from torch.distributed.tensor import DTensor

import loopwright as lw
from loopwright.strategies import MeshStrategy
from loopwright.strategies.mesh.pipeline import Pipeline
from model_parallel.model import (
    TENSOR_PLAN,
    Gpt,
    HalfByHand,
    Size,
    Step,
    batches,
    loss_of,
    make,
    optimizer_of,
    parallelize_by_hand,
    schedule_by_hand,
)

# Any in this file: what the measured programs print.

RANKS = 2
MODES = ("hand", "trainer")
MICRO_BATCHES = 4  # of a pipelined step
SIZES = {
    "tp": (Size("tiny", 64, 2, 16, 4), Size("small", 256, 4, 64, 4), Size("larger", 512, 4, 128, 4)),
    "pp": (Size("tiny", 64, 2, 16, 4), Size("small", 256, 4, 64, 2), Size("larger", 512, 4, 128, 1)),
}
BUBBLES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
BUBBLE_RANKS = 4


# --- tables for run.py ------------------------------------------------------------------------------------------------


def measure_mesh(*, num_steps: int, rounds: int, is_quick: bool = False) -> dict[str, Any]:
    """Measure in processes of their own: steps and calls of each axis, and how long ranks of a pipeline wait."""
    axes = {
        axis: run_program("model_parallel.steps", axis, num_steps, rounds, 1 if is_quick else len(sizes))["sizes"]
        for axis, sizes in SIZES.items()
    }
    ranks, schedules = (2, ("1f1b",)) if is_quick else (BUBBLE_RANKS, BUBBLES)
    counts = (2 * ranks,) if is_quick else (2 * ranks, 4 * ranks)
    bubbles = [bubble_of(schedule, ranks, count) for schedule in schedules for count in counts]
    return {"axes": axes, "bubbles": bubbles}


def bubble_of(schedule: str, ranks: int, count: int) -> dict[str, Any]:
    """Return which share of a step ranks wait, where blocks sleep; see bubbles.py."""
    return run_program("model_parallel.bubbles", "--json", "--ranks", ranks, "--schedules", schedule, "--counts", count)


# --- the program ------------------------------------------------------------------------------------------------------


def strategy_for(axis: str) -> MeshStrategy:
    """Return the strategy of our side."""
    if axis == "tp":
        return MeshStrategy(tp=RANKS, tensor_plan=TENSOR_PLAN, verify=False)
    return MeshStrategy(pp=RANKS, pipeline=Pipeline(schedule="1f1b"), verify=False)


def by_trainer(axis: str, gpt: Gpt, data: list[tuple[Tensor, Tensor]], marks: Marks) -> None:
    """Train with the Trainer."""
    # Any: the values of many arguments.
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    quiet["accumulate_grad_batches"] = MICRO_BATCHES if axis == "pp" else 1
    trainer = lw.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy_for(axis), max_epochs=1, **quiet)
    with marks:
        trainer.fit(Step(gpt, marks.note), data)


def tensors_by_hand(gpt: Gpt, data: list[tuple[Tensor, Tensor]], marks: Marks) -> None:
    """Train in a hand-written loop with torch's tensor parallelism."""
    parallelize_by_hand(gpt, RANKS)
    optimizer = optimizer_of(gpt)
    with marks:
        for tokens, targets in data:
            loss = loss_of(gpt(tokens), targets)
            optimizer.zero_grad()
            loss.backward()
            marks.note()
            optimizer.step()


def stages_by_hand(gpt: Gpt, data: list[tuple[Tensor, Tensor]], marks: Marks) -> None:
    """Train in a hand-written loop with torch's pipeline stages."""
    stage = HalfByHand(gpt, dist.get_rank())
    schedule = schedule_by_hand(stage, MICRO_BATCHES)
    optimizer = optimizer_of(stage)
    windows = [data[start : start + MICRO_BATCHES] for start in range(0, len(data), MICRO_BATCHES)]
    joined = [tuple(torch.cat(parts) for parts in zip(*window, strict=True)) for window in windows]
    with marks:
        for tokens, targets in joined:
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                schedule.step(tokens)
            else:
                losses: list[Tensor] = []
                schedule.step(target=targets, losses=losses)
            marks.note()
            optimizer.step()


def train(axis: str, mode: str, size: Size, data: list[tuple[Tensor, Tensor]], marks: Marks) -> dict[str, Tensor]:
    """Train in one of the ways; return copies of this rank's weights, the full ones under tensor parallelism."""
    gpt = make(size)
    with silence():
        if mode == "trainer":
            by_trainer(axis, gpt, data, marks)
        elif axis == "tp":
            tensors_by_hand(gpt, data, marks)
        else:
            stages_by_hand(gpt, data, marks)
    return {name: full(one) for name, one in gpt.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, gathered where it is split. On every rank: it communicates."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of weights; a hand-written stage has those of the other one, too."""
    return max(float((one - theirs[name]).abs().max()) for name, one in ours.items())


def measure_size(axis: str, size: Size, num_steps: int, rounds: int, *, counts_calls: bool) -> dict[str, Any]:
    """Return times and calls of a step of both sides, in turns, as seen by this rank."""
    rounds_of: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    calls: dict[str, tuple[float, float]] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    per_step = MICRO_BATCHES if axis == "pp" else 1
    data = batches(size, (num_steps + WARM_UP + 1) * per_step)
    for number in range(rounds + counts_calls):
        is_counting = number == rounds
        for mode in MODES if number % 2 == 0 else MODES[::-1]:
            marks = Marks(counts_calls=is_counting)
            weights[mode] = train(axis, mode, size, data, marks)
            first, second = zip(*marks.differences(), strict=True)
            if is_counting:
                calls[mode] = (min(first), min(second))  # threads that end, and the like, add some
            else:
                rounds_of[mode].append((statistics.median(first), statistics.median(second)))
    return {
        "size": size.numbers,
        "rounds": rounds_of,
        "calls": calls,
        "largest_difference": largest_difference(weights["trainer"], weights["hand"]),
    }


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of one size over ranks: wall time of rank 0, CPU time of all, calls of each."""
    first = ranks[0]
    walls = {mode: [wall for wall, _ in first["rounds"][mode]] for mode in MODES}
    cpus = {
        mode: [sum(cpu for _, cpu in each) for each in zip(*(one["rounds"][mode] for one in ranks), strict=True)]
        for mode in MODES
    }
    ratios = [ours / hand for hand, ours in zip(walls["hand"], walls["trainer"], strict=True)]
    cpu_ratios = [ours / hand for hand, ours in zip(cpus["hand"], cpus["trainer"], strict=True)]
    return {
        "size": first["size"],
        "modes": {
            mode: {
                "wall_us": 1e6 * statistics.median(walls[mode]),
                "cpu_us": 1e6 * statistics.median(cpus[mode]),
                "calls": [one["calls"][mode] for one in ranks] if first["calls"] else [],
            }
            for mode in MODES
        },
        "ratio": statistics.median(ratios),
        "ratios": [min(ratios), max(ratios)],
        "cpu_ratio": statistics.median(cpu_ratios),
        "largest_difference": max(one["largest_difference"] for one in ranks),
    }


def main() -> None:
    """Print the time of a step hand-written and with the Trainer, in turns on the same processes."""
    axis, (num_steps, rounds, num_sizes) = sys.argv[1], map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    fabric = lw.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy_for(axis))
    fabric.launch()
    own = [
        measure_size(axis, size, num_steps, rounds, counts_calls=index == 0)
        for index, size in enumerate(SIZES[axis][:num_sizes])
    ]
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, own)
    if fabric.is_global_zero:
        print(json.dumps({"sizes": [joined(list(ranks)) for ranks in zip(*everyone, strict=True)]}), flush=True)


if __name__ == "__main__":
    main()
