"""A save in the background holds the state of when it was asked for, whatever a hook writes before the next step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright as lw
from loopwright.checkpoint import load
from loopwright.checkpoint.saving import deferred_copy
from loopwright.checkpoint.saving.deferred_copy import DeferredCopies

WIDTH = 300  # a matrix is large enough for its moments to be copied later


class Net(lw.Module):
    def __init__(self, *, is_manual: bool = False, **options: Any) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        self.options = options
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss: Tensor = self.layers(batch).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), **self.options)


class SaveThenWrite(lw.Callback):
    """Saves after each second step, and lets a hook write to weights and moments in place before the next step."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder = folder
        self.has_saved = False
        self.num_written = 0
        if hook != "nowhere":
            setattr(self, hook, lambda trainer, *_: self.write(trainer))
        self.writes_at_once = hook == "the hook that saves"

    def write(self, trainer: lw.Trainer) -> None:
        if not self.has_saved:
            return
        self.has_saved = False
        self.num_written += 1
        for state in trainer.optimizers[0].state.values():
            for value in state.values():
                value.data.mul_(0.5) if value.ndim else None
        for weight in trainer.model.parameters():
            weight.data.mul_(1.01)

    def on_train_batch_end(self, trainer: lw.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")
            self.has_saved = True
            if self.writes_at_once:
                self.write(trainer)


def train(folder: Path, hook: str, plugins: list[Any], **options: Any) -> tuple[dict[str, Any], list[Tensor], int]:
    """Return the files, the weights after training, and how often the hook has written."""
    folder.mkdir()
    torch.manual_seed(0)
    module, callback = Net(**options), SaveThenWrite(folder, hook)
    trainer = lw.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, plugins=plugins, callbacks=[callback], enable_checkpointing=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, [torch.randn(4, WIDTH) for _ in range(8)])
    files = {path.name: load(path) for path in folder.iterdir()}
    return files, [one.detach().clone() for one in module.parameters()], callback.num_written


def tensors_of(files: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, content in files.items():
        for key, value in content["state_dict"].items():
            found[f"{name} {key}"] = value
        for index, state in content["optimizer_states"][0]["state"].items():
            found.update({f"{name} {index} {key}": value for key, value in state.items()})
    return found


@pytest.fixture
def copies_last(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the thread that writes begin to copy only when the training has to wait for it; note how often that is."""
    next_one, release = DeferredCopies._copy_next, DeferredCopies.release
    waiting: dict[DeferredCopies, threading.Event] = {}
    released: list[int] = []

    def copy_next(self: DeferredCopies) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert waiting.setdefault(self, threading.Event()).wait(240)
        next_one(self)

    def release_it(self: DeferredCopies) -> None:
        if self:
            released.append(len(self._shares))
        release(self)
        waiting.setdefault(self, threading.Event()).set()

    monkeypatch.setattr(DeferredCopies, "_copy_next", copy_next)
    monkeypatch.setattr(DeferredCopies, "release", release_it)
    return released


HOOKS = [
    "nowhere", "the hook that saves", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step",
]  # fmt: skip


def heard(hook: str, options: dict[str, Any]) -> bool:
    return hook != "nowhere" and not (hook == "on_before_zero_grad" and "is_manual" in options)


@pytest.mark.skipif(not deferred_copy._has_sharing(), reason="this torch copies all at once")
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"is_manual": True}], ids=str)
@pytest.mark.parametrize("hook", HOOKS)
def test_the_files_are_those_of_a_save_that_waits(
    tmp_path: Path, copies_last: list[int], hook: str, options: dict[str, Any]
) -> None:
    expected, weights, num_written = train(tmp_path / "now", hook, [], **options)
    files, others, same = train(tmp_path / "later", hook, [lw.AsyncCheckpointIO()], **options)
    assert num_written == same == (4 if hook == "the hook that saves" else 3 if heard(hook, options) else 0)
    wanted, found = tensors_of(expected), tensors_of(files)
    assert len(expected) == 4
    assert [name for name, value in wanted.items() if not torch.equal(value, found[name])] == []
    assert all(map(torch.equal, weights, others))
    # Who overtakes a copy once has all copied at once after that.
    assert copies_last == ([2] if same else [2] * 4)


@pytest.mark.skipif(not deferred_copy._has_sharing(), reason="this torch copies all at once")
def test_a_resumed_run_copies_later_as_well(tmp_path: Path, copies_last: list[int]) -> None:
    train(tmp_path / "now", "nowhere", [])
    trainer = lw.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, plugins=[lw.AsyncCheckpointIO()], enable_checkpointing=False,
        callbacks=[SaveThenWrite(tmp_path, "nowhere")], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), [torch.randn(4, WIDTH) for _ in range(4)], ckpt_path=tmp_path / "now" / "7.ckpt")
    assert set(copies_last) == {2}
