"""What every pipeline stage has beside the module that is split: a teacher, and buffers changed after the blocks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.errors import LoopwrightError
from loopwright.strategies import MeshStrategy
from loopwright.strategies.mesh.pipeline import Pipeline

# Any in this file: batches, and results that travel between processes.


class Student(lw.Module):
    """Learns from a mean of itself, and keeps a mean of its outputs.

    Args:
        how: What is done with the two.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("center", torch.zeros(4))
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        y = self.norm(self.student(x - self.center if self.how == "reads early" else x))
        self.center.lerp_(y.detach().mean(0), 0.1)
        return (y - self.teacher(x)).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.trainer.at_step_boundary or self.how == "reads early":
            return
        if self.how == "full":
            found = self.trainer.strategy.broadcast(self.trainer.full_state_dict(self.student))
            pairs = [(one, found[name]) for name, one in self.teacher.named_parameters()]
        else:
            pairs = list(zip(self.teacher.parameters(), self.student.parameters(), strict=False))
        with torch.no_grad():
            for mine, theirs in pairs:
                mine.lerp_(theirs, 0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.student.parameters(), *self.norm.parameters()], lr=0.05)


def train(rank: int, size: int, how: str, path: str, pipeline: Pipeline | None, fsdp: int = 1) -> str:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    trainer = lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(pp=size // fsdp, fsdp=fsdp, pipeline=pipeline) if pipeline else "auto",
        devices=size, precision="64-true", max_steps=3, logger=False, accumulate_grad_batches=2,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Student(how), DataLoader(TensorDataset(x), batch_size=4))
        trainer.save_checkpoint(path)
    except LoopwrightError as error:
        return f"{trainer.global_step}: {error}"
    return ""


SPLIT = Pipeline(module="student")


@pytest.mark.parametrize("pipeline", [SPLIT, Pipeline(module="student", schedule="zbv")], ids=["1f1b", "zbv"])
def test_a_teacher_that_all_stages_update_alike_is_that_of_one_process(pipeline: Pipeline, tmp_path: Path) -> None:
    files = [tmp_path / "one.ckpt", tmp_path / "stages.ckpt"]
    assert run_ranks(train, 1, "full", str(files[0]), None, connect=False) == [""]
    assert run_ranks(train, 2, "full", str(files[1]), pipeline, connect=False) == ["", ""]
    one, stages = (torch.load(file, weights_only=True)["state_dict"] for file in files)
    assert list(one) == list(stages)
    for name, value in one.items():
        assert (stages[name] - value).abs().max() <= 1e-12, name


def test_an_update_that_pairs_parts_with_full_copies_is_an_error(tmp_path: Path) -> None:
    found = run_ranks(train, 4, "pairs", str(tmp_path / "x.ckpt"), SPLIT, fsdp=2, connect=False)
    for text in found:
        assert text.startswith("1: ")
        assert "teacher.0.0.weight" in text
        assert "after 1 step. On rank" in text
        assert "pair teacher.0.0.weight with student.2.0.weight" in text
        assert "self.trainer.full_state_dict(self.student)" in text


def test_a_buffer_changed_behind_the_blocks_cannot_be_read_before_them(tmp_path: Path) -> None:
    found = run_ranks(train, 2, "reads early", str(tmp_path / "x.ckpt"), SPLIT, connect=False)
    assert found[0].startswith("1: this stage's part of a step read center")
    assert "it is changed after the blocks" in found[0]


class ByLayer(Student):
    """Has a group for each layer that it finds parameters of."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": [*one.parameters()], "lr": 0.01 * at} for at, one in enumerate(self.student, 1)]
        return torch.optim.SGD([group for group in groups if group["params"] or self.how == "full"], lr=0.05)


def train_by_layer(rank: int, size: int, how: str) -> str:
    x = torch.randn(16, 4)
    trainer = lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(pp=size, pipeline=SPLIT), devices=size, max_steps=1, logger=False,
        accumulate_grad_batches=2, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(ByLayer(how), DataLoader(TensorDataset(x), batch_size=4))
    except LoopwrightError as error:
        return str(error)
    return f"{[group['lr'] for group in trainer.optimizers[0].param_groups]}"


def test_optimizers_have_the_same_groups_on_all_stages() -> None:
    for text in run_ranks(train_by_layer, 2, "skip empty ones", connect=False):
        assert "learning rate of group 0 of optimizer 0: 0.01 on rank 0; 0.03 on rank 1" in text
        assert "an empty list where a stage has no parameters" in text
    assert run_ranks(train_by_layer, 2, "full", connect=False) == ["[0.01, 0.02, 0.03, 0.04]"] * 2
