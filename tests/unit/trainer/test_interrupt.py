"""Runs that end before their time, by a signal, an error or a full disk: what they leave, and how they go on."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import resume_program
import torch
from kept import keep
from resume_program import Server, make, parts, points, report, result
from toys import quiet

import loopwright as lw
from loopwright.checkpoint import storage
from loopwright.errors import CheckpointError


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def log_of(root: Path) -> str:
    return root.with_name(f"{root.name}.log").read_text()


def equal_but_for_files(found: dict[str, Any], expected: dict[str, Any]) -> None:
    different = {key for key in expected if key not in ("calls", "files") and found[key] != expected[key]}
    assert not different, {key: (found[key], expected[key]) for key in different}


# --- signals ---------------------------------------------------------------------------------------------------------


SIGNALS = [
    (scenario, *signal) for scenario in ("rich", "workers", "plateau") for signal in (("SIGINT", 130), ("SIGTERM", 143))
]


@pytest.mark.parametrize(
    ("scenario", "name", "code"), keep(SIGNALS, ("rich", "SIGTERM", 143), ("plateau", "SIGINT", 130))
)
def test_a_signal_anywhere_ends_the_run_where_it_can_go_on_exactly(
    scenario: str, name: str, code: int, server: Server, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    assert server.run(scenario, root, "count") == 0, log_of(root)
    expected = result(root)
    for part in (5, 8):
        shutil.rmtree(root)
        fault = f"{name}:{expected['calls'] * part // 10}"
        assert server.run(scenario, root, fault) == code, log_of(root)
        assert "between two steps" in log_of(root)
        assert server.run(scenario, root) == 0, log_of(root)
        found = result(root)
        equal_but_for_files(found, expected)
        assert set(expected["files"]) <= set(found["files"])  # the one that was saved on the signal stays


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", -2), ("SIGTERM", 143)])
def test_the_exit_status_of_a_program_says_which_signal_it_was(name: str, code: int, tmp_path: Path) -> None:
    command = [sys.executable, resume_program.__file__, "plateau", str(tmp_path / "run"), f"{name}:40000"]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == code


# --- errors ----------------------------------------------------------------------------------------------------------


class Attempts(lw.Callback):
    """Writes down the samples of each micro-batch that training begins; raises in the batch number `fails_at`."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.seen: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([batch_idx, *(index for part in parts(batch) for index in part["id"].tolist())])
        if len(self.seen) == self.fails_at:
            raise RuntimeError("the machine is on fire")


@pytest.mark.parametrize(
    "name",
    keep(
        ["rich", "workers", "half", "cycled", "max_size", "iterable", "iterable_workers", "weighted",
         "drawing_sampler", "lbfgs"],
        "rich", "half", "cycled", "max_size", "iterable", "weighted", "drawing_sampler", "lbfgs",
    ),
)  # fmt: skip
def test_an_error_within_a_step_repeats_that_step_with_the_same_samples(name: str, tmp_path: Path) -> None:
    whole = Attempts()
    make(name, tmp_path / "whole", [whole]).fit(None)
    window = resume_program.SCENARIOS[name].trainer.get("accumulate_grad_batches", 1)
    for fails_at in (2, 6, len(whole.seen) - 1):
        root = tmp_path / f"run{fails_at}"
        failing = Attempts(fails_at)
        with pytest.raises(RuntimeError, match="on fire"):
            make(name, root, [failing], saves_on_exception=True).fit(None)
        assert failing.seen == whole.seen[:fails_at]
        resumed = Attempts()
        made = make(name, root, [resumed])
        made.fit("last")
        begun = len(whole.seen) - len(resumed.seen)  # batches that the resumed run did not begin again
        assert 0 <= fails_at - 1 - begun < window
        # The generators went on when the step failed: only the order of this epoch's samples is settled already.
        left = next((at for at, row in enumerate(resumed.seen) if at and row[0] == 0), len(resumed.seen))
        assert resumed.seen[:left] == whole.seen[begun : begun + left]


