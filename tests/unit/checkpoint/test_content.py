"""Altered checkpoints: one error at the door, whichever reader opens them."""

from __future__ import annotations

import contextlib
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Net, loader, quiet

import loopwright as lw
from loopwright.cli import run
from loopwright.errors import CheckpointError, LoopwrightError

BAD = (None, 1, "x", [], {}, -1, math.nan)
KEYS = ("state_dict", "callbacks", "optimizer_states", "lr_schedulers", "epoch", "global_step", "loopwright",
        "hparams_name", "hyper_parameters", "loops")  # fmt: skip
OWN = ("schema", "versions", "world_size", "progress", "data", "rng", "rng_of_ranks", "rng_places", "metrics",
       "metric_objects", "schedule_progress", "optimizer_record", "frozen", "excluded", "unfinished",
       "after_validation", "loggers", "validation_generators")  # fmt: skip


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trainer = quiet(
        max_epochs=1, limit_train_batches=1, callbacks=[lw.EarlyStopping("loss", check_on_train_epoch_end=True)]
    )
    trainer.fit(Logging(), loader())
    path = tmp_path_factory.mktemp("intact") / "x.ckpt"
    trainer.save_checkpoint(path)
    return dict(torch.load(path, weights_only=True))


class Logging(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def resume(path: Path) -> None:
    callbacks = [lw.EarlyStopping("loss", check_on_train_epoch_end=True)]
    quiet(max_epochs=2, limit_train_batches=1, callbacks=callbacks).fit(Logging(), loader(), ckpt_path=path)


def load_in_fabric(path: Path) -> None:
    fabric = lw.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.load(path, {"state_dict": fabric.setup(Net())})


def command(*line: str) -> Any:
    def call(path: Path) -> None:
        run(["checkpoint", *(str(path) if word == "FILE" else word for word in line)])

    return call


READERS = (
    resume, Logging.load_from_checkpoint, load_in_fabric, command("inspect", "FILE"), command("verify", "FILE"),
    command("diff", "FILE", "FILE"), command("convert", "FILE", "out.ckpt", "--to", "lightning"),
)  # fmt: skip


@pytest.mark.parametrize("key", [*KEYS, *(f"loopwright.{name}" for name in OWN)])
def test_an_altered_entry_is_one_error_in_every_reader(
    key: str, intact: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in BAD:
        content = copy.deepcopy(intact)
        first, _, second = key.partition(".")
        (content[first] if second else content)[second or first] = value
        torch.save(content, "x.ckpt")
        for read in READERS if value == "x" else READERS[:2] if value in (None, {}) else READERS[1:2]:
            Path("out.ckpt").unlink(missing_ok=True)
            with contextlib.suppress(LoopwrightError, SystemExit):  # any other exception fails the test
                read(Path("x.ckpt"))


@pytest.mark.parametrize(("key", "value", "reason"), [
    ("schema", None, "expected int at loopwright.schema, got None"),
    ("progress", 1, "expected a dict at loopwright.progress, got 1"),
    ("rng", {}, "expected the entry python in loopwright.rng"),
    ("data", {"batch_size": -1}, "expected an integer of at least 1 at loopwright.data.batch_size, got -1"),
    ("data", {"fingerprint": None}, "expected a dict at loopwright.data.fingerprint, got None"),
    ("data", {"opening": {"rng": []}}, "expected a dict at loopwright.data.opening.rng, got a list"),
    ("optimizer_record", {"a": 1}, "expected the entry configured in loopwright.optimizer_record"),
])  # fmt: skip
def test_the_error_names_the_entry(key: str, value: Any, reason: str, intact: dict[str, Any], tmp_path: Path) -> None:
    torch.save({**intact, "loopwright": {**intact["loopwright"], key: value}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=reason):
        resume(tmp_path / "x.ckpt")


def test_a_callback_needs_a_name(intact: dict[str, Any], tmp_path: Path) -> None:
    torch.save({**intact, "callbacks": {5: {}}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="expected names at callbacks, got 5"):
        resume(tmp_path / "x.ckpt")
