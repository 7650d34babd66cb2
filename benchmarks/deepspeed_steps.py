"""The overhead of a trainer over a hand-written loop with a DeepSpeed engine, in ZeRO stages 1 to 3; run.py prints it.

This file is also the program that is measured, which starts the other process itself:
`python benchmarks/deepspeed_steps.py STAGE STEPS ROUNDS SIZES`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

from fsdp import BATCH_SIZE, Marks, Stack, Step, make, measure_size, optimizer_of, run_program
from torch import Tensor, nn

import loopwright as lw
from loopwright.strategies import DeepSpeedStrategy

# Any in this file: what the measured programs print; deepspeed is not annotated.

RANKS = 2
STAGES = (1, 2, 3)
WIDTHS = (128, 512)  # eight blocks of about WIDTH**2 elements


# --- tables for run.py ----------------------------------------------------------------------------------------------


def measure_deepspeed(*, num_steps: int, rounds: int, is_quick: bool = False) -> dict[str, Any]:
    """Measure each stage in processes of its own; "skipped" says why nothing was measured."""
    if importlib.util.find_spec("deepspeed") is None:
        return {"skipped": "deepspeed is not installed"}
    stages, num_sizes = ((2,), 1) if is_quick else (STAGES, len(WIDTHS))
    return {"stages": [run_program(__file__, stage, num_steps, rounds, num_sizes) for stage in stages]}


# --- the program ------------------------------------------------------------------------------------------------------


def config_of(stage: int) -> dict[str, Any]:
    """Return each configuration of the engine."""
    # As small as the model: buckets of the usual size are memory that each backward pass asks for.
    zero = {"stage": stage, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
    return {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def by_hand(stage: int, stack: Stack, data: list[Tensor], marks: Marks) -> None:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=stack, optimizer=optimizer_of(stack), config=config_of(stage), dist_init_required=False
    )
    with marks:
        for batch in data:
            marks.note()
            engine.backward(engine(batch))
            engine.step()


def by_fabric(fabric: lw.Fabric, stack: Stack, data: list[Tensor], marks: Marks) -> None:
    model, optimizer = fabric.setup(stack, optimizer_of(stack))
    with marks:
        for batch in data:
            marks.note()
            loss = model(batch)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()


def by_trainer(stage: int, stack: Stack, data: list[Tensor], marks: Marks) -> None:
    # Any: the values of many arguments.
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    strategy = DeepSpeedStrategy(config=config_of(stage))
    trainer = lw.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, **quiet)
    with marks:
        trainer.fit(Step(stack, marks.note), data)


def whole(module: nn.Module) -> list[Tensor]:
    """Return copies of the parameters, which in stage 3 lie in parts. On every rank."""
    import deepspeed

    parameters = list(module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [one.detach().clone() for one in parameters]


def main() -> None:
    """Print the time of a step hand-written, with Fabric and with the Trainer, in turns on the same processes."""
    stage, num_steps, rounds, num_sizes = map(int, sys.argv[1:])
    fabric = lw.Fabric(accelerator="cpu", devices=RANKS, strategy=DeepSpeedStrategy(config=config_of(stage)))
    fabric.launch()
    ways: dict[str, Callable[[Stack, list[Tensor], list[Tensor], Marks], None]] = {
        "hand": lambda stack, own, data, marks: by_hand(stage, stack, own, marks),
        "fabric": lambda stack, own, data, marks: by_fabric(fabric, stack, own, marks),
        "trainer": lambda stack, own, data, marks: by_trainer(stage, stack, data, marks),
    }

    def run(mode: str, width: int, data: list[Tensor], marks: Marks) -> list[Tensor]:
        stack = make(width)
        ways[mode](stack, data[fabric.global_rank :: RANKS], data, marks)
        return whole(stack)

    sizes = [
        measure_size(run, width, num_steps, rounds, counts_calls=width == WIDTHS[0]) for width in WIDTHS[:num_sizes]
    ]
    if fabric.is_global_zero:
        print(json.dumps({"stage": stage, "sizes": sizes}), flush=True)


if __name__ == "__main__":
    main()