def test_a_loader_that_cannot_go_back_says_which_batches_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stateful(torch.utils.data.DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    made = make("rich", tmp_path, [Attempts(5)], saves_on_exception=True)
    made.train = Stateful(resume_program.Augmented(30), batch_size=3)
    with pytest.raises(RuntimeError, match="on fire"):
        made.fit(None)
    assert "Stateful cannot go back: the last 2 batches, whose step was not finished, are left out" in caplog.text


class FailsInValidation(lw.Callback):
    """Raises in the second batch of the second validation, once."""

    def __init__(self, act: Any) -> None:
        self.act = act
        self.batches = 0

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.batches += not trainer.sanity_checking
        if self.batches == 5:
            self.act(trainer)


def test_an_error_in_a_validation_repeats_all_of_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for name in ("rich", "plateau"):
        whole = make(name, root)
        whole.fit(None)
        expected, expected_points = report(whole, root), points(root)
        shutil.rmtree(root)

        def fail(trainer: Any) -> None:
            raise RuntimeError("the validation broke")

        with pytest.raises(RuntimeError, match="the validation broke"):
            make(name, root, [FailsInValidation(fail)], saves_on_exception=True).fit(None)
        resumed = make(name, root)
        resumed.fit("last")
        equal_but_for_files(report(resumed, root), expected)
        assert points(root) == expected_points
        shutil.rmtree(root)


class ValidatedByMetric(resume_program.ReducedNet):
    """Its validation counts batches in a metric object."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import SumMetric

        self.batches = SumMetric()
        self.sizes: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.batches.update(1.0)
        self.log("val_loss", self.loss(batch), add_dataloader_idx=False)
        self.log("val_max", float(batch_idx), reduce_fx="sum", add_dataloader_idx=False)

    def on_validation_epoch_end(self) -> None:
        self.sizes.append(float(self.batches.compute()))
        self.batches.reset()


def test_a_checkpoint_taken_within_a_validation_resumes_with_all_of_its_batches(tmp_path: Path) -> None:
    path = tmp_path / "within.ckpt"
    loader = resume_program.loader
    validation = [loader(10, shuffle=False)]

    def fit(act: Any, ckpt_path: Path | None) -> ValidatedByMetric:
        lw.seed_everything(1, verbose=False)
        module = ValidatedByMetric()
        trainer = quiet(max_epochs=2, num_sanity_val_steps=0, callbacks=[FailsInValidation(act)])
        trainer.fit(module, loader(12), validation, ckpt_path=ckpt_path)
        assert trainer.callback_metrics["val_max"] == 3.0
        return module

    whole = fit(lambda trainer: trainer.save_checkpoint(path), None)
    assert whole.sizes == [3.0, 3.0]
    resumed = fit(lambda trainer: None, path)
    assert resumed.sizes == [3.0]
    assert resume_program.digest(resumed.state_dict()) == resume_program.digest(whole.state_dict())


def test_a_second_fit_goes_on_after_an_error_with_the_step_that_failed() -> None:
    whole, failing = Attempts(), Attempts(5)
    loader = resume_program.loader
    for attempts in (whole, failing):
        lw.seed_everything(1, verbose=False)
        module, data = resume_program.Net(), loader(20)
        trainer = quiet(max_epochs=1, accumulate_grad_batches=3, limit_val_batches=0, callbacks=[attempts])
        if attempts is failing:
            with pytest.raises(RuntimeError, match="on fire"):
                trainer.fit(module, data)
            assert trainer.global_step == 1
        trainer.fit(module, data)
        assert (trainer.global_step, trainer.current_epoch) == (2, 1)
    assert failing.seen[:5] + failing.seen[7:] == whole.seen
    assert failing.seen[3:5] == failing.seen[5:7]


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_full_disk_ends_training_and_leaves_earlier_checkpoints_complete(
    number: int, server: Server, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    assert server.run("rich", root) == 0, log_of(root)
    expected = result(root)
    shutil.rmtree(root)
    assert server.run("rich", root, f"full:{number}") == 1
    assert "CheckpointError" in log_of(root)
    assert "No space left on device" in log_of(root)
    left = sorted((root / "checkpoints").iterdir())
    assert all(path.suffix == ".ckpt" and storage.verify(path).sealed for path in left)
    assert bool(left) == (number > 1)
    assert server.run("rich", root) == 0, log_of(root)
    found = result(root)
    equal_but_for_files(found, expected)
    assert found["files"] == expected["files"]


def test_a_save_that_fails_is_an_error_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(stage: str) -> None:
        if stage == "digest-written":
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage, "reached", reached)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        make("plateau", tmp_path / "run").fit(None)
    assert isinstance(caught.value.__cause__, OSError)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
