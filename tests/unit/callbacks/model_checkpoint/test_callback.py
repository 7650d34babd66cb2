from __future__ import annotations

import logging
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeLogger, FakeTrainer, interrupted_at
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.callbacks import Callback, ModelCheckpoint
from loopwright.callbacks.model_checkpoint.removal import CheckpointRemoval
from loopwright.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
from loopwright.errors import CheckpointError, ConfigError, ModuleError
from loopwright.trainer import Trainer


def names(folder: Path | str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def fit(root: Path, checkpoint: ModelCheckpoint, ckpt_path: str | None = None, **kwargs: Any) -> FakeTrainer:
    trainer = FakeTrainer(root, [checkpoint], **kwargs)
    trainer.fit(ckpt_path=ckpt_path)
    return trainer


def saved_state(path: str, checkpoint: ModelCheckpoint) -> dict[str, Any]:
    return torch.load(path, weights_only=True)["callbacks"][checkpoint.state_key]


# --- when and which ----------------------------------------------------------------------------------------------


def test_default_keeps_the_newest_epoch(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c")
    fit(tmp_path, checkpoint, max_epochs=3)
    assert names(tmp_path / "c") == ["epoch=2-step=12.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "c" / "epoch=2-step=12.ckpt")


def test_every_n_train_steps_keeps_all(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path, checkpoint, max_epochs=3)
    assert names(tmp_path / "c") == [f"epoch={e}-step={s}.ckpt" for e, s in [(0, 3), (1, 6), (2, 12), (2, 9)]]


def test_steps_are_counted_not_micro_batches(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, checkpoint, windows=5, accumulate=3)
    assert names(tmp_path / "c") == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]


def test_a_skipped_step_saves_nothing_twice(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, checkpoint, windows=5, skipped=[3])
    assert names(tmp_path / "c") == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]


def test_every_n_longer_than_an_epoch_and_no_validation(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", every_n_train_steps=7, save_top_k=-1)
    fit(tmp_path, checkpoint, max_epochs=2, val_batches=0)
    assert names(tmp_path / "c") == ["epoch=1-step=7.ckpt"]


def test_every_second_epoch(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", every_n_epochs=2, save_top_k=-1)
    fit(tmp_path, checkpoint, max_epochs=3)
    assert names(tmp_path / "c") == ["epoch=1-step=8.ckpt"]


def test_time_interval_saves_at_step_boundaries_only(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", train_time_interval=timedelta(0), save_top_k=-1)
    fit(tmp_path, checkpoint, windows=2, accumulate=3)  # the fake refuses a save inside a window
    assert names(tmp_path / "c") == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]


def test_time_interval_waits_for_its_time(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", train_time_interval=timedelta(hours=1))
    fit(tmp_path, checkpoint)
    assert names(tmp_path / "c") == []


def test_validations_are_counted_when_they_are_more_often_than_epochs(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="v", save_top_k=-1)
    fit(tmp_path, checkpoint, windows=4, val_every=2, val_metrics=lambda step: {"v": 1.0})
    assert names(tmp_path / "c") == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]


def test_a_trainer_has_a_checkpoint_callback_with_fast_dev_run_too() -> None:
    trainer = Trainer(fast_dev_run=True, accelerator="cpu")
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)


def test_fast_dev_run_validation_and_sanity_check_save_nothing(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", save_last=True)
    fit(tmp_path, checkpoint, fast_dev_run=True)
    FakeTrainer(tmp_path, [checkpoint]).validate(torch.nn.Linear(2, 1))
    trainer = FakeTrainer(tmp_path, [checkpoint], sanity=True, max_epochs=0)
    trainer.fit()
    assert names(tmp_path / "c") == []


def test_save_top_k_0_writes_only_last(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", save_top_k=0, save_last=True)
    fit(tmp_path, checkpoint, max_epochs=2)
    assert names(tmp_path / "c") == ["last.ckpt"]


@settings(max_examples=25, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, -0.0, 0.25, 0.5, float("nan")]), min_size=1, max_size=8),
    k=st.integers(-1, 3),
    mode=st.sampled_from(["min", "max"]),
    save_last=st.sampled_from([None, True, "link"]),
    keep_last=st.sampled_from([None, 1, 3]),
)
def test_files_on_disk_are_the_k_best_and_the_newest(
    scores: list[float], k: int, mode: str, save_last: Any, keep_last: int | None
) -> None:
    worst = float("inf") if mode == "min" else float("-inf")
    cleaned = [worst if score != score else score for score in scores]
    sign = 1 if mode == "min" else -1
    order = sorted(range(len(scores)), key=lambda index: (sign * cleaned[index], index))
    kept = order if k == -1 else order[:k]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ModelCheckpoint(
            folder, monitor="v", save_top_k=k, mode=mode, save_last=save_last, keep_last=keep_last
        )
        fit(
            Path(folder),
            checkpoint,
            windows=1,
            max_epochs=len(scores),
            val_metrics=lambda step: {"v": scores[step - 1]},
        )
        on_disk = [name for name in names(folder) if name != "last.ckpt"]
        newest = range(len(scores))[-keep_last:] if keep_last else []
        assert on_disk == sorted(f"epoch={index}-step={index + 1}.ckpt" for index in {*kept, *newest})
        assert os.path.basename(checkpoint.best_model_path) == (
            f"epoch={kept[0]}-step={kept[0] + 1}.ckpt" if kept else ""
        )
        if save_last:
            last = torch.load(os.path.join(folder, "last.ckpt"), weights_only=True)
            assert last["global_step"] == len(scores)
        for name in on_disk:
            path = os.path.realpath(os.path.join(folder, name))
            state = saved_state(path, checkpoint)
            assert path in [*state["best_k_models"], *state["newest"]]


@pytest.mark.parametrize("arguments", [{"save_top_k": 3}, {"keep_last": 3}, {"save_top_k": 0, "keep_last": 3}], ids=str)
def test_without_a_monitor_the_newest_are_kept(tmp_path: Path, arguments: dict[str, int]) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", "x", **arguments), max_epochs=2)
    fit(tmp_path, ModelCheckpoint(tmp_path / "d", "{step}", **arguments), max_epochs=2)
    newest = str(tmp_path / "d" / "step=8.ckpt")
    resumed = fit(tmp_path, ModelCheckpoint(tmp_path / "d", "{step}", **arguments), newest, max_epochs=5)
    assert names(tmp_path / "c") == ["x-v1.ckpt", "x.ckpt"]
    # The file that was named in ckpt_path stays.
    assert names(tmp_path / "d") == [f"step={step}.ckpt" for step in (12, 16, 20, 8)]
    assert resumed.callbacks[0].best_model_path == str(tmp_path / "d" / "step=20.ckpt")


def test_states_of_before_keep_last_are_resumed(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", save_top_k=2)
    fit(tmp_path, checkpoint, max_epochs=1)
    state = checkpoint.state_dict()
    del state["newest"]
    checkpoint.checkpoint_state.load_state_dict(state)
    assert checkpoint.checkpoint_state.newest == [checkpoint.best_model_path]


# --- names -------------------------------------------------------------------------------------------------------


def test_the_name_has_the_metric_of_its_step(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path / "c", "{step}-{val:.0f}", monitor="val", every_n_train_steps=2, save_top_k=-1
    )
    fit(tmp_path, checkpoint, windows=8, val_every=4, val_metrics=lambda step: {"val": 10.0 * step})
    # Due at 2, 4, 6, 8; the value of step 4 is not written beside step 6: 2 and 6 wait for 4 and 8.
    assert names(tmp_path / "c") == ["step=4-val=40.ckpt", "step=8-val=80.ckpt"]


def test_a_save_due_between_validations_takes_the_state_of_the_next_one(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="val", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path, checkpoint, windows=4, val_every=4, val_metrics=lambda step: {"val": 1.0})
    assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt"]


def test_last_is_written_when_due_without_waiting(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="val", every_n_train_steps=3, save_last=True)
    seen: list[tuple[int, list[str]]] = []

    class Look(Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append((trainer.global_step, names(tmp_path / "c")))
            last = torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)
            assert last["global_step"] == 3
            assert last["callbacks"][checkpoint.state_key]["is_waiting"]

    trainer = FakeTrainer(tmp_path, [checkpoint, Look()], val_metrics=lambda step: {"val": 1.0})
    trainer.fit()
    assert seen == [(4, ["last.ckpt"])]
    assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt", "last.ckpt"]


def test_a_waiting_save_survives_a_resume(tmp_path: Path) -> None:
    def run(folder: Path, stop: bool) -> list[str]:
        checkpoint = ModelCheckpoint(folder, monitor="val", every_n_train_steps=3, save_last=True)
        trainer = FakeTrainer(folder, [checkpoint], val_metrics=lambda step: {"val": 1.0})
        if not stop:
            trainer.fit()
            return names(folder)
        with interrupted_at(trainer, 3, RuntimeError("killed")):
            trainer.fit()
        assert names(folder) == ["last.ckpt"]
        again = ModelCheckpoint(folder, monitor="val", every_n_train_steps=3, save_last=True)
        trainer = FakeTrainer(folder, [again], val_metrics=lambda step: {"val": 1.0})
        trainer.fit(ckpt_path=again.find_last(trainer)[0])
        return names(folder)

    assert run(tmp_path / "a", stop=False) == run(tmp_path / "b", stop=True) == ["epoch=0-step=4.ckpt", "last.ckpt"]


def test_training_metrics_are_fresh_at_once(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", "{step}-{t:.1f}", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, checkpoint, train_metrics=lambda step: {"t": step / 2})
    assert names(tmp_path / "c") == ["step=2-t=1.0.ckpt", "step=4-t=2.0.ckpt"]


def test_an_epoch_metric_is_waited_for_until_the_end_of_the_epoch(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="e", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path, checkpoint, max_epochs=2, val_batches=0, epoch_metrics=lambda step: {"e": 1.0})
    assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]


@pytest.mark.parametrize("trigger", [{"every_n_train_steps": 3}, {"save_on_train_epoch_end": False}])
def test_a_validation_within_the_epoch_does_not_end_the_wait_for_an_epoch_metric(
    tmp_path: Path, trigger: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="e", save_top_k=-1, **trigger)
    caplog.set_level("INFO")
    fit(tmp_path, checkpoint, max_epochs=2, val_every=1, epoch_metrics=lambda step: {"e": 1.0})
    assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]
    assert caplog.text.count("waits until 'e' is logged") == 1


@pytest.mark.parametrize("trigger", [{}, {"every_n_train_steps": 1}])
def test_a_score_that_is_never_logged_is_an_error_after_the_first_validation(
    tmp_path: Path, trigger: dict[str, Any]
) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="val_los", **trigger)
    trainer = FakeTrainer(tmp_path, [checkpoint], val_every=2, val_metrics=lambda step: {"val_loss": 1.0})
    with pytest.raises(ModuleError, match=r"'val_los' \(did you mean 'val_loss'\?\).*there are \['val_loss'\]"):
        trainer.fit()
    assert trainer.global_step == 2


