"""Faults with several axes of a mesh: a rank is killed, which is named and resumed; or ranks read other data."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from broken_ranks import Ranks
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import loopwright as lw
from loopwright.strategies import MeshStrategy

# Any in this file: batches, and the store that processes meet at.

WIDTH, WORDS, STEPS, SAVED, SIZE = 8, 12, 5, 3, 8
PLAN = {"embed": "embedding", "blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.dropout(self.down(self.up(x).tanh())))


class Net(lw.Module):
    """Draws dropout masks in every block.

    Attributes:
        killed: The rank that is killed in the micro-batch after the checkpoint's step; None: none is.
    """

    def __init__(self, killed: int | None = None) -> None:
        super().__init__()
        self.killed = killed
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.trainer is not None
        if self.trainer.global_rank == self.killed and self.trainer.global_step == SAVED + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Save(lw.Callback):
    """Saves after the step `SAVED` and at the end of training."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = folder, name

    def on_train_batch_end(self, trainer: lw.Trainer, *_: Any) -> None:
        if trainer.at_step_boundary and trainer.global_step in (SAVED, STEPS):
            trainer.save_checkpoint(f"{self.folder}/{self.name}-{trainer.global_step}.ckpt")


def fit(rank: int, size: int, folder: str, name: str, *, killed: int | None = None, resume: str | None = None) -> None:
    lw.seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(2)
    ids, targets = (torch.randint(0, WORDS, (48, 3), generator=generator) for _ in range(2))
    data = DataLoader(TensorDataset(ids, targets), batch_size=2, shuffle=True)
    trainer = lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(fsdp=2, tp=2, pp=2, tensor_plan=PLAN), devices=size, max_steps=STEPS,
        accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=Save(folder, name), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(killed), data, ckpt_path=None if resume is None else f"{folder}/{resume}")


def fit_at(rank: int, size: int, store: Any, folder: str, killed: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), LOCAL_WORLD_SIZE=str(size))
    fit(rank, size, folder, "killed", killed=killed)


def read(folder: Path, name: str) -> dict[str, Any]:
    return cast(dict[str, Any], torch.load(folder / name, weights_only=False))


def assert_same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours["state_dict"]) == list(theirs["state_dict"]) == list(Net().state_dict())
    for name, value in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], value), name
    (one,), (other,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert one["state"].keys() == other["state"].keys()
    for number, entry in other["state"].items():
        for key, value in entry.items():
            assert torch.equal(one["state"][number][key], value), (number, key)


def test_a_killed_rank_is_named_and_the_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    folder, killed = str(tmp_path), 5  # of the last stage
    ended = Ranks(fit_at, SIZE, folder, killed).wait()
    report = "\n".join(f"== rank {rank}: {one.code}\n{one.said}" for rank, one in enumerate(ended))
    assert ended[killed].code == -signal.SIGKILL, report
    for rank, one in enumerate(ended):
        assert one.code not in (None, 0), report  # None: it had to be killed here
        assert rank == killed or f"rank {killed} " in one.said, report
    assert not (tmp_path / f"killed-{STEPS}.ckpt").exists()
    run_ranks(fit, SIZE, folder, "through", connect=False)
    run_ranks(fit, SIZE, folder, "resumed", connect=False, resume=f"killed-{SAVED}.ckpt")
    assert not (tmp_path / f"resumed-{SAVED}.ckpt").exists()  # it began after that step
    assert_same_bits(read(tmp_path, f"resumed-{STEPS}.ckpt"), read(tmp_path, f"through-{STEPS}.ckpt"))


# --- other batches on ranks that work on the same samples -------------------------------------------------------------


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Sequences; from some sample on, they come from a generator that each process seeds for itself."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        seed = int.from_bytes(os.urandom(4), "little") if index >= self.first else index
        words = torch.randint(0, WORDS, (5,), generator=torch.Generator().manual_seed(seed))
        return words[:-1], words[1:]


def fit_noisy(rank: int, size: int, axes: dict[str, Any], first: int) -> int:
    lw.seed_everything(1, verbose=False)
    plan = {"tensor_plan": PLAN} if "tp" in axes else {}
    trainer = lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(**axes, **plan), devices=size, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(Noisy(first), batch_size=2))
    return int(trainer.global_step)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_other_batches_on_ranks_that_work_on_the_same_are_an_error(axes: dict[str, Any]) -> None:
    size = 4 if len(axes) == 2 else 2
    named = "ranks [0] and [1]; [2] and [3]" if size == 4 else "ranks [0] and [1]"
    per_rank = 2 * (size // 2)  # samples in a batch of all data ranks
    for first, count in ((0, 1), (5 * per_rank, 8)):  # at the first batch; at the sixth, found with the eighth
        with pytest.raises(AssertionError) as raised:
            run_ranks(fit_noisy, size, axes, first, connect=False)
        assert f"among the first {count} on {named}" in " ".join(str(raised.value).split())


def test_batches_that_are_alike_are_no_error() -> None:
    assert run_ranks(fit_noisy, 4, {"fsdp": 2, "tp": 2}, 64, connect=False) == [16] * 4
