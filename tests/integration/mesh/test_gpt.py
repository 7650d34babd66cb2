"""The example GPT on every kind of mesh: the losses of one process, by the name of the strategy alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader

import loopwright as lw

GPT = Path(__file__).resolve().parents[3] / "examples" / "gpt"
LENGTH = 16


def fit(rank: int, size: int, strategy: str, batch_size: int) -> Any:
    sys.path.insert(0, str(GPT))
    from model import GPT as Model

    torch.manual_seed(3)
    module = Model(block_size=LENGTH, layers=4, heads=2, width=16, warmup_steps=2)
    generator = torch.Generator().manual_seed(4)
    texts = torch.randint(0, 256, (16, LENGTH + 1), generator=generator, dtype=torch.uint8)
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, precision="64-true", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(module, DataLoader(texts[:12], batch_size=batch_size), DataLoader(texts[12:], batch_size=batch_size))
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.endswith("loss")}


@pytest.mark.parametrize(
    ("mesh", "size"), [("tp=2", 2), ("pp=2", 2), ("cp=2", 2), ("fsdp=2,tp=2", 4), ("pp=2,fsdp=2,tp=2", 8)]
)
def test_the_losses_are_those_of_one_process(mesh: str, size: int) -> None:
    copies = 2 if "fsdp" in mesh else 1  # ranks that read different batches
    # Forked as well: the test's own process draws no random numbers, and keeps its path.
    alone = run_ranks(fit, 1, "auto", 4, connect=False)[0]
    found = run_ranks(fit, size, f"mesh:{mesh}", 4 // copies, connect=False)
    for losses in found:
        assert losses["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-12)
    # The value of the last step, before ranks with other data are averaged, is on ranks with the last stage.
    assert "train_loss" in found[-1]
    if copies == 1:
        assert found[-1]["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-12)
