"""SpikeDetection: what a spike is, when it is found, what is written, and that a resumed run sees the same."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Net, loader, net, quiet

import loopwright as lw
from loopwright.callbacks import SpikeDetection, TrainingSpikeException
from loopwright.callbacks.monitors.spike_detection import SpikeDetector
from loopwright.errors import ConfigError

CALM = [1.0, 1.1, 0.9, 1.0]


def spikes(losses: Sequence[float], **arguments: Any) -> list[int]:
    detector = SpikeDetector(**arguments)
    return [number for number, loss in enumerate(losses) if detector.is_spike(loss)]


@pytest.mark.parametrize(
    ("losses", "arguments", "expected"),
    [
        ([*CALM, 3.5, 1.0, 2.9], {}, [4]),
        ([*CALM, 3.5, 3.5, 3.5], {}, [4, 5, 6]),  # a spike does not enter the mean
        ([1.0, 3.5, 3.4], {"warmup": 3}, []),
        ([math.nan, 1.0, math.inf, 1.0], {}, [0, 2]),
        ([math.nan, 1.0, math.inf, 1.0, 9.0], {"finite_only": False}, [4]),
        ([*CALM, 0.1], {"mode": "max", "rtol": 0.8}, [4]),
        ([*CALM, 3.5], {"mode": "max"}, []),
        ([-1.0, -1.0, 0.9, 1.1], {}, [3]),  # the size of the mean counts, not its sign
        ([*CALM, 1.5, 2.0], {"rtol": None, "atol": 0.8}, [5]),
        ([*CALM, 3.5], {"atol": 5.0}, []),
        ([1.0, 10.0, 10.0, 29.0, 30.1], {"window": 2, "warmup": 3}, []),
        ([1.0, 10.0, 10.0, 30.1], {"window": 2, "warmup": 3}, [3]),
    ],
)
def test_a_spike_is_worse_than_the_mean_by_both_tolerances(
    losses: list[float], arguments: dict[str, Any], expected: list[int]
) -> None:
    assert spikes(losses, **arguments) == expected


class Scripted(Net):
    """A Net whose losses are given."""

    def __init__(self, losses: Sequence[float]) -> None:
        super().__init__()
        self.losses = losses

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).sum() * 0 + self.losses[batch_idx]


def fit(root: Path, losses: Sequence[float], spike: SpikeDetection, *callbacks: Any, **kwargs: Any) -> lw.Trainer:
    arguments = {
        "max_epochs": 1,
        "default_root_dir": root,
        "nonfinite_loss": "ignore",
        "log_every_n_steps": 4,
        **kwargs,
    }
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = quiet(callbacks=[spike, *callbacks], **arguments)
    trainer.fit(net(Scripted, losses), loader(2 * len(losses), 2), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("every", [None, 1, 100])
def test_training_stops_and_the_batches_are_written_down(every: int | None, tmp_path: Path) -> None:
    losses = [*CALM, 1.0, 50.0, 1.0, 1.0, 1.0]
    (tmp_path / "skip_batches.json").write_text("[77]")
    spike = SpikeDetection(check_every_n_steps=every)
    with pytest.raises(TrainingSpikeException, match=r"batch 5 of epoch 0 has the loss 50, the mean .* is 1") as caught:
        fit(tmp_path, losses, spike)
    assert caught.value.batch_idx == 5
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [4, 5, 77] == spike.bad_batches
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.batch_idx) == (str(caught.value), 5)


def test_losses_are_read_at_log_boundaries_only(tmp_path: Path, monkeypatch: Any) -> None:
    reads: list[int] = []
    copy = torch.Tensor.tolist

    def tolist(tensor: Any) -> Any:
        reads.append(len(tensor))
        return copy(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    fit(tmp_path, CALM * 3, SpikeDetection())
    assert [size for size in reads if size == 4] == [4, 4, 4]  # others read random number generators


def test_no_checkpoint_is_taken_after_a_spike(tmp_path: Path) -> None:
    checkpoint = lw.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    with pytest.raises(TrainingSpikeException):
        fit(
            tmp_path, [*CALM, 50.0, 1.0], SpikeDetection(check_every_n_steps=100), checkpoint, enable_checkpointing=True
        )
    assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == [f"step={step}" for step in (1, 2, 3, 4)]


def test_a_resumed_run_knows_the_losses_before(tmp_path: Path) -> None:
    losses = [1.0, 1.0, 9.0, 9.0, 9.0, 13.0, 9.0, 9.0]

    def spike() -> SpikeDetection:
        return SpikeDetection(window=4, warmup=5, rtol=1.0)

    whole, again = spike(), spike()
    # At step 6 there are two losses that are not judged yet.
    checkpoint = lw.ModelCheckpoint(tmp_path, every_n_train_steps=6, filename="six")
    fit(tmp_path, losses, whole, checkpoint, enable_checkpointing=True)
    saved = torch.load(tmp_path / "six.ckpt", weights_only=True)["callbacks"][whole.state_key]
    assert saved["pending"] == [[4, 0, 9.0], [5, 0, 13.0]]
    fit(tmp_path, losses, again, ckpt_path=tmp_path / "six.ckpt")
    assert again.detector.state_dict() == whole.detector.state_dict()


def test_two_detectors_keep_separate_state(tmp_path: Path) -> None:
    first, second = SpikeDetection(window=3), SpikeDetection(window=5)
    assert first.state_key != second.state_key
    fit(tmp_path, CALM * 2, first, second)
    assert [len(one.detector.state_dict()["losses"]) for one in (first, second)] == [3, 5]


def test_arguments_that_cannot_work_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"mode='least' is neither.*window=0 is below 1.*rtol=-1 is negative"):
        SpikeDetection("least", 0, rtol=-1)
    with pytest.raises(ConfigError, match="check_every_n_steps=0"):
        SpikeDetection(check_every_n_steps=0)


def test_a_training_without_losses_to_judge_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Scripted):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.net(batch[0]).sum())
            self.optimizers().step()

    quiet(max_epochs=2, callbacks=[SpikeDetection()], default_root_dir=tmp_path, log_every_n_steps=2).fit(
        net(Silent, CALM), loader(2 * len(CALM), 2)
    )
    said = [one.getMessage() for one in caplog.records if "no loss" in one.getMessage()]
    assert said == [
        "SpikeDetection has seen no loss in 2 steps: training_step returns none. Return it, also with manual "
        "optimization, as a tensor or a dict with the key 'loss'."
    ]
    caplog.clear()
    fit(tmp_path, [*CALM], SpikeDetection())
    assert not caplog.records


@pytest.mark.parametrize("path", [None, "epoch=0-step=4.ckpt"])
def test_losses_that_a_checkpoint_has_judged_are_not_missed_at_the_end_of_the_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str | None
) -> None:
    """Also not by a run that resumes from it, and ends the epoch without a step."""
    for one in (None, path):
        caplog.clear()
        save = lw.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
        callbacks = [SpikeDetection(), save]
        quiet(max_epochs=1, callbacks=callbacks, default_root_dir=tmp_path, enable_checkpointing=True).fit(
            net(Scripted, CALM), loader(len(CALM), 1), ckpt_path=one and tmp_path / one
        )
    assert "no loss" not in caplog.text
