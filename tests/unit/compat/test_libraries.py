"""What libraries built on Lightning do, in small: found with the programs in tests/compat, which run the libraries."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.compat.absent import NotServed
from loopwright.errors import ConfigError, ModuleError
from loopwright.yaml_file import parse

pytestmark = pytest.mark.usefixtures("installed")

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Scale:
    """An object that is no plain value."""

    factor = 3


def make_model() -> Any:
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def __init__(self, scale: Any = None, function: Any = None) -> None:
            self.save_hyperparameters()  # before the base class, as libraries do
            super().__init__()
            self.calls: list[str] = []

        def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.calls.append("start")

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.calls.append("end")

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["factor_seen"] = checkpoint["hyper_parameters"]["scale"].factor

    return Model


def test_hyperparameters_may_be_saved_before_the_base_class_is_set_up() -> None:
    assert dict(make_model()(5).hparams) == {"scale": 5, "function": None}


def test_hooks_of_a_batch_need_no_room_for_the_number_of_the_loader() -> None:
    import lightning as L

    calls: list[str] = []

    class Listener(L.Callback):
        def on_validation_batch_end(  # type: ignore[override]
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            calls.append("callback")

    model = make_model()(Scale())
    L.Trainer(callbacks=Listener(), limit_val_batches=2, **QUIET).validate(model, verbose=False)
    assert model.calls == ["start", "end"] * 2
    assert calls == ["callback"] * 2


def test_objects_among_hyperparameters_are_in_the_checkpoint(tmp_path: Path) -> None:
    import lightning as L

    model = make_model()(Scale(), lambda: None)
    trainer = L.Trainer(max_steps=1, limit_val_batches=0, enable_checkpointing=False, **QUIET)
    trainer.fit(model)
    trainer.save_checkpoint("last.ckpt")
    with pytest.raises(ConfigError, match=r"function was (.|\n)*function=\.\.\."):  # it cannot be pickled
        type(model).load_from_checkpoint("last.ckpt", weights_only=False)
    again = type(model).load_from_checkpoint("last.ckpt", weights_only=False, function=None)
    assert again.hparams.scale.factor == Scale.factor
    content = torch.load("last.ckpt", weights_only=False)
    assert content["factor_seen"] == Scale.factor
    assert set(content["hyper_parameters"]) == {"scale", "_instantiator"}  # the latter ends other readers
    with pytest.raises(ConfigError, match=r"scale was (.|\n)*weights_only=False"):
        type(model).load_from_checkpoint("last.ckpt", weights_only=True, function=None)


class Mode(StrEnum):
    FAST = "fast"


def test_objects_among_hyperparameters_come_back_to_every_reader(tmp_path: Path) -> None:
    import lightning as L

    model_class = make_model()
    trainer = L.Trainer(fast_dev_run=True, **QUIET)
    given = {"deep": [Scale(), Mode.FAST], "path": Path("a/b"), "class": nn.ReLU}
    trainer.fit(model_class(Scale(), given))
    trainer.save_checkpoint(path := tmp_path / "one.ckpt")

    read = torch.load(path, weights_only=False)["hyper_parameters"]["function"]
    assert (type(read["deep"][0]), read["deep"][1].name, read["class"]) == (Scale, "FAST", nn.ReLU)
    model = model_class.load_from_checkpoint(path, weights_only=False)
    assert model.hparams.function["path"] == Path("a/b")
    with pytest.raises(ConfigError, match=r"scale was .*Scale.*function was .*Scale"):
        model_class.load_from_checkpoint(path)


def test_a_writer_of_predictions_asks_its_interval() -> None:
    from lightning.pytorch.callbacks import BasePredictionWriter

    writer = BasePredictionWriter("epoch")
    assert writer.interval.on_epoch
    assert not writer.interval.on_batch
    assert writer.interval == "epoch"


def make_cli(arguments: list[str], **others: Any) -> Any:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

    class CLI(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.SGD)
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)
            parser.set_defaults({"optimizer.lr": 0.25, "lr_scheduler.gamma": 0.5})
            parser.add_argument("--width", type=int, default=4)
            parser.link_arguments("width", "model.out_dim")

        @staticmethod
        def configure_optimizers(lightning_module: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
            return [optimizer], [{"scheduler": lr_scheduler, "interval": "step"}]

    options = [f"--trainer.{name}={value}" for name, value in QUIET.items()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "configure_optimizers of DemoModel is replaced")
        return CLI(DemoModel, BoringDataModule, args=[*arguments, *options], **others)


def test_the_command_line_makes_the_programs_optimizer() -> None:
    cli = make_cli(["--optimizer.momentum=0.5"], run=False)
    [optimizer], [schedule] = cli.model.configure_optimizers()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.25, 0.5)
    assert (schedule["scheduler"].gamma, schedule["interval"]) == (0.5, "step")
    assert cli.model.l1.out_features == 4


def test_optimizers_under_keys_of_their_own_are_arguments_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.cli import LightningCLI, instantiate_class
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Two(BoringModel):
        def __init__(self, first: dict[str, Any], second: dict[str, Any] | None = None) -> None:
            super().__init__()
            self.first, self.second = first, second

    class CLI(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.Adam, nested_key="one", link_to="model.first")
            parser.add_optimizer_args((torch.optim.SGD, torch.optim.Adam), nested_key="two", link_to="model.second")

    options = [f"--trainer.{name}={value}" for name, value in QUIET.items()]
    model = CLI(Two, run=False, args=["--one.lr=0.25", "--two=SGD", "--two.lr=0.5", *options]).model
    assert model.first["class_path"] == "torch.optim.adam.Adam"
    assert (model.first["init_args"]["lr"], model.first["init_args"]["eps"]) == (0.25, 1e-8)
    optimizer = instantiate_class(model.parameters(), model.second)
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.SGD, 0.5)
    assert CLI(Two, run=False, args=options).model.second is None
    with pytest.raises(SystemExit):
        CLI(Two, run=False, args=["--one.rate=0.25", *options])
    assert "rate" in capsys.readouterr().err


def test_files_variables_and_dicts_are_settings_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import DemoModel

    (tmp_path / "default.yaml").write_text("trainer: {max_epochs: 5}\nmodel: {out_dim: 8, learning_rate: 0.5}\n")
    monkeypatch.setenv("PL_MODEL__OUT_DIM", "6")
    read = {"default_config_files": ["*.yaml"], "default_env": True}
    settings = {"model": {"learning_rate": 0.25}, "trainer": QUIET}
    cli = LightningCLI(DemoModel, run=False, args=settings, parser_kwargs=read)
    assert (cli.trainer.max_epochs, cli.model.l1.out_features, cli.model.learning_rate) == (5, 6, 0.25)
    assert cli.config_init.model is cli.model


def test_the_steps_of_a_command_line_can_be_overridden() -> None:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
    from lightning.pytorch.demos.boring_classes import DemoModel

    steps = []

    class Parser(LightningArgumentParser):
        pass

    class CLI(LightningCLI):
        def init_parser(self, **kwargs: Any) -> Any:
            steps.append("init_parser")
            return super().init_parser(**kwargs)

        def add_default_arguments_to_parser(self, parser: Any) -> None:
            steps.append(type(parser).__name__)
            parser.add_argument("--depth", type=int, default=1)
            parser.add_subclass_arguments(nn.Module, "extra")

        def instantiate_classes(self) -> None:
            steps.append("instantiate_classes")
            super().instantiate_classes()

    options = [f"--trainer.{name}={value}" for name, value in QUIET.items()]
    cli = CLI(DemoModel, run=False, parser_class=Parser, args=["--depth=4", "--extra=torch.nn.ReLU", *options])
    assert steps == ["init_parser", "Parser", "instantiate_classes"]
    assert cli.config.depth == 4
    assert isinstance(cli.config_init.extra, nn.ReLU)


def test_what_several_loaders_a_saved_step_and_toggles_give() -> None:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        automatic_optimization = True

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"own_{dataloader_idx}", 1.0, add_dataloader_idx=False)
            self.log("each", 1.0)

        def on_test_epoch_end(self) -> None:
            self.log("whole", 2.0)

    saving = ModelCheckpoint(dirpath="steps", monitor="step", mode="max", every_n_train_steps=2, save_top_k=2)
    options: dict[str, Any] = {"limit_train_batches": 6, "limit_val_batches": 3, "limit_test_batches": 1}
    trainer = L.Trainer(max_epochs=1, callbacks=[saving], **options, **QUIET)
    model = Model()
    trainer.fit(model)
    assert sorted(path.name for path in Path("steps").iterdir()) == ["epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt"]
    loader = trainer.train_dataloader
    first, second = trainer.test(model, [loader, loader], verbose=False)
    assert set(first) == {"own_0", "each/dataloader_idx_0", "whole"}
    assert set(second) == {"own_1", "each/dataloader_idx_1", "whole"}
    assert (trainer.num_sanity_val_batches, trainer.num_val_batches, trainer.num_test_batches) == ([2], [3], [1, 1])
    model.automatic_optimization = False
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    model.toggle_optimizer(other)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.untoggle_optimizer(other)
    assert all(parameter.requires_grad for parameter in model.parameters())


def _grid(depth: int = 3, name: str = "x") -> None:
    raise AssertionError("it is not called")


def test_a_command_line_may_have_verbs_of_its_own_and_read_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    import lightning as L
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

    calls: list[Any] = []

    class Trainer(L.Trainer):
        def measure(self, model: Any, datamodule: Any, folds: int = 1, repeats: int = 2) -> None:
            """Measure something."""
            calls.append((type(model), type(datamodule), repeats))

    class CLI(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            own = LightningCLI.subcommands()
            del own["predict"]
            return {**own, "measure": {"model", "datamodule", "folds"}}

        def setup_parser(self, add_subcommands: bool, main_kwargs: Any, subparser_kwargs: Any) -> None:
            calls.append((add_subcommands, main_kwargs, subparser_kwargs))
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)

        def parse_arguments(self, parser: Any, args: Any) -> None:
            super().parse_arguments(parser, [one for one in args if one != "--strange"])
            calls.append(self.config[self.config.subcommand].trainer.max_epochs)  # it follows from another

        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_function_arguments(_grid, "grid")
            parser.link_arguments("grid.depth", "trainer.max_epochs")

        def before_measure(self) -> None:
            calls.append(self.config.measure.grid.depth)

        def after_measure(self) -> None:
            calls.append(self.config_init.measure.grid.name)

        def test(self, **arguments: Any) -> None:
            calls.append(sorted(arguments))

    def run(*args: str) -> list[Any]:
        calls.clear()
        kwargs = {"description": "mine", "fit": {"env_prefix": "X"}}
        CLI(BoringModel, BoringDataModule, trainer_class=Trainer, trainer_defaults={**QUIET, "accelerator": "cpu"},
            parser_kwargs=kwargs, args=list(args))  # fmt: skip
        assert calls.pop(0) == (True, {"description": "mine"}, {"fit": {"env_prefix": "X"}})
        return calls

    assert run("measure", "--strange", "--repeats", "5", "--grid.depth=4") == [
        4, 4, (BoringModel, BoringDataModule, 5), "x",
    ]  # fmt: skip
    assert run("test") == [3, ["ckpt_path", "datamodule", "model", "verbose", "weights_only"]]
    for wrong in (["predict"], ["measure", "--folds", "2"]):
        with pytest.raises(SystemExit):
            run(*wrong)
    assert "predict" in capsys.readouterr().err


def test_parts_that_override_lightnings_methods_are_reported() -> None:
    import lightning as L
    from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

    class Mine(SingleDeviceStrategy):
        def __init__(self, device: str = "cpu", depth: int = 0) -> None:
            super().__init__(device=device)
            self.depth = depth

        def setup_optimizers(self, trainer: Any) -> None:
            """Lightning calls it."""

    class Connect(Precision):
        def connect(self, *args: Any, **kwargs: Any) -> None:
            """Lightning calls it."""

    class Card(CPUAccelerator):
        @classmethod
        def register_accelerators(cls, registry: Any) -> None:
            registry.register("card", cls, description="a card")

        def setup(self, trainer: Any) -> None:
            self.trainer = trainer

    StrategyRegistry.register("mine", Mine, description="of a program", depth=3)
    Card.register_accelerators(AcceleratorRegistry)
    try:
        assert StrategyRegistry.get("mine").depth == 3
        assert StrategyRegistry["mine"] == {
            "description": "of a program", "init_params": {"depth": 3}, "strategy": Mine,
        }  # fmt: skip
        with pytest.warns(UserWarning, match="Mine overrides setup_optimizers of Lightning's strategy"):
            trainer = L.Trainer(strategy="mine", **{**QUIET, "accelerator": "card"})
        assert isinstance(trainer.strategy, Mine)
        assert type(trainer.strategy) is Mine
        assert type(trainer.accelerator) is Card
        trainer.validate(make_model()())
        assert trainer.accelerator.trainer is trainer
        with pytest.warns(UserWarning, match="Connect overrides connect of Lightning's precision"):
            L.Trainer(plugins=Connect(), **QUIET)
    finally:
        StrategyRegistry.remove("mine")
        AcceleratorRegistry.remove("card")


def test_what_programs_read_after_a_fit(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    import lightning as L
    from lightning.pytorch.trainer.states import TrainerFn

    stages = []

    class Model(make_model()):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            stages.append(stage)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.step(batch)
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        caplog.set_level(logging.INFO, "loopwright")
        options = {**QUIET, "limit_val_batches": 0, "enable_checkpointing": False, "log_every_n_steps": 1}
        trainer = L.Trainer(max_epochs=2, limit_train_batches=3, accumulate_grad_batches=2, **options)
        trainer.fit(Model())
        assert not caplog.records
    finally:
        logging.getLogger("lightning.pytorch").setLevel(logging.NOTSET)
        logging.getLogger("loopwright").setLevel(logging.NOTSET)
    assert stages[0] is TrainerFn.FITTING
    assert trainer.estimated_stepping_batches == trainer.global_step == 4
    assert sorted(trainer.progress_bar_metrics) == ["loss_epoch", "loss_step"]
    assert "epoch" not in trainer.logged_metrics


def test_printed_settings_have_lightnings_form_and_are_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_cli(["fit", "--width=6", "--print_config"])
    printed = capsys.readouterr().out
    settings = parse(printed, "printed")
    assert settings["optimizer"]["lr"] == 0.25
    assert "out_dim" not in settings["model"]  # it follows from width
    assert not set(settings["trainer"]) & {"sanity_checks", "timeline", "memory_format"}
    (tmp_path / "printed.yaml").write_text(printed)
    ended = make_cli(["fit", "--config", "printed.yaml", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"])
    assert ended.model.l1.out_features == 6


def test_a_callback_of_the_program_gets_the_configuration() -> None:
    from lightning.pytorch.cli import SaveConfigCallback

    seen = []

    class Save(SaveConfigCallback):
        def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen.append((str(stage), self.config.optimizer.lr, parse(self.parser.dump(self.config), "dump")["width"]))

    short = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.enable_checkpointing=false"]
    cli = make_cli(["fit", *short], save_config_callback=Save, save_config_kwargs={"config_filename": "mine.yaml"})
    assert seen == [("fit", 0.25, 4)]
    assert cli.config.fit.width == cli._get(cli.config, "width") == 4


def test_loops_count_as_lightnings_do_and_counts_cannot_be_assigned() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    seen: list[list[int]] = []

    class See(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            loop = trainer.fit_loop.epoch_loop
            current, total = loop.batch_progress.current, loop.batch_progress.total
            seen.append([trainer.fit_loop.total_batch_idx, loop.batch_idx, current.ready, current.processed,
                         current.completed, total.ready, loop.batch_progress.is_last_batch,
                         loop._batches_that_stepped])  # fmt: skip

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            epochs = trainer.fit_loop.epoch_progress.current
            seen.append([epochs.ready, epochs.processed, epochs.completed])

    limits = {"limit_train_batches": 3, "limit_val_batches": 1, "accumulate_grad_batches": 2}
    trainer = L.Trainer(max_epochs=2, callbacks=[See()], enable_checkpointing=False, **limits, **QUIET)
    assert (trainer.fit_loop.total_batch_idx, trainer.fit_loop.epoch_loop.batch_progress.current.ready) == (-1, 0)
    trainer.fit(BoringModel())
    # printed by the same program on Lightning 2.6.6
    assert seen == [
        [0, 0, 1, 1, 0, 1, False, 0], [1, 1, 2, 2, 1, 2, False, 0], [2, 2, 3, 3, 2, 3, True, 1], [1, 1, 0],
        [3, 0, 1, 1, 0, 4, False, 2], [4, 1, 2, 2, 1, 5, False, 2], [5, 2, 3, 3, 2, 6, True, 3], [2, 2, 1],
    ]  # fmt: skip
    loop = trainer.fit_loop.epoch_loop
    assert (loop.batch_progress.current.completed, loop.total_batch_idx) == (3, 5)
    assert loop.automatic_optimization.optim_progress.optimizer_steps == 4
    with pytest.raises(NotServed, match="ckpt_path"):
        trainer.fit_loop.epoch_progress.current.completed = 5
    loop._batches_that_stepped = 7  # has no effect


def test_batches_of_evaluations_are_counted() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    seen: list[list[Any]] = []

    class Seeing(BoringModel):
        def see(self) -> None:
            is_fit = self.trainer.state.fn == "fit"
            loop = self.trainer.fit_loop.epoch_loop.val_loop if is_fit else self.trainer.validate_loop
            count = loop.batch_progress.total
            seen.append(
                [count.ready, count.started, count.processed, count.completed, loop.batch_progress.is_last_batch]
            )

        def on_validation_start(self) -> None:
            self.see()

        def on_validation_batch_start(self, *_: Any) -> None:
            self.see()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.see()
            return super().validation_step(batch, batch_idx)

        def on_validation_batch_end(self, *_: Any) -> None:
            self.see()

        def on_validation_end(self) -> None:
            self.see()

    limits = {"limit_train_batches": 1, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    trainer = L.Trainer(max_epochs=2, enable_checkpointing=False, **limits, **QUIET)
    trainer.fit(Seeing())
    # printed by the same program on Lightning 2.6.6
    epoch = [
        [0, 0, 0, 0, False], [1, 0, 0, 0, False], [1, 1, 0, 0, False], [1, 1, 1, 0, False], [2, 1, 1, 1, True],
        [2, 2, 1, 1, True], [2, 2, 2, 1, True], [2, 2, 2, 2, True],
    ]  # fmt: skip
    assert seen == [*epoch, *epoch]
    assert trainer.validate_loop.batch_progress.total.ready == 0
    trainer.validate(Seeing(), verbose=False)
    assert seen == [*epoch, *epoch, *epoch]
    assert trainer.validate_loop.batch_progress.current.completed == 2
    assert trainer.test_loop.batch_progress.current.completed == 0
    assert trainer.test_loop.inference_mode
    assert not L.Trainer(inference_mode=False, logger=False).test_loop.inference_mode


def test_the_stage_of_a_verb_is_known_in_its_setup() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    seen = []

    class See(L.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            flags = (trainer.training, trainer.validating, trainer.testing, trainer.predicting)
            seen.append([trainer.state.stage.name, *flags])

    trainer = L.Trainer(fast_dev_run=True, callbacks=[See()], **QUIET)
    model = BoringModel()
    for verb in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        verb(model)
    assert seen == [
        ["TRAINING", True, False, False, False],
        ["VALIDATING", False, True, False, False],
        ["TESTING", False, False, True, False],
        ["PREDICTING", False, False, False, True],
    ]


def test_tensors_of_a_file_that_is_not_read_yet_go_where_tensors_go(tmp_path: Path) -> None:
    from lightning.fabric.utilities.load import _lazy_load

    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save({"state_dict": source.state_dict(), "n": 1}, tmp_path / "a.pt")
    found: Any = _lazy_load(tmp_path / "a.pt")
    target.load_state_dict(found["state_dict"])
    assert torch.equal(source.weight, target.weight)
    assert torch.equal(torch.cat([found["state_dict"]["bias"]] * 2), torch.cat([source.bias] * 2))


def test_callbacks_initialise_what_stands_beside_them(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint, Timer

    class Beside:
        def __init__(self) -> None:
            super().__init__()
            self.is_made = True

    made = [
        type("Made", (base, Beside), {})(*arguments)
        for base, arguments in (
            (ModelCheckpoint, ()), (EarlyStopping, ("loss",)), (Timer, ()), (OnExceptionCheckpoint, (str(tmp_path),)),
        )
    ]  # fmt: skip
    assert all(one.is_made for one in made)


def test_a_checkpoint_may_be_a_folder_of_the_program(tmp_path: Path) -> None:
    import shutil

    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Folders(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            Path(filepath).rename(f"{filepath}.file")
            Path(filepath).mkdir()
            Path(f"{filepath}.file").rename(Path(filepath, "weights.ckpt"))

        def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
            removed.append(Path(filepath).name)
            shutil.rmtree(filepath)

    removed: list[str] = []
    saving = Folders(str(tmp_path), filename="{epoch}", save_last=True)
    L.Trainer(max_epochs=3, limit_train_batches=1, limit_val_batches=0, callbacks=[saving], **QUIET).fit(BoringModel())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=2.ckpt", "last.ckpt"]
    assert Path(saving.best_model_path, "weights.ckpt").is_file()
    assert {"epoch=0.ckpt", "epoch=1.ckpt"} <= set(removed)
    assert saving._monitor_candidates(L.Trainer(**QUIET))["step"] == 0


def test_parts_of_fabric_get_what_lightning_gives_them() -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import Precision
    from lightning.fabric.strategies import SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer, _unwrap_objects

    seen: list[object] = []

    class Steps(SingleDeviceStrategy):
        def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
            seen.append(sorted(kwargs))
            return super().optimizer_step(optimizer, **kwargs)

    class Doubles(Precision):
        def convert_input(self, data: Any) -> Any:
            arguments, keywords = data
            return tuple(2 * item for item in arguments), keywords

    fabric = Fabric(strategy=Steps(device=torch.device("cpu")), plugins=[Doubles()])
    own = nn.Linear(2, 1, bias=False)
    model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    assert model(torch.ones(1, 2)).item() == pytest.approx(2 * own.weight.sum().item())
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert seen == [["closure"]]
    assert isinstance(model, _FabricModule)
    assert isinstance(optimizer, _FabricOptimizer)
    assert _unwrap_objects({"model": model})["model"] is own


def test_parts_of_arguments_and_loops_of_the_program() -> None:
    import lightning as L
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    parts = _AcceleratorConnector(accelerator="cpu", devices=2)
    assert (parts._accelerator_flag, parts._devices_flag, len(parts._parallel_devices)) == ("cpu", 2, 2)
    assert type(parts.strategy).__name__ == "DDPStrategy"

    class Own(_EvaluationLoop):
        def run(self) -> None:
            """Do something else."""

    trainer = L.Trainer(**QUIET)
    assert isinstance(trainer.test_loop, _EvaluationLoop)
    with pytest.raises(NotServed, match=r"Own.*run"):
        trainer.test_loop = Own(trainer, "test")

    class Printing(_EvaluationLoop):
        seen: list[Any] = []

        @staticmethod
        def _print_results(results: Any, stage: str) -> None:
            Printing.seen.append((stage, {key: value.item() for key, value in results[0].items()}))

    trainer.test_loop = Printing(trainer, "test")

    class Model(make_model()):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", 2.0)

    assert trainer.test(Model()) == [{"score": 2.0}]
    assert Printing.seen == [("test", {"score": 2.0})]
    trainer = L.Trainer(**QUIET)
    trainer._model = model = nn.Linear(1, 1)
    assert trainer.lightning_module is model


def test_a_logger_may_be_one_of_fabric_too() -> None:
    from lightning.fabric.loggers import Logger as FabricLogger
    from lightning.pytorch.loggers import CSVLogger, Logger

    class OfFabric(FabricLogger):
        pass

    class OfBoth(Logger, OfFabric):
        pass

    assert issubclass(OfBoth, FabricLogger)
    assert issubclass(CSVLogger, Logger)
    assert not issubclass(dict, Logger)
    assert not issubclass(CSVLogger, OfBoth)


def test_helpers_of_loggers(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from lightning.fabric.utilities.logger import (
        _add_prefix,
        _convert_json_serializable,
        _convert_params,
        _flatten_dict,
        _sanitize_callable_params,
        _sanitize_params,
    )
    from lightning.pytorch.loggers.utilities import _scan_checkpoints

    assert _convert_params(None) == {}
    assert _convert_params(Namespace(a=1)) == {"a": 1}
    assert _flatten_dict({"a": {"b": 1}, "l": [{"c": 2}], "n": [1]}) == {"a/b": 1, "l/0/c": 2, "n": [1]}
    assert _sanitize_params({"a": [1], "b": 1.5}) == {"a": "[1]", "b": 1.5}
    assert _sanitize_callable_params({"f": lambda: 3, "g": len, "h": int}) == {"f": 3, "g": "len", "h": "int"}
    assert _add_prefix({"a": 1}, "p", "-") == {"p-a": 1}
    assert _convert_json_serializable({"a": 1, "b": {1}.__class__}) == {"a": 1, "b": "<class 'set'>"}
    best = tmp_path / "best.ckpt"
    best.touch()
    saving = SimpleNamespace(
        last_model_path="", best_model_path=str(best), current_score=1, best_model_score=2, best_k_models={}
    )
    assert [found[1:] for found in _scan_checkpoints(saving, {})] == [(str(best), 2, "best")]
    assert _scan_checkpoints(saving, {str(best): best.stat().st_mtime}) == []


def test_a_metric_without_a_value_is_not_logged() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel
    from torchmetrics import Metric

    class Without(Metric):
        def update(self) -> None:
            """Count nothing."""

        def compute(self) -> None:
            """Return nothing."""

    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.metric = Without()

        def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.metric.update()
            self.log("none", self.metric, on_step=False, on_epoch=True)
            self.log("one", 1.0)

    trainer = L.Trainer(limit_test_batches=2, **QUIET)
    assert trainer.test(Model(), verbose=False) == [{"one": 1.0}]


def test_a_module_attached_outside_of_a_run_is_saved_and_resumed_from(tmp_path: Path) -> None:
    import lightning as L

    model = make_model()(Scale())
    trainer = L.Trainer(max_epochs=1, limit_train_batches=2, **QUIET)
    trainer.strategy._lightning_module = model
    trainer.save_checkpoint("first.ckpt")
    saved = torch.load("first.ckpt", weights_only=False)
    assert (saved["epoch"], saved["global_step"], saved["optimizer_states"], saved["factor_seen"]) == (0, 0, [], 3)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    for _ in range(2):  # each time from the first weights
        trainer.fit(model, ckpt_path="first.ckpt", weights_only=False)
        assert (trainer.global_step, trainer.current_epoch) == (2, 1)
    assert any(not torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert trainer._checkpoint_connector.dump_checkpoint()["global_step"] == 2


def test_the_state_of_an_attached_module_can_be_asked_for() -> None:
    import lightning as L

    model = make_model()(Scale())
    trainer = L.Trainer(**QUIET)
    trainer.strategy.connect(model)
    assert trainer.strategy.lightning_module_state_dict().keys() == model.state_dict().keys()
    assert trainer._checkpoint_connector.dump_checkpoint()["global_step"] == 0


def test_logged_metrics_have_what_waits_for_a_log_interval() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("number", float(batch_idx))
            self.log("own", 1.0, logger=False)
            return super().training_step(batch, batch_idx)

    class Listener(L.Callback):
        seen: list[dict[str, float]] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append({name: value.item() for name, value in trainer.logged_metrics.items()})

    listener = Listener()
    L.Trainer(max_steps=3, log_every_n_steps=50, callbacks=listener, limit_val_batches=0, **QUIET).fit(Model())
    assert listener.seen == [{}, {"number": 0.0}, {"number": 1.0}]


@pytest.mark.parametrize("name", ["CSVLogger", "TensorBoardLogger"])
def test_a_logger_whose_version_is_assigned_writes_another_run(name: str, tmp_path: Path) -> None:
    import lightning as L

    logger = getattr(L.pytorch.loggers, name)(str(tmp_path), name="")
    trainer = L.Trainer(max_epochs=1, limit_train_batches=2, log_every_n_steps=1, **{**QUIET, "logger": logger})
    assert logger._version is None
    model = make_model()(Scale())
    for fold in range(2):
        logger._version, logger._experiment = f"fold_{fold}", None
        trainer.fit(model)
        assert Path(trainer.log_dir) == tmp_path / f"fold_{fold}"
        trainer.fit_loop.max_epochs += 1
    assert [sorted(one.name for one in tmp_path.glob(f"fold_{fold}/*"))[0] for fold in range(2)] == ["checkpoints"] * 2
    assert len({len(list(tmp_path.glob(f"fold_{fold}/*"))) for fold in range(2)}) == 1


def test_a_run_that_is_shorter_than_the_profilers_window_is_recorded(tmp_path: Path) -> None:
    import lightning as L
    from lightning.pytorch.profilers import PyTorchProfiler

    profiler = PyTorchProfiler(dirpath=tmp_path, filename="short")
    with pytest.warns(UserWarning, match="not enough steps for its default window"):
        L.Trainer(fast_dev_run=1, profiler=profiler, **QUIET).fit(make_model()())
    names = {event.name for event in profiler.function_events or []}
    assert "[pl][profile][Strategy]SingleDeviceStrategy.validation_step" in names
    assert (tmp_path / "fit-short.txt").read_text()


def test_a_profiler_records_outside_of_a_run() -> None:
    from lightning.pytorch.profilers import PyTorchProfiler

    profiler = PyTorchProfiler(schedule=None)
    with profiler.profile("outer"):
        torch.ones(3)
        with profiler.profile("inner"):
            torch.zeros(3)
    profiler.describe()
    names = {event.name for event in profiler.function_events or []}
    assert {"[pl][profile]outer", "[pl][profile]inner", "aten::zeros"} <= names
    assert not any(name.startswith("ProfilerStep") for name in names)


def test_small_names_mean_what_they_mean_in_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unittest.mock import patch

    from lightning.fabric.utilities.apply_func import apply_to_collection
    from lightning.fabric.utilities.cloud_io import _atomic_save, _load
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
    from lightning.pytorch.utilities.model_summary import get_human_readable_count

    _atomic_save({"a": torch.ones(2)}, tmp_path / "a.pt")
    assert torch.equal(_load(tmp_path / "a.pt")["a"], torch.ones(2))
    assert apply_to_collection([1, "x"], int, lambda number: number + 1) == [2, "x"]
    monkeypatch.setenv("RANK", "3")
    assert _get_rank() == 3
    with patch.object(rank_zero_only, "rank", 1):
        assert rank_zero_only(lambda: 5)() is None
    assert repr(LightningOptimizer(torch.optim.SGD([torch.ones(1)], lr=1.0))).startswith("LightningSGD")
    assert DummyLogger()[0].experiment.anything(1) is None
    module = make_model()()
    assert to_uncompiled(module) is module
    with pytest.raises(ValueError, match="Linear"):
        from_compiled(torch.nn.Linear(1, 1))
    with pytest.raises(AssertionError):
        get_human_readable_count(-1)


def test_errors_have_the_classes_that_programs_catch(tmp_path: Path) -> None:
    import lightning as L
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, LambdaCallback

    for make in (lambda: LambdaCallback(on_nothing=print), lambda: GradientAccumulationScheduler({})):
        with pytest.raises(TypeError):
            make()
    with pytest.raises(TypeError):
        CPUAccelerator.parse_devices([])
    with pytest.raises(RuntimeError, match="nothing"):
        L.Trainer(max_epochs=1, callbacks=[EarlyStopping("nothing")], **QUIET).fit(make_model()())
    fabric = L.Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError):
        fabric.launch(1)
    with pytest.raises(TypeError):
        fabric.save(tmp_path / "a.ckpt", {"a": 1}, filter={"a": 1})
    fabric.save(tmp_path / "a.ckpt", {"a": 1})
    with pytest.raises(KeyError, match="b"):
        fabric.load(tmp_path / "a.ckpt", {"b": 1})


def test_metrics_of_an_evaluation_are_printed_as_lightning_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    import lightning as L

    class Model(make_model()):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", 2.0)

    L.Trainer(**QUIET).test(Model())
    _, head, _, row, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["Test", "metric", "DataLoader", "0"]
    assert row.split() == ["score", "2.0"]


def test_an_evaluation_returns_what_is_logged_for_loggers() -> None:
    import lightning as L

    class Model(make_model()):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", 2.0)
            self.log("shown", 3.0, prog_bar=True, logger=False)

    trainer = L.Trainer(**QUIET)
    assert trainer.validate(Model(), verbose=False) == [{"score": 2.0}]
    assert float(trainer.callback_metrics["shown"]) == 3


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_a_summary_and_a_strategy_say() -> None:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
    from lightning.pytorch.utilities.model_summary import LayerSummary, ModelSummary

    module = torch.nn.Sequential(torch.nn.Linear(2, 3))
    text = str(ModelSummary(module))
    assert text.splitlines()[0].split(" | ") == [" ", "Name", "Type  ", "Params", "Mode ", "FLOPs"]
    assert [line[10:] for line in text.splitlines()[-7:]] == [
        "Trainable params",
        "Non-trainable params",
        "Total params",
        "Total estimated model params size (MB)",
        "Modules in train mode",
        "Modules in eval mode",
        "Total Flops",
    ]
    layer = LayerSummary(module[0])
    assert (layer.layer_type, layer.num_parameters, layer.training, layer.in_size) == ("Linear", 9, True, "?")
    for rows in (4, 5):
        module(torch.zeros(rows, 2))
    assert (layer.in_size, layer.out_size) == ([4, 2], [4, 3])
    assert not module[0]._forward_hooks
    left = LayerSummary(module.eval()[0])
    left.detach_hook()
    assert (left.training, dict(module[0]._forward_hooks)) == (False, {})
    assert LayerSummary(torch.jit.script(module[0])).num_parameters == 9
    L.Trainer(**QUIET)  # completes the strategies
    assert DDPStrategy(find_unused_parameters=True)._ddp_kwargs == {"find_unused_parameters": True}
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"):
        assert FSDPStrategy(sharding_strategy=name).sharding_strategy.name == name
    assert FSDPStrategy(cpu_offload=True).cpu_offload.offload_params
    with pytest.raises(AttributeError, match="sharding_strategy"):
        _ = DDPStrategy().sharding_strategy


def test_a_combined_loader_is_asked_for_its_next_batch() -> None:
    from lightning.fabric.utilities import move_data_to_device
    from lightning.pytorch.utilities import CombinedLoader

    loader = CombinedLoader([range(2), "ab"], "min_size")
    assert (loader._mode, loader._iterator) == ("min_size", None)
    iter(loader)
    assert next(loader) == ([0, "a"], 0, 0)
    assert loader._iterator is not None
    assert move_data_to_device({"x": torch.ones(1)}, "cpu")["x"].device == torch.device("cpu")


def test_the_boring_data_are_those_of_the_verb() -> None:
    from lightning.pytorch.demos.boring_classes import BoringDataModule

    data = BoringDataModule()
    data.setup("fit")
    assert str(data).splitlines()[1:3] == ["{Validation dataloader: size=64}", "{Test dataloader: None}"]
    assert torch.equal(data.val_dataloader().dataset[0], data.random_full[64])


def make_fetching() -> Any:
    import lightning as L

    class Fetching(L.LightningModule):
        fetched = 1

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.seen: list[tuple[str, int]] = []

        def _fetch(self, kind: str, dataloader_iter: Iterator[Any]) -> torch.Tensor:
            for _ in range(self.fetched):
                batch, batch_idx, _ = next(dataloader_iter)
            self.seen.append((kind, batch_idx))
            loss: torch.Tensor = self.layer(batch).sum()
            return loss

        def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:
            return self._fetch("train", dataloader_iter)

        def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
            self._fetch("val", dataloader_iter)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Fetching()


def test_steps_may_fetch_their_batch() -> None:
    import lightning as L

    module, data = make_fetching(), [torch.ones(1, 2)] * 2
    trainer = L.Trainer(max_epochs=1, num_sanity_val_steps=0, enable_checkpointing=False, **QUIET)
    trainer.fit(module, data, data)
    assert module.seen == [("train", 0), ("train", 1), ("val", 0), ("val", 1)]
    assert trainer.global_step == 2
    assert "training_step" not in vars(module)
    module.fetched = 2
    with pytest.raises(ModuleError, match=r"one next\(dataloader_iter\) in validation_step"):
        trainer.validate(module, data)
    trainer = L.Trainer(enable_checkpointing=False, **QUIET)
    module.fetched = 1
    trainer.validate(module, data, verbose=False)
    assert trainer.num_sanity_val_batches == []
