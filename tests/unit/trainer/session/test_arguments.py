"""The Trainer's arguments: every wrong one is named, defaults, the environment, what can be read back."""

from __future__ import annotations

import inspect
import math
import pydoc
from datetime import timedelta
from typing import Any

import pytest
from toys import Net, loader, net, quiet

import loopwright as lw
from loopwright.callbacks import GradientAccumulationScheduler, ModelCheckpoint, TQDMProgressBar
from loopwright.errors import ConfigError
from loopwright.trainer.session.arguments import Arguments, seconds_of
from loopwright.trainer.session.unknown_arguments import REPLACEMENTS

WRONG: list[tuple[str, Any]] = [
    ("accelerator", "toaster"),
    ("strategy", "magic"),
    ("devices", 0),
    ("devices", "0"),
    ("devices", []),
    ("num_nodes", 0),
    ("precision", "7-bit"),
    ("logger", 3),
    ("logger", [3]),
    ("callbacks", 3),
    ("callbacks", [3]),
    ("callbacks", [Net]),
    ("enable_checkpointing", "False"),
    ("enable_progress_bar", "no"),
    ("enable_model_summary", [True]),
    ("detect_anomaly", 2),
    ("inference_mode", "off"),
    ("use_distributed_sampler", "false"),
    ("sync_batchnorm", 0.5),
    ("enable_autolog_hparams", "x"),
    ("benchmark", "yes"),
    ("fast_dev_run", -1),
    ("fast_dev_run", 1.5),
    ("fast_dev_run", "yes"),
    ("max_epochs", -2),
    ("max_epochs", 1.5),
    ("max_epochs", "3"),
    ("max_epochs", True),
    ("min_epochs", -1),
    ("min_epochs", 0.5),
    ("max_steps", -2),
    ("max_steps", None),
    ("max_steps", 10.0),
    ("min_steps", -1),
    ("max_time", "1 hour"),
    ("max_time", "01:00"),
    ("max_time", 3),
    ("max_time", {"eons": 1}),
    *[
        (f"limit_{stage}_batches", value)
        for stage in ("train", "val", "test", "predict")
        for value in (-1, -0.5, 1.5, "all", math.nan, math.inf, True)
    ],
    ("overfit_batches", -1),
    ("overfit_batches", 1.5),
    ("val_check_interval", 0),
    ("val_check_interval", 0.0),
    ("val_check_interval", -0.5),
    ("val_check_interval", 1.5),
    ("val_check_interval", True),
    ("val_check_interval", "soon"),
    ("val_check_interval", timedelta(0)),
    ("check_val_every_n_epoch", 0),
    ("check_val_every_n_epoch", -1),
    ("check_val_every_n_epoch", 1.5),
    ("check_val_every_n_epoch", True),
    ("num_sanity_val_steps", -2),
    ("num_sanity_val_steps", 0.5),
    ("log_every_n_steps", -1),
    ("log_every_n_steps", 1.5),
    ("accumulate_grad_batches", 0),
    ("accumulate_grad_batches", -1),
    ("accumulate_grad_batches", 1.5),
    ("accumulate_grad_batches", {0: 2}),
    ("accumulate_grad_batches", None),
    ("gradient_clip_val", -1.0),
    ("gradient_clip_val", "0.5"),
    ("gradient_clip_val", True),
    ("gradient_clip_val", math.nan),
    ("gradient_clip_algorithm", "nrom"),
    ("gradient_clip_algorithm", 2),
    ("deterministic", "yes"),
    ("profiler", "fast"),
    ("profiler", 3),
    ("plugins", [3]),
    ("reload_dataloaders_every_n_epochs", -1),
    ("reload_dataloaders_every_n_epochs", None),
    ("reload_dataloaders_every_n_epochs", 0.5),
    ("model_registry", "hub"),
    ("nonfinite_loss", "panic"),
    ("default_root_dir", 5),
    ("nonfinite_loss", None),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value!r}" for name, value in WRONG])
