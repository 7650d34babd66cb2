"""Sums of bfloat16 gradients in float32 on two ranks, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from toys import Net, loader, net, quiet

from loopwright.strategies.ddp.strategy import DDPStrategy
from loopwright.strategies.fsdp.strategy import FSDPStrategy

WINDOW = 32
ONE_CAST = 2.0**-8


class Recording(Net):
    """Keeps the full gradients of the last step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = [
            p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.detach().clone()
            for p in self.parameters()
        ]


def gradients(rank: int, size: int, strategy: str, **options: Any) -> list[list[Tensor]]:
    found = []
    for dtype in (None, "float32"):
        chosen: Any = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}[strategy]()
        module = net(Recording)
        quiet(
            devices=size, strategy=chosen, max_epochs=1, accumulate_grad_batches=WINDOW, precision="bf16-true",
            grad_accumulation_dtype=dtype, **options,
        ).fit(module, loader(4 * WINDOW, 2))  # fmt: skip
        found.append([gradient.double() for gradient in module.gradients])
    return found


def reference() -> list[Tensor]:
    module = net().bfloat16()
    totals = [torch.zeros_like(p, dtype=torch.float64) for p in module.parameters()]
    batches = list(loader(4 * WINDOW, 2))
    for batch in batches:
        module.zero_grad()
        (module.loss([part.bfloat16() for part in batch]) / WINDOW).backward()
        for total, parameter in zip(totals, module.parameters(), strict=True):
            total += parameter.grad.double() / 2
    return totals


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    off = sum(float((one - other).square().sum()) for one, other in zip(found, expected, strict=True))
    return float((off / sum(float(one.square().sum()) for one in expected)) ** 0.5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_windows_and_ranks_are_summed_as_in_float64(strategy: str) -> None:
    expected = reference()
    results = run_ranks(gradients, 2, strategy, connect=False, timeout_s=120)
    for plain, summed in results:
        assert error(summed, expected) < ONE_CAST / 2 < error(plain, expected)
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


class Skipping(Recording):
    """Has no loss on rank 1 in the first window, and on no rank in the second."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        window = batch_idx // 2
        return None if window == 1 or (window == 0 and self.global_rank) else super().training_step(batch, batch_idx)


def skipped(rank: int, size: int) -> Any:
    module = net(Skipping)
    trainer = quiet(
        devices=size, strategy=DDPStrategy(), max_epochs=1, accumulate_grad_batches=2, precision="bf16-true",
        grad_accumulation_dtype="float32",
    )  # fmt: skip
    trainer.fit(module, loader(24, 2))
    return trainer.global_step, trainer.progress.skipped_steps, [p.detach().clone() for p in module.parameters()]


def test_ranks_without_a_loss_take_part_and_no_loss_at_all_makes_no_step() -> None:
    first, second = run_ranks(skipped, 2, connect=False)
    assert first[:2] == second[:2] == (2, 1)
    assert all(torch.equal(one, other) for one, other in zip(first[2], second[2], strict=True))
