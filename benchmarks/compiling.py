"""What `Trainer(compile=)` gains on examples/gpt and on a small residual network for images, and what compiling takes.

run.py starts it and prints it. A second start of each compiled variant reads the cache that the first one left.

Variants take turns, a few steps at a time, so that whatever else the machine does falls on all of them. On a CPU, time
is CPU time of this process and of the compilers that it has started, in one thread; on a GPU it is wall time.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "gpt"))

import torch
from model import GPT
from torch import Tensor, nn
from torch.nn import functional as F

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
        return lw.optim.adamw(self.parameters(), lr=3e-4)


class Residual(nn.Module):
    """Two convolutions with norms, and what goes around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(y)))


class Images(lw.Module):
    """A residual network for images of 32 x 32 in ten classes."""

    def __init__(self, layers: int, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.head(self.blocks(self.stem(images)).mean(dim=(2, 3))), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return lw.optim.adamw(self.parameters(), lr=3e-4)


def measure_compiling(depths: Iterable[int], *, rounds: int, is_quick: bool) -> dict[str, Any]:
    """Return a row for each model, depth and variant.

    A row has the first step's seconds, also with the cache of an earlier run, later ones', eager's time over that, the
    loss, and the largest difference of a weight tensor from eager's, relative to its norm.
    """
    backend = "eager" if is_quick else "inductor"
    with torch._inductor.config.patch(compile_threads=1), tempfile.TemporaryDirectory() as folder:
        torch.compile(torch.sin, backend=backend)(torch.ones(2))  # imports, headers
        cases = [("gpt", depth) for depth in depths] + [("images", next(iter(depths)))]
        rows = [row for model, layers in cases for row in _compare(model, layers, rounds, backend, folder)]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "device": device,
        "load": round(os.getloadavg()[0], 1),
        "steps": (rounds + 1) * STEPS_OF_A_TURN,
        "rows": rows,
    }


def _compare(model: str, layers: int, rounds: int, backend: str, folder: str) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    data = _batches(model)
    runs = {variant: _start(model, layers, variant, backend, folder) for variant in VARIANTS}
    medians: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for index in range(rounds + 1):
        for variant, (trainer, module, clock) in runs.items():
            trainer.max_epochs = index + 1
            trainer.fit(module, data)
            if index:  # compiled by then
                medians[variant].append(statistics.median(clock.times_s[-STEPS_OF_A_TURN:]))
    reference = runs["eager"][1]
    return [
        {
            "model": model,
            "layers": layers,
            "variant": variant,
            "first_s": clock.times_s[0],
            "cached_first_s": clock.times_s[0]
            if variant == "eager"
            else _again(model, layers, variant, backend, folder),
            "step_s": statistics.median(medians[variant]),
            "ratio": statistics.median(a / b for a, b in zip(medians["eager"], medians[variant], strict=True)),
            "loss": float(trainer.callback_metrics["train_loss"]),
            "difference": _difference(module, reference),
        }
        for variant, (trainer, module, clock) in runs.items()
    ]


def _again(model: str, layers: int, variant: str, backend: str, folder: str) -> float:
    """Return the seconds of the first step of another run, which finds what was compiled in the cache."""
    torch._dynamo.reset()
    trainer, module, clock = _start(model, layers, variant, backend, folder)
    trainer.fit(module, _batches(model)[:1])
    return clock.times_s[0]


def _difference(module: lw.Module, reference: lw.Module) -> float:
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    return max(float((one - other).norm() / other.norm().clamp(min=1e-6)) for one, other in pairs)


def _batches(model: str) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    if model == "images":
        return [
            (
                torch.randn(BATCH, 3, 32, 32, generator=generator),
                torch.randint(10, (BATCH,), generator=generator),
            )
            for _ in range(STEPS_OF_A_TURN)
        ]
    size = (BATCH, BLOCK + 1)
    return [torch.randint(256, size, generator=generator, dtype=torch.uint8) for _ in range(STEPS_OF_A_TURN)]


def _start(model: str, layers: int, variant: str, backend: str, folder: str) -> tuple[lw.Trainer, lw.Module, Clock]:
    """Return a trainer that continues at each call of fit, its module and its clock."""
    clock = Clock()
    torch.manual_seed(0)
    module: lw.Module = Images(layers)
    if model == "gpt":
        module = Steady(block_size=BLOCK, layers=layers, width=WIDTH)
    module.compile_blocks = VARIANTS[variant]
    precision = "bf16-mixed" if torch.cuda.is_available() else "32-true"
    options = {"backend": backend, "cache_dir": os.path.join(folder, variant.replace(" ", "-"))}
    trainer = lw.Trainer(
        max_epochs=1, compile=False if variant == "eager" else options, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        devices=1, log_every_n_steps=STEPS_OF_A_TURN, precision=precision,
    )  # fmt: skip
    return trainer, module, clock
