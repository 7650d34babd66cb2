"""The first micro-batch of a pipeline against the unsplit model: faults without NaN are named."""

from __future__ import annotations

import itertools
import re
from typing import Any, cast

import pytest
import torch
from mesh_program import part_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.strategies import MeshStrategy
from loopwright.strategies.mesh.pipeline import Pipeline

# Any in this file: batches.

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.balance: Any = 0.0

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        x = self.drop(self.norm(self.mix(x)).tanh() * scale)
        self.balance = x.square().mean()
        return x


class Net(lw.Module):
    """Without a fault: it draws, counts, and keeps a list; all of this a rehearsal must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, 1))
        self.calls: list[int] = []
        self.count = 0
        self.generator = torch.Generator().manual_seed(3)

    def run(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale)
        return cast(Tensor, self.last(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(batch_idx)
        self.count += 1
        x = batch.pop("x") + torch.rand(WIDTH)
        return self.run(x, torch.rand((), generator=self.generator)).square().mean() + torch.rand(())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Compared(Net):
    """A comparison hides NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        start = x = self.first(batch["x"])
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean() * (1 + (start > 0).sum())


class Logged(Net):
    """Logs before and after the blocks, and returns a sum with its weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("first", batch["x"].mean())
        total = self.run(batch["x"]).square().sum()
        self.log("loss", total / len(batch["x"]))
        return {"loss": lw.Loss(total, len(batch["x"]))}


class LoggedCompared(Compared):
    """Logs, and returns a sum with its weight; a comparison hides NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("first", batch["x"].mean())
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return lw.Loss(loss * 4, 4)


class MaskedBlocks(Net):
    """Blocks get a mask that follows from a module before them: no integers go over a split."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.first(batch["x"])
        positive = x > 0
        for block in self.blocks:
            x = block(x, scale=positive)
        return self.last(x).square().mean()


class Balanced(Net):
    """Reads what blocks of other stages have set."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.run(batch["x"]).square().mean()
        return loss + sum(cast(Block, block).balance for block in self.blocks)


class Gathers(Net):
    """Reads hidden states of blocks before the split, without a module before the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, seen = batch["x"], []
        for block in self.blocks:
            x = block(x)
            seen.append(x.mean().nan_to_num(0.0))
        return self.last(x).square().mean() + torch.stack(seen).sum()


class Counted(Net):
    """Counts where nothing can be put back, so that a rank with two stages counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run(batch["x"]).square().mean() * next(self.counter)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index]}


def fit(rank: int, size: int, kind: type[Net], options: Pipeline, verify: bool) -> Any:
    lw.seed_everything(1, verbose=False)
    trainer = lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(pp=2, pipeline=options, verify=verify), devices=size, max_epochs=1,
        logger=False, accumulate_grad_batches=2, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    module = kind()
    try:
        trainer.fit(module, DataLoader(Rows(), batch_size=4))
    except Exception as error:  # Whatever it is: its text is compared.
        return f"{type(error).__name__}: {error}"
    state = {name: value.detach().clone() for name, value in part_of(module).items()}
    return state, module.calls, module.count


@pytest.mark.parametrize(
    ("kind", "schedule", "text"),
    [
        (Compared, "1f1b", "another value of the loss in the first micro-batch"),
        (LoggedCompared, "1f1b", "another value of the loss in the first micro-batch"),
        (
            MaskedBlocks,
            "1f1b",
            "Expected tensor 1 after the hidden state of blocks.2 to be floating-point, got torch.bool",
        ),
        (Balanced, "1f1b", r"another value of the loss .* set blocks.0.balance, blocks.1.balance"),
        (Gathers, "1f1b", "another value of the loss"),
        (Counted, "zbv", "another value of the loss in the first micro-batch: .* instead of"),
    ],
)
def test_a_fault_without_nan_is_named(kind: type[Net], schedule: str, text: str) -> None:
    answers = run_ranks(fit, 2, kind, Pipeline(schedule=schedule), True, connect=False)
    assert all(isinstance(answer, str) for answer in answers)
    assert any(re.search(text, answer) for answer in answers), answers


@pytest.mark.parametrize("kind", [Compared, MaskedBlocks])
def test_without_verification_the_fault_is_not_seen(kind: type[Net]) -> None:
    answers = run_ranks(fit, 2, kind, Pipeline(), False, connect=False)
    assert not any(isinstance(answer, str) and "unsplit" in answer for answer in answers)


@pytest.mark.parametrize("kind", [Net, Logged])
def test_the_comparison_changes_nothing(kind: type[Net]) -> None:
    """Weights, buffers, what is drawn at random, lists and counts are as without it."""
    with_it = run_ranks(fit, 2, kind, Pipeline(), True, connect=False)
    without = run_ranks(fit, 2, kind, Pipeline(), False, connect=False)
    for (ours, *our_rest), (theirs, *their_rest) in zip(with_it, without, strict=True):
        assert our_rest == their_rest
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
