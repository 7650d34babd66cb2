"""Programs may give the objects that they hold and subclass attributes under any name; ours begin with `_lw_`."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.compat.lightning import install, uninstall
from loopwright.compat.lightning.cli.argument_parser import LightningArgumentParser
from loopwright.compat.lightning.cli.lightning_cli import LightningCLI, SaveConfigCallback
from loopwright.lazy import home_of, is_core

# What programs call their attributes, and what Loopwright called its own or may come to call them.
PLAUSIBLE = [
    "batches", "cache", "config", "counts", "data", "dataset", "epoch_", "finish", "history", "hooks", "inner",
    "latest", "loader", "loaders", "losses", "metrics_", "module", "names", "net", "output", "place", "plan", "pool",
    "results", "run", "saving", "scheduler", "session", "start", "stats", "step", "store", "stream", "table", "toggles",
    "window", "world",
]  # fmt: skip
# Names of Lightning's own modules, which mean the same in this layer.
LIGHTNING = {
    "_trainer", "_fabric", "_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams", "_strict_loading",
    "_fabric_optimizers", "_compiler_ctx", "_current_fx_name", "_set_hparams", "_apply_batch_transfer_handler",
}  # fmt: skip
# Names that Lightning's classes have, too, with the same meaning: programs for Lightning read or override them there.
SHARED = {
    "callbacks": {
        "_apply_mapping_to_param_groups", "_attr_name", "_avg_fn", "_check_on_train_epoch_end", "_console_kwargs",
        "_cpu_stats", "_current_eval_dataloader_idx", "_enable_version_counter", "_evaluate_stopping_criteria",
        "_every_n_epochs", "_every_n_train_steps", "_generate_state_key", "_internal_optimizer_metadata", "_interval",
        "_leave", "_max_depth", "_max_epochs", "_parameters_to_prune", "_process_position", "_refresh_rate",
        "_remove_checkpoint", "_restarting", "_run_early_stopping_check", "_save_checkpoint",
        "_save_on_train_epoch_end", "_should_skip_check", "_store", "_summarize_kwargs", "_summary",
        "_train_time_interval", "_trainer", "_update_attr", "_verbose",
    },
    "loggers": {
        "_artifact_location", "_checkpoint_callback", "_checkpoint_name", "_default_hp_metric", "_experiment",
        "_experiment_id", "_experiment_name", "_log_graph", "_log_model", "_prefix", "_project", "_run_name",
        "_save_dir", "_sub_dir",
    },
    "profilers": {"_local_rank", "_stage"},
    "strategies": {"_accelerator", "_checkpoint_io"},
    "compat": {
        "_add_arguments", "_add_configure_optimizers_method_to_model", "_add_instantiators", "_datamodule_class",
        "_get", "_instantiate_trainer", "_lr_schedulers", "_model_class", "_optimizers", "_parse_ckpt_path", "_parser",
        "_prepare_subcommand_kwargs", "_prepare_subcommand_parser", "_run_subcommand", "_set_seed",
        "_setup_parser_kwargs", "_subcommand_method_arguments", "_subcommand_parsers",
    },
}  # fmt: skip
# Of torch's modules, and of Python.
TORCH = {*dir(torch.nn.Module), *vars(torch.nn.Module()), "_abc_impl"}


def shared_names(cls: type) -> set[str]:
    return set[str]().union(*(SHARED.get(home_of(base).split(".")[1], ()) for base in cls.__mro__ if is_core(base)))


@cache
def own_private_names(cls: type) -> frozenset[str]:
    """Return the private names that the source of one class gives attributes and methods."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found = {node.name for node in body.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.update([node.attr] * (isinstance(node.value, ast.Name) and node.value.id == "self"))
    for statement in body.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        found.update(one.id for one in targets if isinstance(one, ast.Name))
    return frozenset(name for name in found if name.startswith("_") and not name.startswith("__"))


def private_names(cls: type) -> set[str]:
    """Return the private names of the attributes and methods of our classes among the bases of a class."""
    return set[str]().union(*(own_private_names(base) for base in cls.__mro__ if is_core(base)))


def served_classes() -> list[type]:
    """Return the classes whose objects programs hold, and which they subclass."""
    rooms = ("callbacks", "loggers", "profilers", "strategies", "cli")
    found: set[object] = {lw.Trainer, lw.Module, lw.DataModule, LightningCLI, LightningArgumentParser}
    for room in map(importlib.import_module, (f"loopwright.{room}" for room in rooms)):
        found.update(getattr(room, name) for name in room.__all__)
    classes = {one for one in found if isinstance(one, type) and is_core(one)}
    return sorted({*classes, SaveConfigCallback}, key=lambda cls: (home_of(cls), cls.__name__))


@pytest.mark.parametrize("cls", served_classes(), ids=lambda cls: cls.__name__)
def test_private_names_have_a_prefix_that_no_program_uses(cls: type) -> None:
    own = private_names(cls) - TORCH - shared_names(cls)
    assert sorted(name for name in own if not name.startswith("_lw_")) == []


def test_names_shared_with_lightning_are_in_use() -> None:
    used = set[str]().union(*map(private_names, served_classes()))
    assert sorted(set[str]().union(*SHARED.values()) - used) == []


