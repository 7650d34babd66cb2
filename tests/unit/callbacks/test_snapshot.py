"""`Snapshot`: copies in memory, which a restart takes up. What needs ranks is in tests/integration."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
import torch
from toys import Net, ValidatedNet, loader, net, weights

import loopwright as lw
from loopwright.checkpoint import storage


def wait_for_copies() -> None:
    for thread in threading.enumerate():
        if thread.name == "loopwright-checkpoint":
            thread.join()


class Failing(Net):
    """Fails in a step, as if it was killed; waits for copies, so that each step has its own."""

    fails_at = -1
    error: type[BaseException] = ZeroDivisionError

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, 0.01), dropout=0.2)
        self.counts: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        wait_for_copies()
        self.counts.append(len(list(self.memory.rglob("*.ckpt"))))
        if self.trainer.global_step == self.fails_at:
            raise self.error
        return self.loss(batch)


class Place(NamedTuple):
    """Where runs keep their checkpoints and copies."""

    folder: Path

    def fit(
        self, fails_at: int = -1, *, ckpt_path: str | None = "last", every_checkpoint: int = 5,
        error: type[BaseException] = ZeroDivisionError, root: str | None = None, kind: type[Failing] = Failing,
        **snapshot: Any,
    ) -> Any:  # fmt: skip
        module = net(kind)
        module.memory, module.fails_at, module.error = self.folder / "memory", fails_at, error
        module.memory.mkdir(exist_ok=True)
        callbacks: list[lw.Callback] = [lw.Snapshot(**{"every": 1, "folder": module.memory, **snapshot})]
        checkpoints = self.folder / "checkpoints" if root is None else None
        callbacks.append(lw.ModelCheckpoint(checkpoints, every_n_train_steps=every_checkpoint))
        lw.seed_everything(3, verbose=False)
        trainer = lw.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=callbacks, default_root_dir=root,
        )  # fmt: skip
        if fails_at >= 0:
            with pytest.raises(error):
                trainer.fit(module, loader(32, 4, shuffle=True), ckpt_path=ckpt_path)
        else:
            trainer.fit(module, loader(32, 4, shuffle=True), ckpt_path=ckpt_path)
        return module

    def copies(self) -> list[Path]:
        found = (self.folder / "memory").rglob("*.ckpt")
        return sorted(found, key=lambda path: int(path.name.split("=")[1].split("-")[0]))

    def steps(self) -> list[int]:
        return [int(path.name.split("=")[1].split("-")[0]) for path in self.copies()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def undisturbed(tmp_path_factory: Any) -> dict[str, torch.Tensor]:
    return weights(Place(tmp_path_factory.mktemp("undisturbed")).fit())


def resumed_at(caplog: pytest.LogCaptureFixture) -> int:
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Resuming at")]
    return int(lines[-1].split("step ")[1].split()[0]) if lines else 0


@pytest.mark.parametrize("fails_at", [3, 8, 12])  # before the first checkpoint, in the first epoch, in the second
def test_a_restart_continues_from_the_last_copy_bit_for_bit(
    place: Place, undisturbed: Any, fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    place.fit(fails_at)
    assert place.steps() == [fails_at - 1, fails_at]
    end = weights(place.fit())
    assert resumed_at(caplog) == fails_at
    assert all(torch.equal(end[name], value) for name, value in undisturbed.items())


def test_at_most_as_many_copies_as_asked_for_are_kept_and_none_after_the_end(place: Place) -> None:
    module = place.fit(keep=3)
    assert max(module.counts) == 3
    assert not list((place.folder / "memory" / next((place.folder / "memory").iterdir()).name).iterdir())
    assert not list((place.folder / "checkpoints").glob(".*"))


def test_no_copy_is_made_where_a_checkpoint_was_saved(place: Place) -> None:
    place.fit(6)
    assert place.steps() == [4, 6]


def test_a_copy_that_is_not_whole_is_skipped(place: Place, undisturbed: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    place.fit(8)
    newest = place.copies()[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="is damaged and skipped"):
        end = weights(place.fit())
    assert resumed_at(caplog) == 7
    assert all(torch.equal(end[name], value) for name, value in undisturbed.items())


def test_a_checkpoint_that_is_newer_is_used(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    place.fit(5)
    assert place.steps() == [3, 4]
    place.fit()
    assert resumed_at(caplog) == 5


def test_an_evaluation_reads_the_last_checkpoint(place: Place) -> None:
    place.fit(8)
    trainer = lw.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False,
        callbacks=[lw.Snapshot(1, folder=place.folder / "memory"), lw.ModelCheckpoint(place.folder / "checkpoints")],
    )  # fmt: skip
    trainer.validate(net(ValidatedNet, lambda parameters: None, dropout=0.2), loader(4, 4), ckpt_path="last")
    assert "step=5" in str(trainer.ckpt_path)


@pytest.mark.parametrize("removed", ["folder", "checkpoint", "nothing"])
def test_copies_of_another_run_are_not_used_and_go(
    place: Place, removed: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    place.fit(8)
    before = place.copies()
    if removed == "folder":
        shutil.rmtree(place.folder / "checkpoints")
    elif removed == "checkpoint":  # its user wants to go back
        next((place.folder / "checkpoints").glob("*.ckpt")).unlink()
    place.fit(2, ckpt_path=None if removed == "nothing" else "last")
    assert resumed_at(caplog) == 0
    assert not set(before) & set(place.copies())


def test_copies_of_a_lost_machine_are_not_used_once_the_run_has_gone_back_behind_them(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    place.fit(8)
    assert place.steps() == [7, 8]
    lost = shutil.move(place.folder / "memory", place.folder / "lost")  # with its machine
    place.fit(7, every_checkpoint=6)  # from step 5: makes a checkpoint that is newer than the lost copies
    shutil.rmtree(place.folder / "memory")
    shutil.move(lost, place.folder / "memory")
    place.fit(7)
    assert resumed_at(caplog) == 6


def test_copies_count_over_starts_that_made_none(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    place.fit(8)
    for _ in range(2):
        place.fit(8)
        assert resumed_at(caplog) == 8


def test_another_run_at_the_same_path_keeps_its_copies_while_it_trains(place: Place) -> None:
    class TwoContainers(Failing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 8:  # another one starts, with another folder mounted at the path
                checkpoints, own = place.folder / "checkpoints", place.folder / "own"
                checkpoints.rename(own)
                with torch.random.fork_rng():
                    place.fit(3)
                assert place.steps() == [2, 3, 7, 8]
                shutil.rmtree(checkpoints)
                own.rename(checkpoints)
            return super().training_step(batch, batch_idx)

    place.fit(9, kind=TwoContainers)
    assert place.steps() == [2, 3, 8, 9]
    place.fit()
    assert place.steps() == []


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_checkpoints_at_a_url_make_no_local_folder_of_its_name(
    place: Place, scheme: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    (place.folder / "here").mkdir()
    monkeypatch.chdir(place.folder / "here")
    url = f"{scheme}://{place.folder}/remote"
    place.fit(8, root=url)
    place.fit(9, root=url)
    assert resumed_at(caplog) == 8
    place.fit(root=url)
    assert resumed_at(caplog) == 9
    assert not list(Path.cwd().iterdir())
    assert not fsspec.open(f"{url}/.loopwright-run").fs.exists(f"{url}/checkpoints/.loopwright-run")


@pytest.mark.parametrize(("fails_at", "every", "expected"), [
    (8, 1, "a copy of step 8 is in memory; continue with trainer.fit(..., ckpt_path='last')"),
    (4, 3, "a copy of step 3 is in memory; continue with trainer.fit(..., ckpt_path='last')"),
    (7, 4, "nothing was saved; continue from the last checkpoint with trainer.fit(..., ckpt_path="),  # of step 5
])  # fmt: skip
def test_an_interrupted_run_names_what_last_would_take(
    place: Place, fails_at: int, every: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    place.fit(fails_at, every=every, error=KeyboardInterrupt)
    assert f"after {fails_at} steps: {expected}" in " ".join(caplog.text.split())


def test_two_are_refused(place: Place) -> None:
    trainer = lw.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=place.folder,
        callbacks=[lw.Snapshot(1, folder=place.folder), lw.Snapshot(5, folder=place.folder)],
    )  # fmt: skip
    with pytest.raises(lw.ConfigError, match="Expected one Snapshot callback, got 2"):
        trainer.fit(net(ValidatedNet), loader(4, 4))


def test_too_little_memory_is_an_error_that_says_how_much_is_needed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(place.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        lw.CheckpointError, match=r"bytes in .*memory.* for 2 copies, got 1,\d\d\d free bytes|got 1,000 free"
    ):
        place.fit()


def test_a_copy_that_cannot_be_written_does_not_end_training(
    place: Place, undisturbed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(stage: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "reached", fill)
    end = weights(place.fit())
    assert "a copy could not be written; training continues" in caplog.text
    assert all(torch.equal(end[name], value) for name, value in undisturbed.items())


def test_a_folder_of_somebody_else_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder / "memory").mkdir()
    (place.folder / "elsewhere").mkdir()
    (place.folder / "memory" / "loopwright-0").symlink_to(place.folder / "elsewhere")
    monkeypatch.setattr("os.getuid", lambda: 0)
    with pytest.raises(lw.ConfigError, match="it belongs to another user, or is a link"):
        place.fit()


def test_it_replaces_no_checkpoint_callback() -> None:
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = lw.Trainer(callbacks=[lw.Snapshot(10)], **quiet)
    assert type(trainer.checkpoint_callback) is lw.ModelCheckpoint
    assert len(trainer.checkpoint_callbacks) == 2
    trainer = lw.Trainer(callbacks=[lw.Snapshot(10)], enable_checkpointing=False, **quiet)
    assert len(trainer.checkpoint_callbacks) == 1
    with pytest.raises(lw.ConfigError, match="every=0, keep=0"):
        lw.Snapshot(0, 0)
