"""Checkpoints that a fit writes: when, with which metrics in their names, and whose weights they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Net, ValidatedNet, assert_same, loader, net, quiet, train_by_hand

import loopwright as lw
from loopwright.callbacks import EMA, Callback, ModelCheckpoint
from loopwright.errors import ConfigError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Numbered(ValidatedNet):
    """Logs as `val` in each validation the step at which it runs."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.global_step))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train", float(self.global_step + 1))
        return self.loss(batch)


def fit(module: Net, *callbacks: Callback, val: Any = None, **kwargs: Any) -> lw.Trainer:
    trainer = quiet(enable_checkpointing=True, callbacks=list(callbacks), **kwargs)
    trainer.fit(module, loader(), val)
    return trainer


def test_the_metric_in_a_name_is_that_of_the_step(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}-{val:.0f}", monitor="val", mode="max", save_top_k=-1)
    fit(net(Numbered), checkpoint, val=loader(2), max_epochs=2, val_check_interval=2)
    assert names(tmp_path) == [f"step={k}-val={k}.ckpt" for k in (2, 4, 6, 8)]
    assert checkpoint.best_model_score == 8


def test_a_training_metric_in_a_name_is_that_of_the_step(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path, "{step}-{train:.0f}", monitor="train", mode="max", save_top_k=-1, every_n_train_steps=3
    )
    fit(net(Numbered), checkpoint, val=loader(2), max_epochs=2)
    assert names(tmp_path) == ["step=3-train=3.ckpt", "step=6-train=6.ckpt"]


def test_the_last_checkpoint_of_a_fit_is_one_with_optimizers(tmp_path: Path) -> None:
    def savers() -> list[Callback]:
        weights = {"every_n_train_steps": 1, "save_weights_only": True, "save_top_k": -1}
        return [ModelCheckpoint(tmp_path, "full-{step}", every_n_train_steps=3), ModelCheckpoint(tmp_path, **weights)]

    fit(net(Net), *savers(), max_steps=4)
    assert names(tmp_path)[-1] == "full-step=3.ckpt"
    trainer = quiet(enable_checkpointing=True, callbacks=savers(), max_steps=6)
    trainer.fit(net(Net), loader(), ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "full-step=3.ckpt")
    assert trainer.global_step == 6


@pytest.mark.parametrize("val", [None, 2])
def test_without_a_monitor_a_checkpoint_is_saved_with_and_without_validation(val: Any, tmp_path: Path) -> None:
    module = net(Numbered) if val else net(Net)
    fit(module, ModelCheckpoint(tmp_path), val=loader(val) if val else None, max_epochs=2)
    assert names(tmp_path) == ["epoch=1-step=8.ckpt"]


def test_an_interval_in_steps_may_be_longer_than_an_epoch(tmp_path: Path) -> None:
    fit(net(Net), ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=6), max_epochs=3)
    assert names(tmp_path) == ["epoch=1-step=6.ckpt", "epoch=2-step=12.ckpt"]


