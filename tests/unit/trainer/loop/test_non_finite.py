"""Steps that are skipped are said the first time, counted, logged, and named as a share at the end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from toys import Net, RecordingLogger, loader, net, quiet

import loopwright as lw

LOG = "loopwright.trainer.loop.non_finite"


class Failing(Net):
    """Four of five losses are not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("kept", 1.0)
        return loss if batch_idx % 5 == 0 else loss * float("nan")


def counts_of(logger: RecordingLogger, name: str) -> list[tuple[int | None, float]]:
    return [(step, row[name]) for step, row in logger.rows if name in row]


def test_skipped_losses_are_said_once_counted_logged_and_named_as_a_share(caplog: pytest.LogCaptureFixture) -> None:
    logger = RecordingLogger()
    trainer = quiet(max_epochs=1, nonfinite_loss="skip", logger=logger, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="skipped") as said, caplog.at_level(logging.WARNING, LOG):
        trainer.fit(net(Failing), loader(20, 2))
    [text] = [str(one.message) for one in said]
    assert text.startswith("The step of batch 1 (0 is the first batch of training) is skipped: its loss is not finite")
    progress = trainer.progress
    assert (progress.steps, progress.skipped_steps, progress.nonfinite_steps) == (2, 8, 8)
    # A skipped step has a row at the index that it would have had; the last row is that of the epoch.
    counts = [(1, 1.0), (1, 2.0), (1, 3.0), (1, 4.0), (1, 4.0), (2, 5.0), (2, 6.0), (2, 7.0), (2, 8.0), (1, 8.0)]
    assert counts_of(logger, "nonfinite_steps") == counts_of(logger, "skipped_steps") == counts
    assert "8 of 10 steps (80 %) were skipped, 8 of them for a loss that was not finite." in caplog.text


@pytest.mark.filterwarnings("ignore:the step of batch")
def test_the_counts_go_on_in_a_resumed_run(tmp_path: Path) -> None:
    first = quiet(max_steps=1, max_epochs=9, nonfinite_loss="skip")
    first.fit(net(Failing), loader(20, 2))
    save = lw.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    whole = quiet(max_epochs=2, nonfinite_loss="skip", callbacks=[save], enable_checkpointing=True)
    whole.fit(net(Failing), loader(20, 2))
    resumed = quiet(max_epochs=2, nonfinite_loss="skip")
    resumed.fit(net(Failing), loader(20, 2), ckpt_path=tmp_path / "step=2.ckpt")
    assert resumed.progress.nonfinite_steps == whole.progress.nonfinite_steps == 16


class WithoutLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else self.loss(batch)


class LeavesOut(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(optimizer_closure)


class Overflows(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (float("inf") if batch_idx % 2 else 0.01)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (WithoutLoss, {}, "training_step returned no loss, or one of weight 0"),
        (LeavesOut, {}, "optimizer_step left it out"),
        (Overflows, {"precision": "16-mixed", "nonfinite_loss": "ignore"}, "gradients overflowed"),
    ],
)
def test_other_skipped_steps_are_in_the_log_and_in_the_rows(
    kind: type[Net], options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = RecordingLogger()
    trainer = quiet(max_epochs=1, logger=logger, log_every_n_steps=1, **options)
    with caplog.at_level(logging.INFO, LOG):
        trainer.fit(net(kind), loader(12, 2))
    assert (trainer.progress.skipped_steps, trainer.progress.nonfinite_steps) == (3, 0)
    assert counts_of(logger, "skipped_steps")[-1] == (2, 3.0)
    said = [record.getMessage() for record in caplog.records if record.name == LOG]
    assert len(said) == 2
    assert "batch 1 (0 is the first batch of training)" in said[0]
    assert reason in said[0]
    assert said[1] == "3 of 6 steps (50 %) were skipped, 0 of them for a loss that was not finite."


def test_the_rest_of_an_epoch_that_is_skipped_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Leaves(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    with caplog.at_level(logging.INFO, LOG):
        quiet(max_epochs=2).fit(net(Leaves), loader(12, 2))
    said = [record.getMessage() for record in caplog.records if record.name == LOG]
    assert said == ["on_train_batch_start returned -1: epoch 0 ends after 2 batches."]


def test_a_run_without_skipped_steps_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logger = RecordingLogger()
    with caplog.at_level(logging.INFO, LOG):
        quiet(max_epochs=1, nonfinite_loss="skip", logger=logger, log_every_n_steps=1).fit(net(Net), loader(12, 2))
    assert not [record for record in caplog.records if record.name == LOG]
    assert not counts_of(logger, "skipped_steps")
