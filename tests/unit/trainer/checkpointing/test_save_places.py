"""A checkpoint is exact wherever `trainer.save_checkpoint` is accepted: in each hook, of whichever listener.

A run saves at one place and its folder is copied right then, as a kill would leave it. What goes on from there has to
equal the run that was never stopped: weights, logged rows byte for byte, counts, and who was told of which event.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Net, adam, assert_same, loader, quiet

import loopwright as lw
from loopwright.callbacks import Checkpoint
from loopwright.errors import CheckpointError, ModuleError

# Events of a process rather than of the training: they happen again in the one that goes on.
OF_THE_PROCESS = ("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end")
WITHIN_A_VALIDATION = ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_end")
TOLD = (
    "on_train_epoch_start", "on_train_batch_end", *WITHIN_A_VALIDATION, "on_validation_epoch_end", "on_validation_end",
    "on_train_epoch_end",
)  # fmt: skip

Save = Callable[[Any, str, str], None]


class Told(lw.Callback):
    """Keeps the events it hears of in its state, and calls `save(trainer, who, event)` in each."""

    def __init__(self, name: str, save: Save) -> None:
        self.name = name
        self.save = save
        self.trace: list[list[Any]] = []
        for event in (*TOLD, *OF_THE_PROCESS):
            setattr(self, event, self._hear(event))

    @property
    def state_key(self) -> str:
        return self.name

    def _hear(self, event: str) -> Callable[..., None]:
        def hear(trainer: Any, module: Any, *arguments: Any) -> None:
            if event not in OF_THE_PROCESS and not trainer.sanity_checking:
                draw = round(float(torch.rand(())), 6)
                self.trace.append([event, trainer.current_epoch, trainer.global_step, draw, module.training])
            if self.runs_last:
                pass  # the event's values were read
            elif event == "on_train_batch_end":
                module.log(f"{self.name}_step", float(len(self.trace)), on_step=True, on_epoch=True)
            elif event in ("on_train_epoch_end", "on_validation_epoch_end"):
                module.log(f"{self.name}_{event}", float(len(self.trace)))
            self.save(trainer, self.name, event)

        return hear

    def state_dict(self) -> dict[str, Any]:
        return {"trace": [list(entry) for entry in self.trace]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.trace = [list(entry) for entry in state_dict["trace"]]


class ToldLast(Told, Checkpoint):
    """Is told among the checkpoint callbacks, before the others."""


class Model(Net):
    """Draws random numbers, validates, and hears some events itself."""

    def __init__(self, save: Save) -> None:
        super().__init__(adam, dropout=0.2)
        self.save = save
        self.trace: list[list[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + 0.01 * torch.rand(()), on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def _hear(self, event: str, *numbers: float) -> None:
        if not self.trainer.sanity_checking:
            self.trace.append([event, self.trainer.global_step, *numbers])
        self.save(self.trainer, "module", event)

    def on_train_epoch_start(self) -> None:
        self._hear("on_train_epoch_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._hear("on_train_batch_end", float(outputs["loss"]), float(batch[0].sum()))

    def on_validation_epoch_end(self) -> None:
        self._hear("on_validation_epoch_end")

    def on_validation_end(self) -> None:
        self._hear("on_validation_end")

    def on_train_epoch_end(self) -> None:
        self._hear("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = [list(entry) for entry in self.trace]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.trace = [list(entry) for entry in checkpoint["mine"]]


def run(root: Path, save: Save, ckpt_path: Path | None = None) -> tuple[lw.Trainer, Model]:
    """Train in a folder: two epochs of four windows, each window two micro-batches, two validations an epoch."""
    lw.seed_everything(3, verbose=False)
    trainer = quiet(
        max_epochs=2,
        accumulate_grad_batches=2,
        val_check_interval=4,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        enable_checkpointing=True,
        default_root_dir=root,
        logger=[lw.CSVLogger(root, "csv", version=0), lw.JSONLinesLogger(root, "jsonl", version=0)],
        callbacks=[
            Told("first", save),
            Told("second", save),
            lw.EarlyStopping("val_loss", patience=9),
            ToldLast("last", save),
            lw.ModelCheckpoint(root / "kept", every_n_train_steps=2, save_top_k=-1),
            lw.ModelCheckpoint(root / "best", "{step}", "val_loss", save_top_k=2),
        ],
    )
    model = Model(save)
    trainer.fit(model, loader(16, shuffle=True), loader(4, seed=2), ckpt_path=ckpt_path)
    return trainer, model


def report(root: Path, trainer: Any, model: Model) -> dict[str, Any]:
    """Return what must be equal, but for the weights."""
    lines = (root / "jsonl/version_0/metrics.jsonl").read_text().splitlines()
    rows = [re.sub(r'"wall_s": [^,]*, ', "", line) for line in lines]  # the clock's
    progress = {name: value for name, value in trainer.progress.state_dict().items() if name != "validated_s"}
    return {
        "csv": (root / "csv/version_0/metrics.csv").read_bytes(),
        "jsonl": rows,
        "progress": progress,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "module": model.trace,
        "files": sorted(path.name for folder in ("kept", "best") for path in (root / folder).iterdir()),
        **{c.state_key: _comparable(c.state_dict()) for c in trainer.callbacks if c.state_dict()},
    }


def _comparable(state: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) for name, value in state.items()}


class Photographer:
    """Saves in each of these places, and copies the folder as it is right then.

    Args:
        root: Folder of the run.
        photos: Where checkpoints and copies go.
        is_chosen: Whether to save in this event of this listener, by the number of times that it was asked.
    """

    def __init__(self, root: Path, photos: Path, is_chosen: Callable[[str, str, int], bool]) -> None:
        self.root, self.photos, self.is_chosen = root, photos, is_chosen
        self.times: Counter[tuple[str, str]] = Counter()
        self.taken: list[Path] = []

    def __call__(self, trainer: Any, who: str, event: str) -> None:
        if trainer.sanity_checking or not trainer.at_step_boundary or event in ("setup", *WITHIN_A_VALIDATION):
            return
        self.times[who, event] += 1
        number = self.times[who, event]
        if self.is_chosen(who, event, number):
            photo = self.photos / f"{who}-{event}-{number}"
            trainer.save_checkpoint(photo.with_suffix(".ckpt"))
            shutil.copytree(self.root, photo)  # as a kill right now would leave it
            self.taken.append(photo)


def assert_exact_from(photos: list[Path], root: Path, expected: dict[str, Any], model: Model) -> None:
    """Assert that what goes on from each photo equals the run that was never stopped."""
    for photo in photos:
        shutil.rmtree(root)
        shutil.copytree(photo, root)
        resumed, other = run(root, lambda *place: None, photo.with_suffix(".ckpt"))
        found = report(root, resumed, other)
        assert (photo.name, {name for name in expected if found[name] != expected[name]}) == (photo.name, set())
        assert_same(other, model)


LISTENERS = ("first", "second", "module", "last")
pytestmark = pytest.mark.filterwarnings("ignore:trainer.fit has nothing to do")


@pytest.mark.parametrize("who", LISTENERS)
def test_a_save_in_any_hook_of_one_listener_is_exact(who: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    trainer, model = run(root, lambda *place: None)
    expected = report(root, trainer, model)
    shutil.rmtree(root)
    photographer = Photographer(root, tmp_path / "photos", lambda one, event, number: one == who and number == 2)
    trainer, saving = run(root, photographer)
    assert report(root, trainer, saving) == expected  # a save changes nothing
    assert len(photographer.taken) >= 5
    assert_exact_from(photographer.taken, root, expected, model)


def test_saves_of_all_listeners_in_one_event_are_exact(tmp_path: Path) -> None:
    root = tmp_path / "run"
    photographer = Photographer(
        root, tmp_path / "photos", lambda who, event, number: "_end" in event and "start" not in event and number == 3
    )
    trainer, model = run(root, photographer)
    expected = report(root, trainer, model)
    assert {photo.name.split("-")[0] for photo in photographer.taken} == set(LISTENERS)
    assert_exact_from(photographer.taken, root, expected, model)


def test_logging_after_a_save_in_the_same_hook_is_an_error(tmp_path: Path) -> None:
    class LogsLate(lw.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(tmp_path / "x.ckpt")
            pl_module.log("late", 1.0)

    trainer = quiet(max_epochs=1, callbacks=[LogsLate()])
    with pytest.raises(
        ModuleError, match=r"on_train_batch_end after trainer\.save_checkpoint(.|\n)*log first, then save"
    ):
        trainer.fit(Net(), loader())


@pytest.mark.parametrize("event", WITHIN_A_VALIDATION)
def test_a_save_within_a_validation_that_a_callback_counts_is_refused_but_for_weights(
    event: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"

    def save(trainer: Any, who: str, at: str) -> None:
        if (who, at) == ("first", event):
            trainer.save_checkpoint(path, weights_only=True)
            trainer.save_checkpoint(path)

    with pytest.raises(CheckpointError, match="Told, Told(.|\\n)*save in on_validation_epoch_end"):
        run(tmp_path / "run", save)
    assert "optimizer_states" not in torch.load(path, weights_only=True)


@pytest.mark.parametrize("number", [1, 3])
def test_a_save_within_a_validation_that_nobody_counts_repeats_it_with_its_rows(number: int, tmp_path: Path) -> None:
    path = tmp_path / "within.ckpt"

    class Saver(lw.Callback):
        times = 0

        def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            Saver.times += 1
            if Saver.times == number:
                trainer.save_checkpoint(path)
                shutil.copytree(tmp_path / "run", tmp_path / "photo")

    def fit(callbacks: list[lw.Callback], ckpt_path: Path | None = None) -> tuple[bytes, Model]:
        lw.seed_everything(3, verbose=False)
        model = Model(lambda *place: None)
        trainer = quiet(
            max_epochs=2, num_sanity_val_steps=0, log_every_n_steps=1, callbacks=callbacks,
            logger=lw.CSVLogger(tmp_path / "run", "csv", version=0),
        )  # fmt: skip
        trainer.fit(model, loader(16, shuffle=True), loader(4, seed=2), ckpt_path=ckpt_path)
        return (tmp_path / "run/csv/version_0/metrics.csv").read_bytes(), model

    rows, model = fit([Saver()])
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "photo", tmp_path / "run")
    resumed_rows, resumed = fit([], path)
    assert resumed_rows == rows
    assert_same(resumed, model)
