"""Checkpoints of former versions of Lightning: `migrate_checkpoint`, the command that upgrades files, and resuming."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.checkpoint.tools.write_sharded import save_split
from loopwright.compat.lightning.imports.finder import VERSION

pytestmark = pytest.mark.usefixtures("installed")


def old(**entries: Any) -> dict[str, Any]:
    plain = {"global_step": 2, "epoch": 1, "state_dict": {}, "callbacks": {}, "optimizer_states": []}
    return {"pytorch-lightning_version": "1.5.0", **plain, "lr_schedulers": [], **entries}


def test_counts_of_old_checkpoints_go_to_the_loops() -> None:
    from lightning.pytorch.utilities.migration import migrate_checkpoint

    new, made = migrate_checkpoint(old())
    loop = new["loops"]["fit_loop"]
    assert loop["epoch_progress"]["current"]["completed"] == 1
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    assert steps["total"]["completed"] == 2
    assert (new["pytorch-lightning_version"], new["legacy_pytorch-lightning_version"]) == (VERSION, "1.5.0")
    assert list(made) == ["1.6.0", "1.6.5", "1.9.0", "2.0.0"]
    assert migrate_checkpoint(new) == (new, {})


def test_states_of_old_loops_and_callbacks_are_renamed() -> None:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.utilities.migration import migrate_checkpoint

    progress = {"optimizer": {"step": {"total": {"completed": 7}}}, "optimizer_position": 0}
    loops = {
        "fit_loop": {
            "epoch_loop.state_dict": {},
            "epoch_loop.batch_loop.state_dict": {"own": 1},
            "epoch_loop.batch_loop.optimizer_loop.optim_progress": progress,
        },
        "test_loop": {"dataloader_progress": {}, "epoch_loop.batch_progress": {"a": 1}},
    }
    key = "ModelCheckpoint{'monitor': None, 'save_on_train_epoch_end': True}"
    checkpoint = old(loops=loops, callbacks={key: {}}, amp_scaling_state={"a": 1})
    checkpoint["pytorch-lightning_version"] = "1.8.0"
    with pytest.warns(UserWarning, match="apex"):
        new, _ = migrate_checkpoint(checkpoint)
    assert new["loops"]["fit_loop"] == {
        "epoch_loop.state_dict": {"old_batch_loop_state_dict": {"own": 1}},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": {"total": {"completed": 7}}}},
    }
    assert new["loops"]["test_loop"] == {"batch_progress": {"a": 1}}
    assert list(new["callbacks"]) == ["ModelCheckpoint{'monitor': None}"]

    first = old(checkpoint_callback_best=0.5, early_stop_callback_wait=2)
    first["pytorch-lightning_version"] = "0.9.0"
    new, _ = migrate_checkpoint(first, target_version="0.10.0")
    assert new["callbacks"] == {ModelCheckpoint: {"best_model_score": 0.5}, EarlyStopping: {"wait_count": 2}}
    assert "loops" not in new


def test_files_are_upgraded_in_place_and_the_originals_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(old(), "a.ckpt")
    monkeypatch.setattr(sys, "argv", ["upgrade_checkpoint", "."])
    runpy.run_module("lightning.pytorch.utilities.upgrade_checkpoint", run_name="__main__")
    assert torch.load("a.ckpt", weights_only=True)["pytorch-lightning_version"] == VERSION
    assert torch.load("a.bak", weights_only=True) == old()
    monkeypatch.setattr(sys, "argv", ["upgrade_checkpoint", "missing.ckpt"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lightning.pytorch.utilities.upgrade_checkpoint", run_name="__main__")
    assert ended.value.code == 1


def test_a_run_resumes_from_a_file_without_schedules() -> None:
    import lightning as L

    class Line(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.layer(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    module = Line()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.save(old(state_dict=module.state_dict(), optimizer_states=[optimizer.state_dict()]), "a.ckpt")
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="start from scratch"):
        trainer.fit(Line(), [torch.ones(1, 2)] * 2, ckpt_path="a.ckpt")
    assert (trainer.current_epoch, trainer.global_step) == (3, 6)


def test_a_sharded_checkpoint_becomes_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"model": {"weight": torch.arange(4.0)}, "step": 3}, "a.ckpt")
    save_split(torch.load("a.ckpt", weights_only=True), "folder", num_shards=2)
    for package in ("fabric", "pytorch"):
        monkeypatch.setattr(sys, "argv", ["consolidate_checkpoint", "folder", "--output_file", f"{package}.pt"])
        runpy.run_module(f"lightning.{package}.utilities.consolidate_checkpoint", run_name="__main__")
        tree = torch.load(f"{package}.pt", weights_only=True)
        assert torch.equal(tree["model"]["weight"], torch.arange(4.0))
        assert tree["step"] == 3
    with pytest.raises(SystemExit):
        runpy.run_module("lightning.fabric.utilities.consolidate_checkpoint", run_name="__main__")