class Value:
    """A value that can be kept and copied, and nothing else."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("called a value of the program")

    def __bool__(self) -> bool:
        raise AssertionError("read a value of the program")


@cache
def names_for(cls: type) -> list[str]:
    """Return the names that a program gives attributes on an object of a class: none that its users know."""
    earlier = {f"_{name.removeprefix('_lw_')}" for name in private_names(cls)}
    known = TORCH | LIGHTNING | shared_names(cls)
    wanted = {*(f"_{name}" for name in PLAUSIBLE), *earlier}
    if cls in (lw.Trainer, lw.Module, lw.DataModule, lw.Callback):
        wanted.update(PLAUSIBLE)
    return sorted(name for name in wanted if not hasattr(cls, name) and name not in known)


# The parts of a run that a program may subclass, and their arguments.
CALLBACKS: dict[type[lw.Callback], dict[str, Any]] = {
    lw.DeviceStatsMonitor: {"cpu_stats": False},
    lw.EarlyStopping: {"monitor": "val_loss", "patience": 5},
    lw.EMA: {"decay": 0.5},
    lw.GradientAccumulationScheduler: {"scheduling": {0: 1, 1: 2}},
    lw.LearningRateMonitor: {},
    lw.ModelPruning: {"pruning_fn": "l1_unstructured", "amount": 0.3, "parameter_names": ["weight"]},
    lw.ModelSummary: {},
    lw.OnExceptionCheckpoint: {"dirpath": "."},
    lw.SpikeDetection: {},
    lw.Timer: {"duration": {"hours": 1}},
    lw.TQDMProgressBar: {},
    lw.TrainingEfficiency: {},
    lw.WeightStatistics: {},
}
LOGGERS = (lw.CSVLogger, lw.JSONLinesLogger, lw.TensorBoardLogger)


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.save_hyperparameters()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(lw.DataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(18.0).reshape(6, 3) / 18), batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def outcome(folder: Path, library: Any, *, named: bool) -> dict[str, Any]:
    """Run each verb, save and resume; with attributes under every name on each object, if so."""

    def mark(thing: Any, base: type) -> Any:
        for name in names_for(base) if named else []:
            setattr(thing, name, Value())
        return thing

    def subclass(base: type, *others: type) -> Any:
        """Return a subclass that has every name itself, and sets each before and after the base's constructor."""

        def __init__(self: Any, *arguments: Any, **options: Any) -> None:
            if not issubclass(base, torch.nn.Module):  # modules take no attribute before
                mark(self, base)
            super(made, self).__init__(*arguments, **options)
            mark(self, base)

        made = type(base)(base.__name__, (*others, base), {"__init__": __init__, "__module__": __name__})
        return mark(made, base)

    trainer_class, model_class = subclass(library.Trainer), subclass(library.Module, Net)
    data = subclass(library.DataModule, Data)()

    def trainer(**options: Any) -> Any:
        callbacks = {lw.Callback: {}, **CALLBACKS, lw.ModelCheckpoint: {"dirpath": folder, "save_last": True}}
        return trainer_class(
            accelerator="cpu", log_every_n_steps=1,
            callbacks=[subclass(cls)(**arguments) for cls, arguments in callbacks.items()],
            logger=[subclass(cls)(folder / cls.__name__) for cls in LOGGERS],
            profiler=subclass(lw.SimpleProfiler)(dirpath=folder, filename="profile"),
            strategy=subclass(lw.SingleDeviceStrategy)("cpu"), **options,
        )  # fmt: skip

    torch.manual_seed(0)
    model = model_class()
    first = trainer(max_epochs=2)
    first.fit(model, datamodule=data)
    found = {verb: getattr(first, verb)(model, datamodule=data) for verb in ("validate", "test")}
    found["predict"] = torch.cat(first.predict(model, datamodule=data)).tolist()
    second, again = trainer(max_epochs=3), model_class()
    second.fit(again, datamodule=data, ckpt_path=folder / "last.ckpt")
    loaded = model_class.load_from_checkpoint(folder / "last.ckpt")
    weights = [[value.tolist() for value in one.parameters()] for one in (model, again, loaded)]
    return {**found, "weights": weights, "metrics": second.callback_metrics, "steps": second.global_step}


class _Lightning:
    def __init__(self) -> None:
        import lightning.pytorch as pl

        self.Trainer, self.Module, self.DataModule = pl.Trainer, pl.LightningModule, pl.LightningDataModule


@pytest.fixture(params=["plain", "compat", "parity"])
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "plain":
        yield lw
        return
    install(children=False, parity=request.param == "parity")
    try:
        yield _Lightning()
    finally:
        uninstall()


def test_a_program_may_use_every_name(library: Any, tmp_path: Path) -> None:
    without = outcome(tmp_path / "without", library, named=False)
    assert outcome(tmp_path / "with", library, named=True) == without


def test_a_program_cannot_replace_the_counts_of_a_run() -> None:
    trainer = lw.Trainer(logger=False)
    with pytest.raises(lw.ConfigError, match=r"Expected trainer\.progress to be the counts of the run, got 'bar'"):
        trainer.progress = "bar"  # type: ignore[assignment]
    assert trainer.progress.steps == 0

    class Own(lw.Trainer):
        progress = "bar"  # type: ignore[assignment]

    with pytest.raises(lw.ConfigError, match=r"Expected trainer\.progress to be the counts"):
        Own(logger=False)
