"""Small programs with a LightningCLI; prints what each gives, as JSON."""

import contextlib
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerCallable,
    OptimizerCallable,
    SaveConfigCallback,
)
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch import nn

QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=1",
    "--trainer.limit_val_batches=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]
SILENT = [*QUIET, "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
CASES = []


def case(function):
    CASES.append(function)
    return function


class Encoder(nn.Module):
    def __init__(self, width: int = 2, act: nn.Module | None = None, **others):
        super().__init__()
        self.width, self.others = width, others


class Model(BoringModel):
    def __init__(
        self,
        lr: float = 0.1,
        encoder: Encoder = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        schedule: LRSchedulerCallable | None = None,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.encoder, self.optimizer, self.schedule = lr, encoder, optimizer, schedule


class Linked(BoringModel):
    def __init__(self, first: dict, second: dict | None = None):
        super().__init__()
        self.made = (first, second)


class Untyped(BoringModel):
    def __init__(self, a, b=2, *, c):
        super().__init__()
        self.got = (a, b, c)


class Logging(BoringModel):
    def training_step(self, batch, batch_idx):
        found = super().training_step(batch, batch_idx)
        self.log("x", found["loss"])
        return found


class Data(BoringDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.num_classes = 7


def names(trainer):
    return [type(one).__name__ for one in trainer.callbacks]


def printed(run):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run()
    return out.getvalue().splitlines()[0], yaml.safe_load(out.getvalue())


@case
def arguments_that_are_passed_on():
    Path("c.yaml").write_text("model: {encoder: {class_path: Encoder, init_args: {width: 4}, dict_kwargs: {q: 1}}}\n")
    by_file = LightningCLI(Model, run=False, args=["--config=c.yaml"]).model.encoder
    line = ["--model.encoder=Encoder", "--model.encoder.width=5", "--model.encoder.dict_kwargs.z=t"]
    cli = LightningCLI(Model, run=False, args=line)
    return by_file.width, by_file.others, cli.model.encoder.others, cli.config.model.encoder.as_dict()


@case
def settings_in_place_of_files():
    Path("m.yaml").write_text("lr: 0.25\n")
    one = LightningCLI(Model, run=False, args=["--config", '{"model": {"lr": 0.5}, "trainer": {"max_epochs": 7}}'])
    two = LightningCLI(Model, run=False, args=["--config", "model:\n  lr: 0.75\n", "--model.lr=2", "--model=m.yaml"])
    return one.model.lr, one.trainer.max_epochs, two.model.lr


@case
def hyperparameters_are_settings():
    line = ["fit", "--model=Model", "--model.optimizer=SGD", "--model.optimizer.lr=0.2", "--model.schedule=StepLR",
            "--model.schedule.step_size=3", "--model.encoder=Encoder", "--model.encoder.width=9", *QUIET]  # fmt: skip
    cli = LightningCLI(Model, Data, subclass_mode_model=True, args=line)
    cli.trainer.save_checkpoint("x.ckpt")
    model = LightningModule.load_from_checkpoint("x.ckpt")
    optimizer = model.optimizer(model.parameters())
    data = Data.load_from_checkpoint("x.ckpt")
    saved = yaml.safe_load(Path(cli.trainer.log_dir, "hparams.yaml").read_text())
    return (
        dict(cli.model.hparams), saved, type(model).__name__, model.encoder.width, optimizer.param_groups[0]["lr"],
        model.schedule(optimizer).step_size, dict(data.hparams), Model.load_from_checkpoint("x.ckpt", lr=7).lr,
    )  # fmt: skip


@case
def links_from_objects_are_hyperparameters():
    class CLI(LightningCLI):
        def add_arguments_to_parser(self, parser):
            target = "model.encoder.init_args.width"
            parser.link_arguments("data.num_classes", target, apply_on="instantiate")

    cli = CLI(Model, Data, args=["fit", "--model.encoder=Encoder", *QUIET])
    saved = yaml.safe_load(Path(cli.trainer.log_dir, "config.yaml").read_text())
    return cli.model.encoder.width, cli.model.hparams["encoder"], saved["model"]["encoder"]


@case
def settings_of_optimizers_are_arguments():
    class CLI(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_optimizer_args((torch.optim.Adam, torch.optim.SGD), link_to="model.first")
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR, link_to="model.second")

    line = ["--optimizer=SGD", "--optimizer.lr=0.25", "--lr_scheduler.gamma=0.5"]
    cli = CLI(Linked, run=False, args=line)
    return cli.model.made, cli.config.optimizer.as_dict(), cli.config.lr_scheduler.as_dict()


@case
def options_of_argparse():
    class CLI(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_argument("--names", nargs="+", type=str, default=["a"])
            parser.add_argument("--numbers", nargs="*", type=int)
            parser.add_argument("--two", nargs=2, type=float)
            parser.add_argument("--flag", action="store_true")
            parser.add_argument("--choice", choices=["x", "y"], default="x")
            parser.add_argument("-s", "--short", type=int, default=1)
            parser.add_argument("--dotted.a", type=int, default=1)
            parser.add_argument("--must", required=True, type=int)

    keys = ("names", "numbers", "two", "flag", "choice", "short", "dotted.a", "must")
    line = ["--names", "x", "1", "--numbers", "1", "2", "--two", "1", "2.5", "--flag", "--choice=y", "-s", "4",
            "--dotted.a=5", "--must=1"]  # fmt: skip
    found = []
    for args in (line, ["--must=1"]):
        cli = CLI(BoringModel, run=False, args=args)
        found.append([cli.config.get(key) for key in keys])
    for wrong in (["--must=1", "--choice=z"], []):
        try:
            CLI(BoringModel, run=False, args=wrong)
        except SystemExit as error:
            found.append(error.code)
    return found


@case
def schedules():
    alone = LightningCLI(BoringModel, run=False, args=["--lr_scheduler=StepLR", "--lr_scheduler.step_size=2"])
    line = ["--optimizer=Adam", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=2"]
    pair = LightningCLI(BoringModel, run=False, args=line).model.configure_optimizers()
    line = ["fit", "--optimizer=SGD", "--optimizer.lr=0.1", "--lr_scheduler=ReduceLROnPlateau",
            "--lr_scheduler.monitor=x", "--lr_scheduler.patience=3", *SILENT]  # fmt: skip
    cli = LightningCLI(Logging, args=line)
    made = cli.trainer.lr_scheduler_configs[0]
    return (
        [type(one[0]).__name__ for one in alone.model.configure_optimizers()], type(pair).__name__,
        [type(one[0]).__name__ for one in pair], made.monitor, made.reduce_on_plateau,
        cli.config.fit.lr_scheduler.as_dict(),
    )  # fmt: skip


@case
def parameters_without_a_type():
    one = LightningCLI(Untyped, run=False, args=["--model.a=hello", "--model.c=3"])
    two = LightningCLI(Untyped, run=False, args=[])
    return one.model.got, two.model.got, two.config.model.as_dict()


@case
def configurations_are_written_for_lightning():
    line = ["fit", "--print_config", "--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=x",
            "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x", "--trainer.profiler=simple"]  # fmt: skip
    found = [printed(lambda: LightningCLI(BoringModel, Data, args=line))]
    line = ["fit", "--print_config=skip_null", "--optimizer=SGD", "--optimizer.lr=1"]
    found.append(printed(lambda: LightningCLI(Model, args=line)))
    cli = LightningCLI(BoringModel, args=["fit", *QUIET])
    text = Path(cli.trainer.log_dir, "config.yaml").read_text()
    return found, text.splitlines()[0], yaml.safe_load(text)


@case
def a_file_names_the_subcommand():
    Path("c.yaml").write_text("fit:\n  model: {lr: 0.5}\n  trainer: {fast_dev_run: true, accelerator: cpu}\n")
    cli = LightningCLI(Model, args=["--config", "c.yaml"])
    return cli.subcommand, cli.model.lr, cli.trainer.global_step


@case
def defaults_may_be_settings():
    early = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "q"}}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "q"}}

    class CLI(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.set_defaults({"trainer.callbacks": [early]})

    found = []
    for line in ([], ["--trainer.callbacks+=LearningRateMonitor"]):
        cli = CLI(Model, run=False, trainer_defaults={"logger": logger, "callbacks": Timer()}, args=line)
        found.append((names(cli.trainer), type(cli.trainer.logger).__name__))
    return found


@case
def the_callback_that_saves():
    class CLI(LightningCLI):
        def instantiate_trainer(self, **kwargs):
            return super().instantiate_trainer(callbacks=[Timer()], **kwargs)

    cli = CLI(Model, run=False, args=["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=x"])
    again = cli.instantiate_trainer(max_epochs=9)
    none = LightningCLI(Model, run=False, save_config_callback=None, args=[])
    return names(cli.trainer), again.max_epochs, names(again), names(none.trainer), SaveConfigCallback.__name__


@case
def a_saved_configuration_is_kept():
    class Saving(SaveConfigCallback):
        def save_config(self, trainer, pl_module, stage):
            is_there = Path(trainer.log_dir, self.config_filename).is_file()
            found.append((str(getattr(stage, "value", stage)), is_there, self.config.model.lr, self.already_saved))

    class Folder(Trainer):
        @property
        def log_dir(self):
            return "here"

    found = []
    options = {"trainer_class": Folder, "save_config_callback": Saving}
    for kwargs in ({}, {}, {"overwrite": True}, {"save_to_log_dir": False}):
        try:
            LightningCLI(Model, save_config_kwargs=kwargs, args=["fit", "--model.lr=0.5", *SILENT], **options)
        except RuntimeError as error:
            found.append(str(error).partition(" to NOT exist")[0])
    return found, [line for line in Path("here/config.yaml").read_text().splitlines() if "lr: 0.5" in line]


@case
def steps_may_be_overridden():
    class CLI(LightningCLI):
        def add_default_arguments_to_parser(self, parser):
            parser.add_argument("--seed_everything", type=int, default=11)

        def add_core_arguments_to_parser(self, parser):
            parser.add_lightning_class_args(self.trainer_class, "trainer")
            parser.set_defaults({f"trainer.{name}": one for name, one in self.trainer_defaults.items()})
            parser.add_lightning_class_args(self._model_class, "model", subclass_mode=self.subclass_mode_model)
            parser.add_lightning_class_args(Model, "teacher")

        def before_instantiate_classes(self):
            self.config.trainer.min_epochs = 2
            self.config["model.lr"] = 0.75

    cli = CLI(Model, run=False, trainer_defaults={"max_epochs": 4}, args=["--teacher.lr=9"])
    return (
        cli.trainer.max_epochs, cli.trainer.min_epochs, cli.model.lr, cli.config_init.teacher.lr,
        cli.config.seed_everything, int(os.environ["PL_GLOBAL_SEED"]), cli.datamodule,
    )  # fmt: skip


@case
def namespaces():
    from jsonargparse import Namespace

    stopping = EarlyStopping("x")
    settings = Namespace(model=Namespace(lr=0.5), trainer=Namespace(max_epochs=3, callbacks=[stopping]))
    cli = LightningCLI(Model, run=False, args=settings)
    config = cli.config
    copied = config.clone()
    copied.model.lr = 1.0
    return (
        cli.model.lr, cli.trainer.max_epochs, stopping in cli.trainer.callbacks, config.model == copied.model,
        config["model.lr"], "model.lr" in config, hasattr(config, "nothing"), config.get("model.nothing", 3),
        vars(config.model)["lr"], sorted(config.model.keys())[:3],
    )  # fmt: skip


def double(x):
    return 2 * x


@case
def lazy_defaults_and_functions():
    from jsonargparse import lazy_instance

    class Lazy(BoringModel):
        def __init__(
            self,
            encoder: Encoder = lazy_instance(Encoder, width=5),  # noqa: B008
            function: Callable = torch.relu,
            other: Callable[[Any], Any] = double,
            third: Callable | None = None,
        ):
            super().__init__()
            self.made = (encoder, function, other, third)

    found = []
    for line in ([], ["--model.encoder.width=8", "--model.third=torch.nn.GELU"],
                 ["--model.encoder=Encoder", "--model.function=torch.nn.functional.gelu"]):  # fmt: skip
        encoder, function, other, third = LightningCLI(Lazy, run=False, args=line).model.made
        found.append((encoder.width, function.__name__, other.__name__, type(third).__name__))
    return found


@case
def a_parser_alone():
    parser = LightningArgumentParser(default_env=True, env_prefix="QQ")
    parser.add_lightning_class_args(EarlyStopping, "stopping")
    parser.add_lightning_class_args(Model, "model")
    parser.add_optimizer_args(torch.optim.Adam, "one")
    parser.add_argument("--x", type=int, default=2)
    parser.link_arguments("x", "stopping.patience")
    os.environ["QQ_STOPPING__MONITOR"] = "m"
    config = parser.parse_args(["--one.lr=0.5", "--x=4"])
    Path("c.yaml").write_text("stopping: {monitor: z}\n")
    return (
        config.stopping.monitor, config.stopping.patience, config.one.lr, parser.callback_keys,
        parser.parse_object({"stopping": {"monitor": "y"}}).stopping.monitor,
        parser.parse_path("c.yaml").stopping.monitor, parser.get_defaults().x,
        type(parser.instantiate_classes(config).stopping).__name__,
    )  # fmt: skip


def main():
    warnings.simplefilter("ignore")
    found = {}
    for one in CASES:
        variables, here = dict(os.environ), os.getcwd()
        out = io.StringIO()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                    found[one.__name__] = one()
            except SystemExit:
                found[one.__name__] = out.getvalue()
            finally:
                os.chdir(here)
                os.environ.clear()
                os.environ.update(variables)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
