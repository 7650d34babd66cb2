"""One callback, logger or profiler object in two Trainers, as in k-fold training: as good as a new object in each."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resume_program import digest
from toys import ValidatedNet, adam, loader, net, quiet

import loopwright as lw
from loopwright.loggers.json_lines import read_json_lines

pytestmark = pytest.mark.usefixtures("few_objects")  # a search collects garbage after each trial

OF_THE_CLOCK = ("totals", "summary")


class Model(ValidatedNet):
    """Logs its loss; its first layer is a backbone."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: adam([one for one in parameters if one.requires_grad]))
        self.backbone = self.net[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class Frozen(lw.BackboneFinetuning):
    """Thaws in epoch 1."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, verbose=False)


CALLBACKS: dict[str, Callable[[Path], lw.Callback]] = {
    "ModelCheckpoint, best": lambda folder: lw.ModelCheckpoint(folder / "best", "{step}", "val_loss", save_top_k=2),
    "ModelCheckpoint, steps": lambda folder: lw.ModelCheckpoint(
        folder / "steps", "{step}", every_n_train_steps=4, save_last=True
    ),
    "EarlyStopping": lambda folder: lw.EarlyStopping("val_loss", patience=1, min_delta=0.05),
    "EMA": lambda folder: lw.EMA(0.8),
    "WeightAveraging": lambda folder: lw.WeightAveraging(),
    "StochasticWeightAveraging": lambda folder: lw.StochasticWeightAveraging(0.05, swa_epoch_start=1),
    "LearningRateMonitor": lambda folder: lw.LearningRateMonitor("step"),
    "SpikeDetection": lambda folder: lw.SpikeDetection(window=4, warmup=2, atol=9.0),
    "WeightStatistics": lambda folder: lw.WeightStatistics(),
    "ModelPruning": lambda folder: lw.ModelPruning("l1_unstructured", amount=0.3),
    "BackboneFinetuning": lambda folder: Frozen(),
    "GradientAccumulationScheduler": lambda folder: lw.GradientAccumulationScheduler({0: 1, 1: 2}),
    "TrainingEfficiency": lambda folder: lw.TrainingEfficiency(),
    "LearningRateFinder": lambda folder: lw.LearningRateFinder(num_training_steps=8, update_attr=False),
}


def fold(folder: Path, callback: lw.Callback, number: int, module: Any = None) -> dict[str, Any]:
    """Train one fold with its own Trainer, and return what came of it."""
    lw.seed_everything(number, verbose=False)
    module = module or net(Model, seed=number)
    logger = lw.CSVLogger(folder, "csv", version=number)
    trainer = quiet(
        max_epochs=3,
        logger=logger,
        enable_checkpointing=None,
        log_every_n_steps=1,
        callbacks=[callback],
        default_root_dir=folder,
    )
    trainer.fit(module, loader(16, seed=number), loader(4, seed=number + 9))
    with open(folder / f"csv/version_{number}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return {
        "weights": digest(module.state_dict()),
        "steps": trainer.global_step,
        "rows": rows if not isinstance(callback, lw.TrainingEfficiency) else len(rows),
        "state": {key: _comparable(value) for key, value in callback.state_dict().items() if key not in OF_THE_CLOCK},
    }


def _comparable(value: Any) -> Any:
    if isinstance(value, str):
        return Path(value).name.replace("-v1", "")
    if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        return {Path(key).name.replace("-v1", ""): digest(entry) for key, entry in value.items()}
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return [_comparable(one) for one in value]
    return digest(value)


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_in_a_second_trainer_is_as_a_new_one(name: str, tmp_path: Path) -> None:
    make = CALLBACKS[name]
    fresh = fold(tmp_path / "fresh", make(tmp_path / "fresh"), 2)
    reused = make(tmp_path / "reused")
    fold(tmp_path / "reused", reused, 1)
    assert fold(tmp_path / "reused", reused, 2) == fresh


@pytest.mark.parametrize("name", ["EMA", "WeightAveraging", "StochasticWeightAveraging", "ModelCheckpoint, steps"])
def test_also_with_the_module_of_the_first(name: str, tmp_path: Path) -> None:
    make, module = CALLBACKS[name], net(Model, seed=1)
    callback = make(tmp_path)
    fold(tmp_path, callback, 1, module)
    twin = copy.deepcopy(module)
    assert fold(tmp_path, callback, 2, module) == fold(tmp_path / "fresh", make(tmp_path / "fresh"), 2, twin)


def test_a_checkpoint_callback_keeps_the_files_of_each_fold_and_names_the_last_ones(tmp_path: Path) -> None:
    callback = lw.ModelCheckpoint(tmp_path / "folds", "{step}", "val_loss")
    best = []
    for number in (1, 2):
        fold(tmp_path, callback, number)
        best.append(callback.best_model_path)
    assert best[0] != best[1]
    assert all(Path(path).exists() for path in best)


def test_a_second_trainer_may_go_on_from_the_best_of_the_first(tmp_path: Path) -> None:
    callback = lw.ModelCheckpoint(tmp_path / "kept", "{step}", "val_loss")
    fold(tmp_path, callback, 1)
    best, score = callback.best_model_path, callback.best_model_score
    quiet(callbacks=[callback], enable_checkpointing=None).test(net(Model), loader(4), "best", verbose=False)
    assert (callback.best_model_path, callback.best_model_score) == (best, score)
    trainer = quiet(max_epochs=4, callbacks=[callback], enable_checkpointing=None)
    trainer.fit(net(Model), loader(16, seed=1), loader(4, seed=10), ckpt_path="best")
    assert trainer.global_step > 8
    assert float(callback.best_model_score) <= float(score)  # type: ignore[arg-type]


def test_a_timer_counts_each_trainers_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("loopwright.callbacks.stopping.timer.time.monotonic", lambda: now[0])

    class Slow(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            now[0] += 10.0

    timer = lw.Timer("00:00:01:00", verbose=False)
    for _ in range(2):
        trainer = quiet(max_epochs=1, callbacks=[timer])
        trainer.fit(net(Slow), loader(10), loader(4))  # five steps
        assert (trainer.global_step, timer.time_elapsed()) == (5, 50.0)


LOGGERS: dict[str, Callable[[Path], Any]] = {
    "CSVLogger": lambda folder: lw.CSVLogger(folder, "x", version=0),
    "JSONLinesLogger": lambda folder: lw.JSONLinesLogger(folder, "x", version=0),
    "TensorBoardLogger": lambda folder: lw.TensorBoardLogger(folder, "x", version=0),
}


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_in_a_second_trainer_loses_no_row(name: str, tmp_path: Path) -> None:
    logger = LOGGERS[name](tmp_path)
    for number in (1, 2):
        trainer = quiet(max_epochs=1, logger=logger, log_every_n_steps=1)
        trainer.fit(net(Model, seed=number), loader(16, seed=number), loader(4))
    if name == "CSVLogger":
        with open(tmp_path / "x/version_0/metrics.csv") as file:
            losses = [row["loss"] for row in csv.DictReader(file) if row["loss"]]
    elif name == "JSONLinesLogger":
        losses = [row["loss"] for row in read_json_lines(tmp_path / "x/version_0/metrics.jsonl") if "loss" in row]
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        losses = []
        for path in sorted((tmp_path / "x/version_0").glob("events*")):
            events = EventAccumulator(str(path), size_guidance={"scalars": 0})
            events.Reload()
            losses += events.Scalars("loss") if "loss" in events.Tags()["scalars"] else []
    assert len(losses) == 16


@pytest.mark.parametrize("profiler", [lw.SimpleProfiler, lw.AdvancedProfiler])
def test_a_profiler_in_a_second_trainer_measures_its_steps(profiler: Any) -> None:
    shared = profiler()
    for _ in range(2):
        quiet(max_epochs=1, profiler=shared, enable_progress_bar=False).fit(net(Model), loader(8), loader(4))
    assert "run_training_step" in shared.summary()