def test_limits_and_modes_are_not_in_the_saved_progress(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1, limit_train_batches=2, limit_val_batches=1)
    trainer.fit(net(ValidatedNet), loader(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert (content["epoch"], content["global_step"]) == (1, 2)
    assert "limit" not in repr(content.get("progress", content))

    dev = quiet(fast_dev_run=True)
    dev.fit(net(ValidatedNet), loader(), loader())
    other = quiet(max_epochs=2)
    other.fit(net(ValidatedNet), loader(), loader())
    assert other.global_step == 8


def test_the_file_holds_raw_weights_while_the_average_is_evaluated(tmp_path: Path) -> None:
    expected = net(Net)
    train_by_hand(expected, loader(), epochs=2)
    ema = EMA(decay=0.9)
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{step}")
    module = net(ValidatedNet)
    fit(module, ema, checkpoint, val=loader(4), max_epochs=2)

    saved = torch.load(tmp_path / "step=8.ckpt", weights_only=True)
    assert_same(saved["state_dict"], expected)
    assert_same(module, expected)
    raw = quiet().validate(module, loader(4), verbose=False)
    averaged = quiet(callbacks=ema).validate(module, loader(4), verbose=False)
    assert raw != averaged
    assert_same(module, expected)


def test_no_wrapper_leaves_a_prefix_in_the_keys(tmp_path: Path) -> None:
    module = net(Net)
    trainer = quiet(max_epochs=1)
    trainer.fit(torch.compile(module, backend="eager"), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(net(Net).state_dict())


def test_an_exception_saves_what_was_trained_so_far_and_says_so(tmp_path: Path) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 3:
                raise ValueError("boom")
            return self.loss(batch)

    expected = net(Net)
    train_by_hand(expected, list(loader())[:3])
    with pytest.raises(ValueError, match="boom"):
        fit(net(Failing), ModelCheckpoint(tmp_path, save_on_exception=True), max_epochs=1)
    (name,) = names(tmp_path)
    saved = torch.load(tmp_path / name, weights_only=True)
    assert saved["global_step"] == 3
    assert_same(saved["state_dict"], expected)


def test_an_early_stop_has_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    stopping = lw.EarlyStopping("val", mode="min", patience=1)
    trainer = fit(net(Numbered), stopping, ModelCheckpoint(tmp_path, save_last=True), val=loader(2), max_epochs=10)
    assert trainer.current_epoch == 2
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 8


def test_a_missing_monitor_names_what_was_logged(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="'val_los', which was not logged in the validation before training"),
        pytest.raises(lw.LoopwrightError, match=r"val_los.*(val|train)"),
    ):
        fit(net(Numbered), ModelCheckpoint(tmp_path, monitor="val_los"), val=loader(2), max_epochs=1)


def test_weights_only_leaves_out_what_only_training_needs(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(net(Net), loader())
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    everything = torch.load(tmp_path / "all.ckpt", weights_only=True)
    weights_only = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert {"state_dict", "optimizer_states", "epoch", "global_step"} <= set(everything)
    assert {"state_dict", "epoch", "global_step"} <= set(weights_only)
    assert not {"optimizer_states", "lr_schedulers", "callbacks"} & set(weights_only)


def test_a_checkpoint_saved_after_a_validation_of_its_own_resumes_the_fit(tmp_path: Path) -> None:
    whole = net(ValidatedNet)
    quiet(max_steps=6).fit(whole, loader(), loader(2))
    cut = net(ValidatedNet)
    trainer = quiet(max_steps=3)
    trainer.fit(cut, loader(), loader(2))
    trainer.validate(cut, loader(2), verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert len(trainer.optimizers) == 1
    resumed = net(ValidatedNet)
    quiet(max_steps=6).fit(resumed, loader(), loader(2), ckpt_path=tmp_path / "after.ckpt")
    assert_same(resumed, whole)


def test_the_best_of_an_earlier_process_is_found_in_the_files(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "a", "{step}", monitor="val", mode="min", save_top_k=-1)
    fit(net(Numbered), checkpoint, val=loader(2), max_epochs=3)
    best = Path(checkpoint.best_model_path)
    assert best.name == "step=4.ckpt"
    (tmp_path / "a").rename(tmp_path / "b")
    again = ModelCheckpoint(tmp_path / "b", "{step}", monitor="val", mode="min", save_top_k=-1)
    trainer = quiet(enable_checkpointing=True, callbacks=[again])
    module = net(Numbered, seed=2)
    trainer.validate(module, loader(2), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == str(tmp_path / "b" / "step=4.ckpt")
    assert_same(module, torch.load(trainer.ckpt_path)["state_dict"])
    empty = quiet(enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path / "c")])
    with pytest.raises(ConfigError, match="has saved nothing yet, nor has an earlier run"):
        empty.validate(module, loader(2), ckpt_path="best")


class Counting(Callback):
    def __init__(self, weight: float, sizes: Sequence[int]) -> None:
        self.weight, self.sizes, self.batches = weight, sizes, 0

    @property
    def state_key(self) -> str:
        return self._generate_state_key(weight=self.weight, sizes=self.sizes)

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.batches = state_dict["batches"]


def test_states_of_callbacks_are_found_by_the_values_of_their_arguments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = fit(net(), Counting(1, (2, 3)), Counting(2, (2, 3)), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    same, other = Counting(1.0, [2, 3]), Counting(5.0, [2, 3])  # as a saved configuration has the first
    resumed = quiet(callbacks=[same, other], max_epochs=2)
    resumed.fit(net(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert (same.batches, other.batches) == (8, 4)
    (told,) = [record.message for record in caplog.records if "states of callbacks" in record.message]
    assert "or has with other arguments: Counting{'weight': 2, 'sizes': (2, 3)}" in told
