"""What programs for Lightning read of trainers, callbacks and loggers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.compat import lightning as compat

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    compat.install(children=False)
    yield
    compat.uninstall()


def fit(model: Any = None, **arguments: Any) -> Any:
    """Return a trainer after two epochs of three batches."""
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    limits = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2, "enable_checkpointing": False}
    trainer = L.Trainer(**{**QUIET, **limits, **arguments})
    trainer.fit(BoringModel() if model is None else model)
    return trainer


@pytest.mark.parametrize("name", ["TQDMProgressBar", "RichProgressBar"])
def test_bars_without_a_terminal_are_readable_after_the_run(name: str) -> None:
    import lightning as L

    bar = getattr(L.pytorch.callbacks, name)()
    fit(callbacks=[bar], enable_progress_bar=True)
    done = "n" if name == "TQDMProgressBar" else "completed"
    assert (getattr(bar.train_progress_bar, done), bar.train_progress_bar.total) == (3, 3)
    assert getattr(bar.val_progress_bar, done) == 2


def test_a_rich_bar_has_its_progress_and_the_numbers_of_its_tasks() -> None:
    import lightning as L

    bar = L.pytorch.callbacks.RichProgressBar()
    assert bar.progress is None
    fit(callbacks=[bar], enable_progress_bar=True)
    assert bar.progress is not None
    ids = [bar.train_progress_bar_id, bar.val_progress_bar_id, bar.val_sanity_progress_bar_id]
    assert len(set(ids) - {None}) == 3
    assert bar.predict_progress_bar_id is bar.test_progress_bar_id is None


def test_loops_have_a_state() -> None:
    loop = fit().fit_loop
    state = loop.state_dict()
    assert state["state_dict"] == {}
    assert state["epoch_loop.batch_progress"]["total"]["completed"] == 6
    assert state["epoch_loop.batch_progress"]["current"]["completed"] == 3
    assert state["epoch_loop.val_loop.batch_progress"]["current"]["completed"] == 2
    assert loop.epoch_loop.state_dict("own.")["own.batch_progress"] == state["epoch_loop.batch_progress"]
    assert set(loop.trainer.predict_loop.state_dict()["batch_progress"]) == {"total", "current"}
    assert loop.epoch_loop.scheduler_progress.total.completed == 2


def test_a_strategy_has_the_arguments_of_its_replicas() -> None:
    import lightning as L

    trainer = L.Trainer(strategy="ddp_find_unused_parameters_true", devices=2, **QUIET)
    assert trainer.strategy._ddp_kwargs == {"find_unused_parameters": True}
    with pytest.raises(AttributeError):
        L.Trainer(**QUIET).strategy._ddp_kwargs  # noqa: B018


def test_saving_without_a_module_is_an_attribute_error() -> None:
    import lightning as L

    with pytest.raises(AttributeError, match="before a module was attached"):
        L.Trainer(**QUIET).save_checkpoint("a.ckpt")


def test_averages_are_readable_as_modules() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel
    from torch.optim.swa_utils import AveragedModel

    callback = L.pytorch.callbacks.WeightAveraging()
    assert callback._average_model is None
    model = BoringModel()
    fit(model, callbacks=[callback])
    average = callback._average_model
    assert isinstance(average, AveragedModel)
    assert average.n_averaged.item() == 6
    assert torch.equal(average.module.layer.weight, model.layer.weight)  # training ends with the average

    callback = L.pytorch.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
    fit(model, callbacks=[callback])
    assert torch.equal(callback._average_model.layer.weight, model.layer.weight)


def test_callbacks_have_their_arguments_under_lightnings_names() -> None:
    from lightning.pytorch.callbacks import SpikeDetection, Timer

    timer = Timer(duration={"seconds": 100})
    timer.load_state_dict({"time_elapsed": {"train": 50.0}})
    assert (timer._duration, timer._offset) == (100.0, 50.0)
    spikes = SpikeDetection(mode="max", warmup=3, atol=0.1, rtol=0.2)
    assert (spikes.mode, spikes.warmup, spikes.atol, spikes.rtol, spikes.finite_only) == ("max", 3, 0.1, 0.2, True)


def test_the_experiment_of_mlflow_has_lightnings_name(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger(save_dir=str(tmp_path))
    assert logger._experiment_name == "lightning_logs"
    assert logger._tracking_uri == f"file:{tmp_path}"
    assert logger._run_id is None


def test_a_dummy_logger_is_the_only_one_of_a_list() -> None:
    from lightning.pytorch.loggers.logger import DummyLogger

    logger = DummyLogger()
    assert list(logger) == [logger]
    assert logger[3] is logger
