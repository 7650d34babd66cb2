"""Planted stragglers on two ranks: the timeline names the rank and the phase that the other one waited for."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader, Dataset

import loopwright as lw

NAP_S = 0.04  # much longer than a step of this model


class Late:
    """Where rank 1 is late in the present fit."""

    def __init__(self, plant: str, rank: int) -> None:
        self.plant, self.rank = plant, rank

    def at(self, place: str, seconds: float = NAP_S) -> None:
        if self.rank == 1 and place == self.plant:
            time.sleep(seconds)


class Data(Dataset[Any]):
    def __init__(self, late: Late) -> None:
        self.late = late

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        self.late.at("data")
        return torch.ones(8)


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, late: Late) -> Any:
        ctx.late = late
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        ctx.late.at("backward")
        return gradient, None


class Net(lw.Module):
    def __init__(self, late: Late) -> None:
        super().__init__()
        self.late = late
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.late.at("forward")
        return Pause.apply(self.layers(batch), self.late).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.late.at("validation", 4 * NAP_S)
        self.log("val_loss", self.layers(batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: self.late.at("optimizer"))
        return optimizer

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.late.at("save", 10 * NAP_S)


def fits(rank: int, size: int, root: Path, strategy: str) -> dict[str, tuple[str, ...]]:
    found = {}
    for plant in ("data", "forward", "backward", "optimizer", "validation", "save", "nothing"):
        late = Late(plant, rank)
        trainer = lw.Trainer(
            accelerator="cpu", devices=size, strategy=strategy, max_epochs=1, logger=False, val_check_interval=10,
            num_sanity_val_steps=0, limit_val_batches=1, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=root, callbacks=[lw.ModelCheckpoint(every_n_train_steps=10, save_top_k=-1)],
        )  # fmt: skip
        trainer.timeline.every = 1
        if plant == "nothing":  # a busy machine delays ranks, too: each reading of the clock is a microsecond later
            trainer.timeline._clock = itertools.count(step=1000).__next__
        trainer.fit(Net(late), DataLoader(Data(late), batch_size=1), DataLoader(torch.ones(4, 8), batch_size=2))
        found[plant] = trainer.timeline.report().waited_for
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_planted_straggler_is_named_with_its_phase(tmp_path: Path, strategy: str) -> None:
    found, of_the_other_rank = run_ranks(fits, 2, tmp_path, strategy)
    assert found == of_the_other_rank
    assert found.pop("nothing") == ()
    words = {
        "data": "of the steps, in data loading", "forward": "of the steps, in the forward pass",
        "backward": "of the steps, in the backward pass", "optimizer": "of the steps, in the optimizer",
        "validation": "of 4 validations", "save": "of 4 saves",
    }  # fmt: skip
    assert set(found) == set(words)
    for plant, texts in found.items():
        assert any(text.startswith("rank 1 was waited for in ") and words[plant] in text for text in texts), found
        assert not any(text.startswith("rank 0 was waited for in ") and "steps" in text for text in texts), found
