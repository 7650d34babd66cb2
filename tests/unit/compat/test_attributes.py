"""What programs for Lightning read of trainers, callbacks and loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.errors import ConfigError

pytestmark = pytest.mark.usefixtures("installed")

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


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


def test_no_plan_replaces_the_strategy_that_a_program_reads() -> None:
    import lightning as L

    trainer = L.Trainer(strategy="auto", devices=2, **QUIET)
    assert type(trainer.strategy).__name__ == "DDPStrategy"
    assert not trainer.fabric.leaves_choice


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


def test_hooks_of_a_batch_keep_the_default_of_their_last_argument_with_one_loader() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    seen: list[Any] = []

    class Listener(L.Callback):
        def on_validation_batch_end(self, *arguments: Any, dataloader_idx: Any = None) -> None:
            seen.append(len(arguments))

    class Model(BoringModel):
        loaders = 1

        def val_dataloader(self) -> Any:
            return [super().val_dataloader()] * self.loaders

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: Any = None) -> None:
            pass

        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: Any = None) -> None:
            seen.append(dataloader_idx)

    trainer = L.Trainer(limit_val_batches=1, callbacks=[Listener()], **QUIET)
    trainer.validate(Model(), verbose=False)
    assert seen == [None, 5]
    seen.clear()
    model = Model()
    model.loaders = 2
    trainer.validate(model, verbose=False)
    assert seen == [0, 6, 1, 6]


def test_strict_loading_of_none_is_true() -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    model = BoringModel()
    assert model.strict_loading is True
    model.strict_loading = None
    assert model.strict_loading is True
    model.strict_loading = False
    assert model.strict_loading is False

    class Loose(BoringModel):
        strict_loading = False

    assert Loose().strict_loading is False


def test_a_bar_of_the_program_may_take_out_the_version() -> None:
    import lightning as L

    seen: list[dict[str, Any]] = []

    class Bar(L.pytorch.callbacks.TQDMProgressBar):
        def get_metrics(self, *arguments: Any) -> Any:
            shown = super().get_metrics(*arguments)
            seen.append({"v_num": shown.pop("v_num")})
            return shown

    fit(callbacks=[Bar()], enable_progress_bar=True, logger=L.pytorch.loggers.CSVLogger("."))
    assert seen[0] == {"v_num": 0}


def test_loggers_have_a_file_system_and_summaries_their_columns(tmp_path: Path) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.utilities.model_summary import ModelSummary

    logger = CSVLogger(tmp_path)
    logger._fs.makedirs(logger.log_dir, exist_ok=True)
    assert Path(logger.log_dir).is_dir()
    assert ModelSummary(BoringModel())._get_summary_data()[1] == ("Name", ["layer"])


def test_limits_are_known_in_fit() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    limits = []
    for given in ({"max_steps": 2}, {"min_steps": 1, "max_epochs": 1}):
        trainer = L.Trainer(limit_train_batches=1, limit_val_batches=0, enable_checkpointing=False, **given, **QUIET)
        assert trainer.max_epochs == given.get("max_epochs")
        trainer.fit(BoringModel())
        limits.append((trainer.min_epochs, trainer.max_epochs))
    assert limits == [(0, -1), (1, 1)]


@pytest.mark.parametrize(("reload", "expected"), [(0, [1]), (2, [1, 3])])
def test_loaders_are_asked_for_by_the_first_validation_of_a_later_epoch(reload: int, expected: list[int]) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    asked = []

    class Model(BoringModel):
        def val_dataloader(self) -> Any:
            asked.append(self.current_epoch)
            return super().val_dataloader()

    arguments = {"max_epochs": 5, "check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": reload}
    fit(Model(), num_sanity_val_steps=0, **arguments)
    assert asked == expected


def test_limits_that_were_not_passed_are_all_batches() -> None:
    import lightning as L

    trainer = L.Trainer(limit_val_batches=3, **QUIET)
    assert (trainer.limit_train_batches, trainer.limit_val_batches, trainer.limit_test_batches) == (1.0, 3, 1.0)


def test_a_trainer_for_other_machines_can_be_made_and_is_refused_when_it_runs() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = L.Trainer(devices=2, num_nodes=2, strategy="ddp", max_steps=1, **QUIET)
    assert trainer.world_size == 4
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        trainer.fit(BoringModel())


def test_modules_in_eval_mode_are_hinted_at() -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    model = BoringModel()
    model.layer.eval()
    with pytest.warns(UserWarning, match="1 modules are in eval mode"):
        trainer = fit(model)
    assert trainer.is_last_batch
    assert trainer.fit_loop.skip


def test_a_batch_size_search_goes_on_where_loaders_do_not_use_the_size() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.tuner import Tuner

    model = BoringModel()
    model.batch_size = 2
    with pytest.warns(UserWarning, match="does not use batch_size"):
        size = Tuner(L.Trainer(max_epochs=1, **QUIET)).scale_batch_size(model, max_trials=3, steps_per_trial=1)
    assert model.batch_size == size == 8


def test_strategies_move_save_load_and_remove(tmp_path: Path) -> None:
    trainer = fit()
    strategy, model, path = trainer.strategy, trainer.lightning_module, tmp_path / "own.ckpt"
    batch = [torch.ones(2)]
    assert torch.equal(strategy.batch_to_device(batch)[0], batch[0])
    strategy.save_checkpoint({"state_dict": model.state_dict()}, path)
    with torch.no_grad():
        model.layer.weight.zero_()
    strategy.load_model_state_dict(strategy.load_checkpoint(path))
    assert model.layer.weight.any()
    strategy.remove_checkpoint(path)
    assert not path.exists()
    strategy.model_to_device()


def test_modules_transfer_batches_and_take_hyperparameters() -> None:
    from argparse import Namespace

    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

    class Model(BoringModel):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch + dataloader_idx

    model = Model()
    moved = model._apply_batch_transfer_handler(torch.ones(2), torch.device("cpu"), 3)
    assert torch.equal(moved, torch.full((2,), 4.0))
    for owner in (model, BoringDataModule()):
        owner._set_hparams({"a": 1})
        owner._set_hparams(Namespace(b=2))
        assert dict(owner.hparams) == {"a": 1, "b": 2}
        with pytest.raises(TypeError):
            owner._set_hparams(3)


def test_metrics_have_the_default_dtype() -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("number", 0.1)
            self.log("mean", 0.1, on_step=False, on_epoch=True)
            self.log("half", torch.tensor(0.5, dtype=torch.float16))
            return super().training_step(batch, batch_idx)

    found = fit(Model()).callback_metrics
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert found["number"] == found["mean"] == torch.tensor(0.1)


def test_optimizers_of_manual_optimization_have_the_one_that_was_returned() -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            managed = self.optimizers()
            assert managed._optimizer is managed.optimizer is self.optimizers(use_pl_optimizer=False)

    fit(Model(), max_epochs=1)
