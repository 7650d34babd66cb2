"""What is trained on the accelerator, by the Trainer and in a handwritten loop, which are timed alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from variants import OFF, quiet

import loopwright as lw
from loopwright import demos

__all__ = ["GPT", "Sizes", "Task", "by_hand", "by_trainer", "toy", "wait"]

Sizes = dict[str, int]


def wait(device: torch.device) -> None:
    """Wait until the device has computed all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class GPT(nn.Module):
    """The 124 M GPT-2 by default: its forward returns the loss of (batch, length + 1) tokens."""

    def __init__(
        self, vocabulary: int = 50304, length: int = 1024, width: int = 768, heads: int = 12, layers: int = 12
    ) -> None:
        super().__init__()
        self.length, self.layers, self.width = length, layers, width
        self.net = demos.GPT(vocabulary, length, width, layers, heads)

    def forward(self, batch: Tensor) -> Tensor:
        return self.net.loss(batch)

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward passes, with attention: 6 N + 12 L d T (PaLM, appendix B)."""
        count = sum(one.numel() for one in self.parameters()) - self.net.places.weight.numel()
        return 6 * count + 12 * self.layers * self.width * self.length


def toy() -> nn.Module:
    """Return a network so small that the host is what takes the time; its forward returns a loss."""

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, batch: Tensor) -> Tensor:
            loss: Tensor = self.layers(batch).square().mean()
            return loss

    return Toy()


class Task:
    """A training to run twice.

    Args:
        build: Returns a module whose forward returns the loss of a batch.
        batches: One per step, on the device or not.
        device: Where to train.
        precision: As for the Trainer: "32-true", "bf16-mixed" or "16-mixed".
        compile: Arguments of torch.compile; None: not compiled.
        warm_up: Steps that are not timed.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        batches: Sequence[Tensor],
        device: torch.device,
        *,
        precision: str = "32-true",
        compile: dict[str, Any] | None = None,  # Any: arguments of torch.compile
        warm_up: int = 10,
    ) -> None:
        self.build, self.batches, self.device = build, batches, device
        self.precision, self.compile, self.warm_up = precision, compile, warm_up
        self._began_s = 0.0

    def module(self) -> nn.Module:
        """Return the module, always with the same weights."""
        torch.manual_seed(0)
        return self.build()

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return fused AdamW on a device, or AdamW on the CPU."""
        return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=self.device.type == "cuda")

    def tick(self, step: int) -> None:
        """Begin to time at the end of the warm-up; called where a step begins."""
        if step == self.warm_up:
            wait(self.device)
            self._began_s = time.perf_counter()

    def seconds_per_step(self) -> float:
        """Return the mean time of a step; called after the last one."""
        wait(self.device)
        return (time.perf_counter() - self._began_s) / (len(self.batches) - self.warm_up)


class _Module(lw.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.net, self._task, self.s_per_step = task.module(), task, 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self._task.tick(batch_idx)

    def on_train_end(self) -> None:
        self.s_per_step = self._task.seconds_per_step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._task.optimizer(self)


def by_trainer(task: Task, **options: Any) -> tuple[nn.Module, float, lw.Trainer]:
    """Train with the Trainer; return the module, the seconds per step, and the Trainer."""
    module = _Module(task)
    arguments: dict[str, Any] = {
        **OFF, "max_epochs": 1, "accelerator": task.device.type, "devices": 1, "precision": task.precision,
        "compile": False if task.compile is None else task.compile, **options,
    }  # fmt: skip
    with quiet():
        trainer = lw.Trainer(**arguments)
        trainer.fit(module, task.batches)
    return module.net, module.s_per_step, trainer


def by_hand(task: Task) -> tuple[nn.Module, float]:
    """Train in a handwritten loop; return the module and the seconds per step."""
    module = task.module().to(task.device)
    optimizer = task.optimizer(module)
    scaler = torch.amp.GradScaler(task.device.type, enabled=task.precision == "16-mixed")
    step: Callable[[Tensor], Tensor] = module
    if task.compile is not None:
        step = torch.compile(module, **task.compile)
    for number, batch in enumerate(task.batches):
        task.tick(number)
        with _autocast(task):
            loss = step(batch.to(task.device, non_blocking=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return module, task.seconds_per_step()


@contextlib.contextmanager
def _autocast(task: Task) -> Iterator[None]:
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(task.precision)
    with torch.autocast(task.device.type, dtype=dtype) if dtype is not None else contextlib.nullcontext():
        yield