def test_a_wrong_argument_is_a_config_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        quiet(**{name: value})
    assert caught.value.fix


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            {"val_check_interval": 0.5, "check_val_every_n_epoch": None},
            ["val_check_interval=0.5", "check_val_every_n_epoch"],
        ),
        ({"callbacks": ModelCheckpoint()}, ["enable_checkpointing=False"]),
        ({"callbacks": TQDMProgressBar()}, ["enable_progress_bar=False", "TQDMProgressBar"]),
        (
            {"callbacks": [TQDMProgressBar(), TQDMProgressBar()], "enable_progress_bar": True},
            ["several progress bars"],
        ),
        (
            {"callbacks": GradientAccumulationScheduler({0: 2}), "accumulate_grad_batches": 2},
            ["accumulate_grad_batches", "GradientAccumulationScheduler"],
        ),
    ],
)
def test_a_pair_that_contradicts_itself_is_named(arguments: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        quiet(**arguments)
    assert all(name in str(caught.value) for name in names)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        quiet(max_epochs=-5, limit_val_batches=-1, accumulate_grad_batches=0, val_check_interval=0)
    text = str(caught.value)
    assert "got 4 invalid arguments" in text
    for name in ("max_epochs=-5", "limit_val_batches=-1", "accumulate_grad_batches=0", "val_check_interval=0"):
        assert name in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_epoch", "did you mean 'max_epochs'"),
        ("gpus", "write accelerator='gpu', devices=... instead of gpus="),
        ("lr", "write the optimizer's lr, in configure_optimizers instead of lr="),
        ("num_train_epochs", "write max_epochs= instead of num_train_epochs="),
        ("whatever_this_is", "Trainer has no argument whatever_this_is=."),
    ],
)
def test_an_unknown_argument_is_named_with_what_to_write(name: str, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        quiet(**{name: 3})
    assert isinstance(caught.value, ConfigError)
    assert text in str(caught.value)


def test_arguments_of_a_subclass_are_its_own() -> None:
    class Own(lw.Trainer):
        def __init__(self, gpus: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.gpus = gpus

    assert Own(gpus=2, logger=False, enable_checkpointing=False).gpus == 2


def test_arguments_without_a_name_are_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="positional"):
        lw.Trainer("cpu")  # type: ignore[misc]


def test_what_replaces_an_argument_is_not_the_name_of_one() -> None:
    assert not REPLACEMENTS.keys() & inspect.signature(lw.Trainer).parameters.keys()


def test_a_trainer_says_where_it_runs_and_how_long() -> None:
    assert repr(quiet(accelerator="cpu", max_epochs=3)) == (
        "Trainer(SingleDeviceStrategy, devices=1, accelerator='cpu', precision='32-true', max_epochs=3)"
    )
    trainer = quiet(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed", max_steps=7, max_epochs=-1)
    assert repr(trainer) == "Trainer(DDPStrategy, devices=2, accelerator='cpu', precision='bf16-mixed', max_steps=7)"


@pytest.mark.parametrize(
    ("name", "full"),
    [("fp32", "32-true"), ("float64", "64-true"), ("fp16", "16-mixed"), ("bfloat16", "bf16-mixed")],
)
@pytest.mark.filterwarnings("ignore:.*is interpreted as")
def test_precisions_have_the_names_of_other_libraries(name: str, full: str) -> None:
    assert quiet(precision=name).precision == full


def test_a_wrong_letter_is_likelier_than_a_missing_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ddp'"):
        quiet(strategy="dpp")


# --- defaults and reading back ---------------------------------------------------------------------------------------


def test_defaults() -> None:
    trainer = quiet()
    assert (trainer.max_epochs, trainer.max_steps, trainer.min_epochs, trainer.min_steps) == (None, -1, None, None)
    assert (trainer.log_every_n_steps, trainer.num_sanity_val_steps, trainer.val_check_interval) == (50, 2, 1.0)
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (1, None)
    assert trainer.gradient_clip_algorithm is None
    assert (trainer.check_val_every_n_epoch, trainer.overfit_batches, trainer.fast_dev_run) == (1, 0.0, False)
    assert trainer.limit_train_batches in (None, 1.0)
    assert (trainer.current_epoch, trainer.global_step, trainer.world_size, trainer.global_rank) == (0, 0, 1, 0)
    assert trainer.is_global_zero
    assert (trainer.state.fn, trainer.state.stage, trainer.state.status) == (None, None, "initializing")


def test_arguments_can_be_read_back_and_limits_changed() -> None:
    trainer = quiet(max_epochs=3, min_steps=2, limit_val_batches=4, gradient_clip_val=0.5, accumulate_grad_batches=2)
    assert (trainer.max_epochs, trainer.min_steps, trainer.limit_val_batches) == (3, 2, 4)
    assert (trainer.gradient_clip_val, trainer.accumulate_grad_batches) == (0.5, 2)
    trainer.max_epochs = 5
    assert trainer.fit_loop.max_epochs == 5


def test_default_callbacks_and_loggers(tmp_path: Any) -> None:
    trainer = lw.Trainer(accelerator="cpu", default_root_dir=tmp_path, max_time="00:01:00:00")
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert names == ["RichProgressBar", "RichModelSummary", "Timer", "ModelCheckpoint"]
    assert [type(logger).__name__ for logger in trainer.loggers] == ["TensorBoardLogger"]
    assert trainer.checkpoint_callback is trainer.callbacks[-1]
    assert trainer.progress_bar_callback is trainer.callbacks[0]
    assert list(tmp_path.iterdir()) == []


def test_the_state_follows_the_run() -> None:
    seen: list[Any] = []

    class Watched(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            trainer = self.trainer
            seen.append((trainer.state.fn, trainer.state.stage, trainer.state.status, trainer.training))
            return self.loss(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            trainer = self.trainer
            seen.append((trainer.state.fn, trainer.state.stage, trainer.predicting, trainer.training))

    trainer, module = quiet(max_steps=1), net(Watched)
    trainer.fit(module, loader())
    trainer.predict(module, loader(2))
    assert seen == [("fit", "train", "running", True), ("predict", "predict", True, False)]
    assert (trainer.state.stage, trainer.state.status) == (None, "finished")


def test_loaders_and_datamodule_can_be_read_in_the_form_they_were_given() -> None:
    train, val = {"a": loader(4)}, [loader(2), loader(2)]

    class Several(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["a"])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    trainer = quiet(max_epochs=1)
    assert trainer.train_dataloader is None
    trainer.fit(net(Several), train, val)
    assert trainer.train_dataloader is train
    assert trainer.val_dataloaders is val
    assert trainer.num_val_batches == [1, 1]
    assert trainer.num_sanity_val_batches == [1, 1]
    assert (trainer.test_dataloaders, trainer.datamodule) == (None, None)


# --- the environment -------------------------------------------------------------------------------------------------


def test_arguments_come_from_the_environment_where_they_are_not_passed(monkeypatch: Any) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "8")
    monkeypatch.setenv("LOOPWRIGHT_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "0.5")
    monkeypatch.setenv("PL_TRAINER_GRADIENT_CLIP_ALGORITHM", "value")
    monkeypatch.setenv("PL_TRAINER_MAX_TIME", "00:01:00:00")
    trainer = quiet(accumulate_grad_batches=2)
    assert (trainer.max_epochs, trainer.limit_train_batches) == (7, 0.5)
    assert trainer.gradient_clip_algorithm == "value"
    assert trainer.fit_loop.has_time_limit
    assert quiet(max_epochs=3).max_epochs == 3


def test_a_wrong_value_in_the_environment_is_named(monkeypatch: Any) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "many")
    with pytest.raises(ConfigError, match="max_epochs='many'"):
        quiet()


# --- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("00:00:00:05", 5), ("01:02:03:04", 93784), (timedelta(minutes=2), 120), ({"hours": 1, "minutes": 30}, 5400),
    ],
)  # fmt: skip
def test_times_are_read_in_every_form(value: Any, seconds: float) -> None:
    assert seconds_of(value) == seconds


@pytest.mark.parametrize("value", ["", "1:2:3", "a:b:c:d", "1:2:3:4:5"])
def test_other_times_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="DD:HH:MM:SS"):
        seconds_of(value)


