"""What libraries built on Lightning do, in small: found with the programs in tests/compat, which run the libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.cli.yaml_file import parse
from loopwright.compat import lightning as compat
from loopwright.compat.lightning.absent import NotServed
from loopwright.errors import CheckpointError

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    compat.install(children=False)
    yield
    compat.uninstall()


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
    again = type(model).load_from_checkpoint("last.ckpt", weights_only=False)
    assert again.hparams.scale.factor == Scale.factor
    assert again.hparams.function is None  # it cannot be pickled
    assert torch.load("last.ckpt", weights_only=True)["factor_seen"] == Scale.factor
    untrusting = type(model).load_from_checkpoint("last.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match="weights_only=False"):
        _ = untrusting.hparams.scale.factor


def test_a_writer_of_predictions_asks_its_interval() -> None:
    from lightning.pytorch.callbacks import BasePredictionWriter

    writer = BasePredictionWriter("epoch")
    assert writer.interval.on_epoch
    assert not writer.interval.on_batch
    assert writer.interval == "epoch"


def make_cli(arguments: list[str], *, keyword: str = "optimizer", **others: Any) -> Any:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

    class CLI(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.SGD, nested_key=keyword)
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)
            parser.set_defaults({"optimizer.lr": 0.25, "lr_scheduler.gamma": 0.5})
            parser.add_argument("--width", type=int, default=4)
            parser.link_arguments("width", "model.out_dim")

        @staticmethod
        def configure_optimizers(lightning_module: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
            return [optimizer], [{"scheduler": lr_scheduler, "interval": "step"}]

    options = [f"--trainer.{name}={value}" for name, value in QUIET.items()]
    return CLI(DemoModel, BoringDataModule, args=[*arguments, *options], **others)


def test_the_command_line_makes_the_programs_optimizer() -> None:
    cli = make_cli(["--optimizer.momentum=0.5"], run=False)
    [optimizer], [schedule] = cli.model.configure_optimizers()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.25, 0.5)
    assert (schedule["scheduler"].gamma, schedule["interval"]) == (0.5, "step")
    assert cli.model.l1.out_features == 4


def test_another_place_for_an_optimizer_is_refused() -> None:
    with pytest.raises(NotServed, match="OptimizerCallable"):
        make_cli([], keyword="second", run=False)


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
    assert make_cli(["--config", "printed.yaml"], run=False).model.l1.out_features == 6


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
