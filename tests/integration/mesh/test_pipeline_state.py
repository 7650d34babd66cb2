"""Checkpoints of pipeline stages, full and sharded: under the names of one process, which every layout loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.checkpoint import storage
from loopwright.strategies import MeshStrategy, Strategy
from loopwright.strategies.mesh.pipeline import Pipeline

# Any in this file: batches, and results that travel between processes.

WIDTH, WORDS, MICRO = 8, 11, 2


class Net(lw.Module):
    """Tied words, dropout, and a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        small = [one for name, one in self.named_parameters() if one.ndim == 1]
        large = [one for name, one in self.named_parameters() if one.ndim > 1]
        return torch.optim.AdamW([{"params": small, "weight_decay": 0.0}, {"params": large}], lr=0.01)


class SharingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
        sums = x if sums is None else sums + self.scale(condition)
        return torch.tanh(self.mix(x) * (1 + condition)) + 0.1 * sums, sums


class Sharing(Net):
    """Blocks get what is computed before them, and return more than their hidden state; both are read behind them.

    Modules are not registered in the order in which forward calls them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SharingBlock() for _ in range(4))
        self.condition = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        condition, sums = self.condition(x.square()), None
        for block in self.blocks:
            x, sums = block(x, condition, sums)
        return cast(Tensor, self.head(self.last(x) * condition + sums))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))


def fit(
    rank: int,
    size: int,
    strategy: Strategy | str,
    steps: int,
    folder: str,
    save: str,
    resume: str | None = None,
    kind: type[Net] = Net,
) -> float | None:
    lw.seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(2)
    ids, targets = (torch.randint(0, WORDS, (64,), generator=generator) for _ in range(2))
    data = DataLoader(TensorDataset(ids, targets), batch_size=4)
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, precision="64-true", max_steps=steps, max_epochs=9,
        logger=False, accumulate_grad_batches=MICRO if kind is Net else 4, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = kind()
    trainer.fit(
        module, data, *([] if kind is Net else [data]), ckpt_path=None if resume is None else f"{folder}/{resume}"
    )
    trainer.save_checkpoint(f"{folder}/{save}")
    value = trainer.callback_metrics.get("val")
    return None if value is None else float(value)


def read(folder: Path, name: str) -> dict[str, Any]:
    return cast(dict[str, Any], storage.load(folder / name))


def same(left: Any, right: Any, *, bound: float = 0.0) -> None:
    assert list(left["state_dict"]) == list(right["state_dict"])
    for name, value in left["state_dict"].items():
        assert (value.double() - right["state_dict"][name].double()).abs().max() <= bound, name
    ours, theirs = left["optimizer_states"][0], right["optimizer_states"][0]
    assert [group["params"] for group in ours["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, entry in ours["state"].items():
        for key, value in entry.items():
            assert (value - theirs["state"][number][key]).abs().max() <= bound, (number, key)


MESHES = {
    "pp": (2, lambda: MeshStrategy(pp=2)),
    "zbv": (2, lambda: MeshStrategy(pp=2, pipeline=Pipeline(schedule="zbv"))),
    "pp x fsdp": (4, lambda: MeshStrategy(pp=2, fsdp=2)),
    "pp sharded": (2, lambda: MeshStrategy(pp=2, state_dict_type="sharded")),
    "pp x fsdp sharded": (4, lambda: MeshStrategy(pp=2, fsdp=2, state_dict_type="sharded")),
}


@pytest.mark.parametrize("mesh", ["zbv", "pp x fsdp", "pp x fsdp sharded"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(mesh: str, tmp_path: Path) -> None:
    size, strategy = MESHES[mesh]
    folder = str(tmp_path)
    run_ranks(fit, size, strategy(), 3, folder, "half.ckpt", connect=False)
    run_ranks(fit, size, strategy(), 6, folder, "long.ckpt", connect=False)
    run_ranks(fit, size, strategy(), 6, folder, "resumed.ckpt", "half.ckpt", connect=False)
    same(read(tmp_path, "resumed.ckpt"), read(tmp_path, "long.ckpt"))


@pytest.mark.parametrize("mesh", ["zbv", "pp x fsdp", "pp sharded", "pp x fsdp sharded"])
def test_the_checkpoint_is_that_of_any_layout(mesh: str, tmp_path: Path) -> None:
    size, strategy = MESHES[mesh]
    folder = str(tmp_path)
    run_ranks(fit, size, strategy(), 2, folder, "stages.ckpt", connect=False)
    assert (tmp_path / "stages.ckpt").is_dir() == mesh.endswith("sharded")
    # Loaded and saved again without a step: by one process, and from there by stages.
    run_ranks(fit, 1, "auto", 2, folder, "alone.ckpt", "stages.ckpt", connect=False)
    run_ranks(fit, size, strategy(), 2, folder, "back.ckpt", "alone.ckpt", connect=False)
    stages = read(tmp_path, "stages.ckpt")
    assert list(stages["state_dict"]) == list(Net().state_dict())
    same(read(tmp_path, "alone.ckpt"), stages)
    same(read(tmp_path, "back.ckpt"), stages)


def fit_all(rank: int, size: int, schedules: list[str], folder: str) -> list[float | None]:
    strategies = {one: MeshStrategy(pp=2, fsdp=1, pipeline=Pipeline(schedule=one)) for one in schedules}
    return [fit(rank, size, strategies[one], 6, folder, f"{one}.ckpt", None, Sharing) for one in schedules]


def test_values_that_blocks_share_are_those_of_one_process(tmp_path: Path) -> None:
    folder = str(tmp_path)
    [value] = run_ranks(fit, 1, "auto", 6, folder, "alone.ckpt", None, Sharing, connect=False)
    schedules = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
    for values in run_ranks(fit_all, 2, schedules, folder, connect=False):
        assert values == pytest.approx([value] * 6, abs=1e-13)
    for one in schedules:
        same(read(tmp_path, f"{one}.ckpt"), read(tmp_path, "alone.ckpt"), bound=1e-12)


def test_a_resumed_run_shares_the_same_values(tmp_path: Path) -> None:
    folder, strategy = str(tmp_path), MeshStrategy(pp=2, fsdp=2)
    run_ranks(fit, 4, strategy, 3, folder, "half.ckpt", None, Sharing, connect=False)
    run_ranks(fit, 4, strategy, 6, folder, "long.ckpt", None, Sharing, connect=False)
    run_ranks(fit, 4, strategy, 6, folder, "resumed.ckpt", "half.ckpt", Sharing, connect=False)
    same(read(tmp_path, "resumed.ckpt"), read(tmp_path, "long.ckpt"))
    run_ranks(fit, 1, "auto", 6, folder, "alone.ckpt", "half.ckpt", Sharing, connect=False)
    run_ranks(fit, 4, strategy, 6, folder, "back.ckpt", "alone.ckpt", Sharing, connect=False)
    same(read(tmp_path, "back.ckpt"), read(tmp_path, "alone.ckpt"))