def test_arguments_resolve_to_defaults_by_themselves() -> None:
    arguments = Arguments().resolve()
    assert (arguments.log_every_n_steps, arguments.num_sanity_val_steps) == (50, 2)
    assert (arguments.enable_checkpointing, arguments.enable_progress_bar, arguments.enable_model_summary) == (
        True, True, True,
    )  # fmt: skip


class Extended(lw.Trainer):
    def __init__(self, extra: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Same(lw.Trainer):
    """Adds methods only."""


@pytest.mark.parametrize("kind", [lw.Trainer, Same])
def test_the_constructor_shows_its_arguments(kind: type[lw.Trainer]) -> None:
    shown = inspect.signature(kind)
    assert shown == inspect.signature(lw.Trainer.__init__).replace(parameters=list(shown.parameters.values()))
    assert {"accelerator", "max_epochs", "compile"} <= shown.parameters.keys()
    assert all(one.kind is one.KEYWORD_ONLY for one in shown.parameters.values())
    assert shown.parameters["max_steps"].default == -1
    assert f"{kind.__name__}(*, accelerator" in pydoc.render_doc(kind, renderer=pydoc.plaintext)
    with pytest.raises(ConfigError, match="accelerator='gpu', devices="):
        kind(gpus=1)
    assert list(inspect.signature(Extended).parameters) == ["extra", "kwargs"]


def test_the_constructor_and_its_record_of_arguments_have_the_same_defaults() -> None:
    shown = {name: one.default for name, one in inspect.signature(lw.Trainer).parameters.items()}
    assert Arguments().values() == shown


def test_all_that_dir_lists_can_be_read() -> None:
    trainer = quiet()
    names = {name for name, _ in inspect.getmembers(trainer)}
    assert {"max_epochs", "log_every_n_steps", "fit"} <= names
    assert "estimated_stepping_batches" not in names


def test_words_in_the_environment_are_true_and_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPWRIGHT_TRAINER_ENABLE_CHECKPOINTING", "false")
    monkeypatch.setenv("LOOPWRIGHT_TRAINER_DETECT_ANOMALY", "TRUE")
    trainer = lw.Trainer(logger=False, accelerator="cpu")
    assert not trainer.checkpoint_callbacks
    assert trainer._lw_arguments.detect_anomaly is True
