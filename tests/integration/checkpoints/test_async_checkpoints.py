"""Saves in the background on two ranks: the files of a run that waits, and failures that all ranks see together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integration.trainer.test_trainer import Net, data
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader
from unit.callbacks.model_checkpoint.test_async import At, Gated, names

import loopwright as lw
from loopwright.callbacks import ModelCheckpoint
from loopwright.checkpoint import TorchCheckpointIO, load
from loopwright.errors import CheckpointError

# --- copies on every rank: rank 0 writes -----------------------------------------------------------------------------


def trainer_of(size: int, plugin: Any, *callbacks: Any, root: Path | None = None) -> lw.Trainer:
    return lw.Trainer(
        accelerator="cpu", devices=size, strategy="ddp", max_epochs=2, callbacks=list(callbacks), plugins=plugin,
        logger=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, default_root_dir=root,
    )  # fmt: skip


def loader() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=2, shuffle=True)


def saved_and_resumed(size: int, folder: Path, plugin: Any) -> Any:
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1, save_last="link")
    whole = Net(dropout=0.2)
    lw.seed_everything(5, verbose=False)
    trainer_of(size, plugin, checkpoint).fit(whole, loader())
    resumed = Net(dropout=0.2)
    trainer_of(size, plugin, root=folder / "rest").fit(resumed, loader(), ckpt_path=folder / "step=5.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    return names(folder), [parameter.tolist() for parameter in resumed.parameters()]


def failed(size: int, rank: int, folder: Path, *, at: str, writes_at: int) -> list[Any]:
    """Let rank 0 fail at a save; return the step of the error and what it says, and go on with the same Trainer."""
    inner = Gated(fails_at=at)
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=4)
    trainer = trainer_of(
        size, lw.AsyncCheckpointIO(inner), checkpoint, At({7: inner.gate.clear, writes_at: inner.finish})
    )
    module = Net()
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(module, loader())
    found = [trainer.global_step, "disk full" in str(caught.value), Path(checkpoint.best_model_path).name]
    assert ("rank 0 could not write" in str(caught.value)) == (rank == 1)
    inner.fails_at = ""
    trainer.fit(module, loader(), ckpt_path="last")
    return [*found, trainer.global_step, names(folder)]


def failed_twice(size: int, folder: Path) -> list[Any]:
    """Let training fail on all ranks while rank 0 cannot write; return what the books name then, and later."""
    inner = Gated(fails_at="step=8")

    def fail() -> None:
        inner.finish()
        raise ZeroDivisionError

    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=4)
    seen: list[Any] = []
    at = At({7: inner.gate.clear, 9: fail})
    trainer = trainer_of(size, lw.AsyncCheckpointIO(inner), checkpoint, at)
    module = Net()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, loader())
    seen.append(Path(checkpoint.best_model_path).name)
    inner.fails_at, at.actions = "", {10: lambda: seen.append(Path(checkpoint.best_model_path).name)}
    trainer.fit(module, loader())
    return [*seen, names(folder)]


def on_two_ranks(rank: int, size: int, root: Path) -> dict[str, Any]:
    return {
        "sync": saved_and_resumed(size, root / "sync", None),
        "async": saved_and_resumed(size, root / "async", lw.AsyncCheckpointIO()),
        "at the next step": failed(size, rank, root / "a", at="step=8", writes_at=8),
        "at the next save": failed(size, rank, root / "b", at="step=8", writes_at=11),
        "after an error": failed_twice(size, root / "d"),
        "at the end": failed(size, rank, root / "c", at="step=16", writes_at=11),
    }


def test_two_ranks_save_in_the_background_and_fail_together(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, tmp_path, connect=False)
    assert {**second, "after an error": first["after an error"]} == first
    assert first["sync"] == first["async"]
    # Rank 1 may have begun its next step when it learns of it; the next save comes at 12.
    assert first["at the next step"].pop(0) in (9, 10)
    assert first["at the next step"] == [True, "step=4.ckpt", 16, ["step=16.ckpt"]]
    assert first["at the next save"] == [12, True, "step=4.ckpt", 16, ["step=16.ckpt"]]
    assert first["at the end"] == [16, True, "step=12.ckpt", 16, ["step=16.ckpt"]]
    # Rank 1 cannot know what became of the file, after an error that each rank has by itself; both go on alike.
    assert first["after an error"] == ["step=4.ckpt", "step=4.ckpt", ["step=16.ckpt"]]
    assert second["after an error"] == ["step=8.ckpt", "step=4.ckpt", ["step=16.ckpt"]]


# --- shards: all ranks write together --------------------------------------------------------------------------------


class Noting(TorchCheckpointIO):
    """Notes the group that the threads write in."""

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None, *, group: Any = None) -> None:
        self.groups.append(group)
        super().save_checkpoint(checkpoint, path, storage_options, group=group)


def save_shards(rank: int, size: int, root: Path) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(40.0).view(10, 4)
    weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    copies = distribute_tensor(whole, mesh, [Replicate()])
    inner = Noting()
    plugin = lw.AsyncCheckpointIO(inner)
    for number in range(2):
        checkpoint = {"state_dict": {"w": weight, "tied": weight, "copies": copies, "plain": torch.ones(2)}}
        plugin.save_checkpoint(checkpoint, root / f"{number}.ckpt")
        with torch.no_grad():
            weight += 100
        for _ in range(20):  # training communicates meanwhile
            dist.all_reduce(torch.ones(1000))
    plugin.teardown()
    assert isinstance(weight, DTensor)
    read = [load(root / f"{number}.ckpt")["state_dict"] for number in range(2)]
    assert torch.equal(read[0]["w"], whole)
    assert torch.equal(read[1]["tied"], whole + 100)
    assert torch.equal(read[0]["copies"], whole)
    assert len(set(map(id, inner.groups))) == 1
    return inner.groups[0] is not None and inner.groups[0] is not dist.group.WORLD


def test_ranks_write_shards_in_a_group_of_their_own_while_training_communicates(tmp_path: Path) -> None:
    assert run_ranks(save_shards, 2, tmp_path) == [True, True]
