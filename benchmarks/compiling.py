"""What `Trainer(compile=)` gains on examples/gpt, and what compiling takes by depth; run.py starts it and prints it.

Variants take turns, a few steps at a time, so that whatever else the machine does falls on all of them. On a CPU, time
is CPU time of this process and of the compilers that it has started, in one thread; on a GPU it is wall time.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "gpt"))

import torch
from model import GPT
from torch import Tensor

import loopwright as lw

BATCH, BLOCK, WIDTH = 16, 128, 128
STEPS_OF_A_TURN = 8
VARIANTS: dict[str, Any] = {"eager": None, "per block": None, "full step": ()}  # the module's compile_blocks


class Clock(lw.Callback):
    """Keeps the seconds of each step."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.began_s = _now_s()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times_s.append(_now_s() - self.began_s)


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + compilers.ru_utime + compilers.ru_stime


class Steady(GPT):
    """Without a schedule, whose length would change with the number of epochs."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def measure_compiling(depths: Iterable[int], *, rounds: int, is_quick: bool) -> dict[str, Any]:
    """Return for each depth and variant the first step's seconds, later ones', eager's time over that, and the loss."""
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        torch.compile(torch.sin, backend="eager" if is_quick else "inductor")(torch.ones(2))  # imports, headers
        rows = [row for layers in depths for row in _compare(layers, rounds, "eager" if is_quick else "inductor")]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "device": device,
        "load": round(os.getloadavg()[0], 1),
        "steps": (rounds + 1) * STEPS_OF_A_TURN,
        "rows": rows,
    }


def _compare(layers: int, rounds: int, backend: str) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    data = _batches()
    runs = {variant: _start(layers, variant, backend) for variant in VARIANTS}
    medians: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for index in range(rounds + 1):
        for variant, (trainer, module, clock) in runs.items():
            trainer.max_epochs = index + 1
            trainer.fit(module, data)
            if index:  # compiled by then
                medians[variant].append(statistics.median(clock.times_s[-STEPS_OF_A_TURN:]))
    return [
        {
            "layers": layers,
            "variant": variant,
            "first_s": clock.times_s[0],
            "step_s": statistics.median(medians[variant]),
            "ratio": statistics.median(a / b for a, b in zip(medians["eager"], medians[variant], strict=True)),
            "loss": float(trainer.callback_metrics["train_loss"]),
        }
        for variant, (trainer, _, clock) in runs.items()
    ]


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (BATCH, BLOCK + 1)
    return [torch.randint(256, size, generator=generator, dtype=torch.uint8) for _ in range(STEPS_OF_A_TURN)]


def _start(layers: int, variant: str, backend: str) -> tuple[lw.Trainer, GPT, Clock]:
    """Return a trainer that continues at each call of fit, its module and its clock."""
    clock = Clock()
    torch.manual_seed(0)
    module = Steady(block_size=BLOCK, layers=layers, width=WIDTH)
    module.compile_blocks = VARIANTS[variant]
    precision = "bf16-mixed" if torch.cuda.is_available() else "32-true"
    trainer = lw.Trainer(
        max_epochs=1, compile=False if variant == "eager" else {"backend": backend}, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        devices=1, log_every_n_steps=STEPS_OF_A_TURN, precision=precision,
    )  # fmt: skip
    return trainer, module, clock