@pytest.mark.parametrize("trigger", [{}, {"every_n_train_steps": 2}])
def test_a_metric_in_the_name_that_is_not_logged_is_zero_with_a_warning(
    tmp_path: Path, trigger: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", "{step}-{val_los:.1f}", save_top_k=-1, **trigger)
    fit(tmp_path, checkpoint, max_epochs=2, val_metrics=lambda step: {"val_loss": 1.0})
    steps = (2, 4, 6, 8) if trigger else (4, 8)
    assert names(tmp_path / "c") == [f"step={step}-val_los=0.0.ckpt" for step in steps]
    assert caplog.text.count("'val_los'") == 1


def test_a_name_takes_the_latest_value_and_waits_for_a_validation_at_its_step_only(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", "{step}-{val:.0f}", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, checkpoint, windows=8, val_every=4, val_metrics=lambda step: {"val": 10.0 * step})
    assert names(tmp_path / "c") == [
        "step=2-val=0.ckpt", "step=4-val=40.ckpt", "step=6-val=40.ckpt", "step=8-val=80.ckpt",
    ]  # fmt: skip


def test_without_validation_the_error_comes_after_the_first_epoch(tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path, [ModelCheckpoint(tmp_path / "c", monitor="v")], val_batches=0, max_epochs=3)
    with pytest.raises(ModuleError, match="'v'"):
        trainer.fit()
    assert trainer.global_step == 4


def test_monitor_of_validations_in_every_second_epoch_is_waited_for(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="v", save_top_k=-1, save_on_train_epoch_end=True)
    fit(tmp_path, checkpoint, max_epochs=4, check_val_every_n_epoch=2, val_metrics=lambda step: {"v": 1.0})
    assert names(tmp_path / "c") == ["epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt"]


def test_a_save_that_never_got_its_metric_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="v", every_n_train_steps=4)
    fit(tmp_path, checkpoint, max_epochs=1, windows=5, val_every=3, val_metrics=lambda step: {"v": 1.0})
    assert "due at step 4 is not written" in caplog.text


def test_slashes_in_metrics_make_folders_and_names_can_be_left_out(tmp_path: Path) -> None:
    fit(
        tmp_path,
        ModelCheckpoint(tmp_path / "a", "{epoch}-{val/loss:.2f}", monitor="val/loss"),
        val_metrics=lambda step: {"val/loss": 0.021},
    )
    assert (tmp_path / "a" / "epoch=0-val" / "loss=0.02.ckpt").is_file()
    fit(
        tmp_path,
        ModelCheckpoint(tmp_path / "b", "e={epoch}-l={val/loss:.2f}", auto_insert_metric_name=False),
        val_metrics=lambda step: {"val/loss": 0.05},
    )
    assert names(tmp_path / "b") == ["e=0-l=0.05.ckpt"]


def test_one_name_without_monitor_overwrites_itself(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", "x", save_top_k=-1), max_epochs=3)
    assert names(tmp_path / "c") == ["x.ckpt"]


def test_a_taken_name_gets_a_version(tmp_path: Path) -> None:
    for _ in range(3):
        fit(tmp_path, ModelCheckpoint(tmp_path / "c", "x", monitor="v"), val_metrics=lambda step: {"v": 1.0})
    assert names(tmp_path / "c") == ["x-v1.ckpt", "x-v2.ckpt", "x.ckpt"]


def test_without_the_counter_a_taken_name_is_overwritten_and_listed_once(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", "x", monitor="v", save_top_k=3, enable_version_counter=False)
    fit(tmp_path, checkpoint, max_epochs=3, val_metrics=lambda step: {"v": float(step)})
    assert names(tmp_path / "c") == ["x.ckpt"]
    assert list(map(float, checkpoint.best_k_models.values())) == [12.0]


def test_a_second_run_does_not_overwrite_the_last_of_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        fit(tmp_path, ModelCheckpoint(tmp_path / "c", save_last=True), max_epochs=2)
    assert names(tmp_path / "c") == [
        "epoch=1-step=8-v1.ckpt", "epoch=1-step=8.ckpt", "last-v1.ckpt", "last.ckpt",
    ]  # fmt: skip


def test_format_checkpoint_name() -> None:
    checkpoint = ModelCheckpoint(filename="{epoch}-{x:.1f}")
    metrics = {"epoch": 2, "step": 5, "x": torch.tensor(0.25)}
    assert checkpoint.format_checkpoint_name(metrics, ver=3, prefix="p") == "p-epoch=2-x=0.2-v3.ckpt"
    assert checkpoint.format_checkpoint_name(metrics, filename="{step}") == "step=5.ckpt"


# --- folders -----------------------------------------------------------------------------------------------------


def test_folder_is_the_first_loggers(tmp_path: Path) -> None:
    logger = FakeLogger(str(tmp_path / "out"), "exp", 3)
    checkpoint = ModelCheckpoint()
    fit(tmp_path, checkpoint, loggers=[logger])
    assert checkpoint.dirpath == str(tmp_path / "out" / "exp" / "version_3" / "checkpoints")
    assert logger.saved == [checkpoint.best_model_path]


def test_folder_without_logger_is_in_the_root(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint()
    fit(tmp_path, checkpoint)
    assert names(tmp_path / "checkpoints") == ["epoch=0-step=4.ckpt"]


def test_find_last_looks_into_every_version(tmp_path: Path) -> None:
    found = []
    for version, modified_s in ((0, 300), (1, 100), ("mine", 200)):
        checkpoint = ModelCheckpoint()
        fit(tmp_path, checkpoint, loggers=[FakeLogger(str(tmp_path), "exp", version)])
        os.utime(checkpoint.best_model_path, (modified_s, modified_s))
        found.append(checkpoint.best_model_path)

    class Unasked(FakeLogger):
        version = property(lambda self: pytest.fail("the version was asked for"), lambda self, value: None)

    trainer = FakeTrainer(tmp_path, loggers=[Unasked(str(tmp_path), "exp")])
    assert ModelCheckpoint().find_last(trainer) == [found[0], found[2], found[1]]


def test_a_failing_logger_is_said_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeLogger):
        def after_save_checkpoint(self, callback: Any) -> None:
            raise RuntimeError("no network")

    fit(tmp_path, ModelCheckpoint(tmp_path / "c"), loggers=[Broken(str(tmp_path))])
    assert "after_save_checkpoint failed" in caplog.text


# --- last, links, removal ----------------------------------------------------------------------------------------


def test_last_is_brought_to_the_end_of_training(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", every_n_train_steps=3, save_last=True), windows=5)
    assert torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)["global_step"] == 5


def test_link_leads_to_the_newest_file_at_every_moment(tmp_path: Path) -> None:
    class Look(ModelCheckpoint):
        def _lw_remove_pending(self, trainer: Any) -> None:
            assert os.path.isfile(tmp_path / "c" / "last.ckpt")
            super()._lw_remove_pending(trainer)
            assert os.path.isfile(tmp_path / "c" / "last.ckpt")

    checkpoint = Look(tmp_path / "c", save_last="link")
    fit(tmp_path, checkpoint, max_epochs=3)
    assert os.readlink(tmp_path / "c" / "last.ckpt") == "epoch=2-step=12.ckpt"
    assert names(tmp_path / "c") == ["epoch=2-step=12.ckpt", "last.ckpt"]


def test_link_becomes_a_file_when_the_newest_state_is_not_among_the_best(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="v", save_last="link")
    fit(tmp_path, checkpoint, max_epochs=2, val_metrics=lambda step: {"v": float(step)})
    assert not os.path.islink(tmp_path / "c" / "last.ckpt")
    assert torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)["global_step"] == 8
    assert torch.load(tmp_path / "c" / "epoch=0-step=4.ckpt", weights_only=True)["global_step"] == 4


def test_link_never_leads_to_itself(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", "last", save_last="link"), max_epochs=3)
    assert names(tmp_path / "c") == ["last.ckpt"]
    assert not os.path.islink(tmp_path / "c" / "last.ckpt")


def test_the_state_in_a_file_names_that_file(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="v", save_last=True)
    fit(tmp_path, checkpoint, max_epochs=2, val_metrics=lambda step: {"v": -float(step)})
    newest, last = str(tmp_path / "c" / "epoch=1-step=8.ckpt"), str(tmp_path / "c" / "last.ckpt")
    for path in (newest, last):
        state = saved_state(path, checkpoint)
        assert state["best_model_path"] == newest
        assert state["last_model_path"] == last
        assert state["best_k_models"] == {newest: torch.tensor(-8.0)}
        assert state["pending_removals"] == [str(tmp_path / "c" / "epoch=0-step=4.ckpt")]


def test_a_failed_save_removes_nothing_and_leaves_the_books(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", save_last=True)
    trainer = FakeTrainer(tmp_path, [checkpoint], max_epochs=2)

    def fill_disk(step: int) -> None:
        trainer.save_failure = CheckpointError("no space left", fix="make room") if step >= 4 else None

    trainer.batch_hook = fill_disk
    with pytest.raises(CheckpointError, match="no space left"):
        trainer.fit()
    first = str(tmp_path / "c" / "epoch=0-step=4.ckpt")
    assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path == first
    assert checkpoint.state_dict()["pending_removals"] == []


def test_a_kill_between_commit_and_removal_is_healed(tmp_path: Path) -> None:
    class Killed(ModelCheckpoint):
        def _lw_remove_pending(self, trainer: Any) -> None:
            if self.checkpoint_state.pending_removals:
                raise SystemExit("killed")

    with pytest.raises(SystemExit):
        fit(tmp_path, Killed(tmp_path / "c"), max_epochs=2)
    assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]
    again = Killed(tmp_path / "c")
    Killed._lw_remove_pending = ModelCheckpoint._lw_remove_pending  # type: ignore[method-assign]
    trainer = FakeTrainer(tmp_path, [again], max_epochs=2)
    trainer.fit(ckpt_path=again.find_last(trainer)[0])
    assert names(tmp_path / "c") == ["epoch=1-step=8.ckpt"]


def test_the_file_that_was_resumed_is_never_removed(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c"), max_epochs=1)
    resumed = str(tmp_path / "c" / "epoch=0-step=4.ckpt")
    fit(tmp_path, ModelCheckpoint(tmp_path / "c"), ckpt_path=resumed, max_epochs=3)
    assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt", "epoch=2-step=12.ckpt"]


def test_a_file_outside_of_the_folder_is_not_removed(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c")
    fit(tmp_path, checkpoint, max_epochs=1)
    checkpoint.dirpath = checkpoint.given_dirpath = str(tmp_path / "cc")
    fit(tmp_path, checkpoint, max_epochs=1, windows=5)
    assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt"]


@pytest.mark.parametrize("place", ["memory://{}/of/others", "memory://{}/runs/../of/others", "memory://{}/runs2/x"])
def test_a_checkpoint_that_names_files_at_other_urls_removes_none(tmp_path: Path, place: str) -> None:
    import fsspec

    bucket = tmp_path.name
    url = f"{place.format(bucket)}/a.ckpt"
    folder = f"memory://{bucket}/runs"
    store = fsspec.filesystem("memory")
    for name in (url, f"{folder}/a.ckpt"):
        store.pipe_file(name, b"x")
    state = ModelCheckpoint(tmp_path / "c").checkpoint_state
    state.pending_removals = [url, f"{folder}/a.ckpt"]
    removal = CheckpointRemoval(state, dirpath=folder, resumed_path="", may_remove_resumed=False)
    removed: list[str] = []
    removal.remove_pending(removed.append)
    assert removed == [f"{folder}/a.ckpt"]


def test_a_last_checkpoint_outside_of_the_folder_is_not_replaced(tmp_path: Path) -> None:
    for name in ("others.txt", "c.ckpt"):
        (tmp_path / name).write_text(name)
    os.utime(tmp_path / "others.txt", (1, 1))
    state = ModelCheckpoint(tmp_path / "c").checkpoint_state
    state.best_path, state.last_path, state.last_step = str(tmp_path / "c.ckpt"), str(tmp_path / "others.txt"), 4
    removal = CheckpointRemoval(
        state, dirpath=str(tmp_path / "c"), resumed_path=str(tmp_path / "c.ckpt"), may_remove_resumed=False
    )
    removal.complete_last(4, is_link=False)
    assert (tmp_path / "others.txt").read_text() == "others.txt"


# --- resume ------------------------------------------------------------------------------------------------------


def scores(step: int) -> dict[str, float]:
    return {"v": [0.0, 5.0, 3.0, 4.0, 1.0, 2.0, 6.0, 0.5][step // 2 % 8]}


@pytest.mark.parametrize("stop", range(1, 16))
@pytest.mark.parametrize(
    "arguments",
    [{"save_last": None}, {"save_last": True}, {"save_last": "link"}, {"keep_last": 3, "save_last": True}],
    ids=str,
)
def test_a_run_that_was_killed_ends_with_the_same_books_and_files(
    tmp_path: Path, stop: int, arguments: dict[str, Any]
) -> None:
    def make(folder: Path) -> FakeTrainer:
        checkpoint = ModelCheckpoint(
            folder / "c", "{step}-{v}", monitor="v", save_top_k=2, every_n_train_steps=2, **arguments
        )
        return FakeTrainer(folder, [checkpoint], max_epochs=2, windows=8, val_every=2, val_metrics=scores)

    def end(trainer: FakeTrainer, folder: Path) -> Any:
        state = trainer.callbacks[0].state_dict()
        return eval(repr(state).replace(str(folder), ""), {"tensor": float, "inf": float("inf")})

    whole = make(tmp_path / "a")
    whole.fit()
    killed = make(tmp_path / "b")
    with interrupted_at(killed, stop, RuntimeError("killed")):
        killed.fit()
    resumed = make(tmp_path / "b")
    candidates = resumed.callbacks[0].find_last(resumed)
    resumed.fit(ckpt_path=candidates[0] if candidates else None)
    assert end(resumed, tmp_path / "b") == end(whole, tmp_path / "a")
    # The file that was resumed may stay although better ones came.
    extra = set(names(tmp_path / "b" / "c")) - set(names(tmp_path / "a" / "c"))
    assert extra <= {os.path.basename(path) for path in candidates[:1]}
    assert set(names(tmp_path / "b" / "c")) >= set(names(tmp_path / "a" / "c"))


def test_damaged_files_that_last_passed_over_are_written_again_under_their_names(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", save_top_k=-1), max_epochs=3)
    checkpoint = ModelCheckpoint(tmp_path / "c", save_top_k=-1)
    trainer = FakeTrainer(tmp_path, [checkpoint], max_epochs=3)
    found = checkpoint.find_last(trainer)
    assert [os.path.basename(path) for path in found] == [f"epoch={e}-step={4 * e + 4}.ckpt" for e in (2, 1, 0)]
    trainer.fit(ckpt_path=found[2])  # the two newer ones were found damaged
    assert names(tmp_path / "c") == [f"epoch={e}-step={4 * e + 4}.ckpt" for e in range(3)]


def test_resuming_from_an_earlier_file_keeps_the_later_files(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", save_top_k=-1), max_epochs=2)
    fit(
        tmp_path,
        ModelCheckpoint(tmp_path / "c", save_top_k=-1),
        ckpt_path=str(tmp_path / "c" / "epoch=0-step=4.ckpt"),
        max_epochs=2,
    )
    assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt", "epoch=1-step=8-v1.ckpt", "epoch=1-step=8.ckpt"]


def test_resuming_a_finished_run_writes_nothing(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", save_last=True), max_epochs=2)
    before = {name: os.stat(tmp_path / "c" / name).st_mtime_ns for name in names(tmp_path / "c")}
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", save_last=True), str(tmp_path / "c" / "last.ckpt"), max_epochs=2)
    assert {name: os.stat(tmp_path / "c" / name).st_mtime_ns for name in names(tmp_path / "c")} == before


def test_another_folder_takes_over_the_best_path_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "a", save_last=True), max_epochs=1)
    source = str(tmp_path / "a" / "epoch=0-step=4.ckpt")
    moved = ModelCheckpoint(tmp_path / "b", save_last=True)
    fit(tmp_path, moved, ckpt_path=source, max_epochs=1)
    assert moved.best_model_path == source
    assert moved.last_model_path == ""
    assert "only best_model_path is kept" in caplog.text


def test_testing_the_best_does_not_take_the_books_back(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="v", save_top_k=3)
    trainer = fit(tmp_path, checkpoint, max_epochs=3, val_metrics=lambda step: {"v": float(step)})
    trainer.validate(trainer.module, ckpt_path=checkpoint.best_model_path, fn="test")
    assert len(checkpoint.best_k_models) == 3
    fresh = ModelCheckpoint(tmp_path / "c", monitor="v", save_top_k=3)
    FakeTrainer(tmp_path, [fresh]).validate(torch.nn.Linear(2, 1, bias=False), checkpoint.best_model_path, "test")
    assert fresh.best_model_path == checkpoint.best_model_path


# --- exceptions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt()])
def test_an_exception_is_saved_once_beside_the_others(tmp_path: Path, error: BaseException) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", every_n_train_steps=2, save_last=True, save_on_exception=True)
    trainer = FakeTrainer(tmp_path, [checkpoint])
    with interrupted_at(trainer, 3, error):
        trainer.fit()
    assert names(tmp_path / "c") == ["epoch=0-step=2.ckpt", "epoch=0-step=3.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)["global_step"] == 2
    assert os.path.basename(checkpoint.find_last(trainer)[0]) == "epoch=0-step=3.ckpt"


def test_an_exception_inside_a_window_says_what_is_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", save_on_exception=True)
    trainer = FakeTrainer(tmp_path, [checkpoint], accumulate=2)
    with interrupted_at(trainer, 1, RuntimeError("bug")):
        trainer.fit()
    assert names(tmp_path / "c") == ["epoch=0-step=1.ckpt"]
    assert "will be repeated" in caplog.text


def test_nothing_is_saved_twice_for_one_step(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", every_n_train_steps=2, save_on_exception=True)
    trainer = FakeTrainer(tmp_path, [checkpoint])
    with interrupted_at(trainer, 2, RuntimeError("bug")):
        trainer.fit()
    assert names(tmp_path / "c") == ["epoch=0-step=2.ckpt"]


def test_stale_metrics_are_left_out_of_the_name_of_an_exception(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", "{step}-{v}", save_on_exception=True)
    trainer = FakeTrainer(tmp_path, [checkpoint], val_every=2, val_metrics=lambda step: {"v": 1.0})
    with interrupted_at(trainer, 3, RuntimeError("bug")):
        trainer.fit()
    assert "epoch=0-step=3.ckpt" in names(tmp_path / "c")


def test_weights_that_are_not_finite_are_not_saved_on_an_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", save_on_exception=True)
    trainer = FakeTrainer(tmp_path, [checkpoint])

    def spoil(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                next(trainer.module.parameters()).fill_(float("nan"))
            raise RuntimeError("bug")

    trainer.batch_hook = spoil
    with pytest.raises(RuntimeError, match="bug"):
        trainer.fit()
    assert names(tmp_path / "c") == []
    assert "not finite" in caplog.text


def test_an_exception_before_training_saves_nothing(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            raise RuntimeError("bug")

    trainer = FakeTrainer(tmp_path, [Fails(), ModelCheckpoint(tmp_path / "c", save_on_exception=True)])
    with pytest.raises(RuntimeError, match="bug"):
        trainer.fit()
    assert names(tmp_path / "c") == []


# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"mode": "up"}, "mode='up'"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"keep_last": 0}, "keep_last=0 (expected 1 or more"),
        ({"restore_best": True}, "restore_best=True without monitor"),
        ({"restore_best": True, "monitor": "v", "save_top_k": 0}, "restore_best=True without monitor or with"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"every_n_epochs": 1.5}, "every_n_epochs=1.5 (expected an integer"),
        ({"every_n_train_steps": "5"}, "every_n_train_steps='5' (expected an integer"),
        ({"train_time_interval": timedelta(seconds=-1)}, "expected a time that is not negative"),
        ({"every_n_epochs": 1, "every_n_train_steps": 5}, "every_n_train_steps and every_n_epochs"),
        ({"train_time_interval": 5}, "train_time_interval=5"),
        ({"save_last": "copy"}, "save_last='copy'"),
        ({"save_last": "link", "dirpath": "s3://bucket/run"}, "need a local folder"),
        ({"filename": "{epoch"}, "filename="),
        ({"filename": "../{epoch}"}, "leads out of dirpath"),
        ({"filename": "/tmp/{epoch}"}, "leads out of dirpath"),
        ({"filename": "a\0{epoch}"}, "a zero byte"),
        ({"filename": f"{{epoch}}-{'x' * 256}"}, "more than 255 bytes"),
    ],
)
def test_arguments_that_cannot_work_are_refused(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelCheckpoint(**kwargs)
    assert text in str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"mode=.*save_top_k=.*every_n_epochs="):
        ModelCheckpoint(mode="up", save_top_k=-2, every_n_epochs=-1)


def test_state_key_tells_instances_apart() -> None:
    assert ModelCheckpoint().state_key == (
        "ModelCheckpoint{'monitor': None, 'mode': 'min', 'every_n_train_steps': 0, 'every_n_epochs': 1, "
        "'train_time_interval': None}"
    )


def test_without_a_limit_the_worst_file_is_the_kth_best(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="v", filename="{step}", save_top_k=-1)
    fit(tmp_path, checkpoint, max_epochs=3, val_metrics=lambda step: {"v": {4: 2.0, 8: 3.0, 12: 1.0}[step]})
    assert Path(checkpoint.kth_best_model_path).name == "step=8.ckpt"


def test_to_yaml_without_files_is_an_empty_mapping(tmp_path: Path) -> None:
    ModelCheckpoint(tmp_path, save_top_k=0).to_yaml(tmp_path / "none.yaml")
    assert (tmp_path / "none.yaml").read_text() == "{}\n"


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_plugin_removes_what_it_wrote(tmp_path: Path, is_wrapped: bool) -> None:
    removed = []

    class Store(TorchCheckpointIO):
        def remove_checkpoint(self, path: str | Path) -> None:
            removed.append(Path(path).name)
            super().remove_checkpoint(path)

    trainer = FakeTrainer(tmp_path, [ModelCheckpoint(tmp_path / "c", filename="{step}")], max_epochs=3)
    trainer.fabric.checkpoint_io = AsyncCheckpointIO(Store()) if is_wrapped else Store()
    trainer.fit()
    assert removed == ["step=4.ckpt", "step=8.ckpt"]
    assert names(tmp_path / "c") == ["step=12.ckpt"]


def test_to_yaml(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="v")
    fit(tmp_path, checkpoint, val_metrics=lambda step: {"v": 0.5})
    checkpoint.to_yaml()
    text = (tmp_path / "c" / "best_k_models.yaml").read_text()
    assert text == f'"{checkpoint.best_model_path}": 0.5\n'


def test_verbose_says_each_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", monitor="v", verbose=True), val_metrics=lambda step: {"v": 0.5})
    assert "step 4, v = 0.5: saved" in caplog.text
