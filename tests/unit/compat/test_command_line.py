"""LightningCLI and its parser, also in the programs of tests/compat/programs/command_line_rows.py.

What these give under Lightning is stored: `$PYTHON_WITH_LIGHTNING command_line_rows.py > command_line_rows.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.errors import ConfigError
from loopwright.settings.make import make
from loopwright.yaml_file import parse

pytestmark = pytest.mark.usefixtures("installed")

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
         "--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.enable_checkpointing=false",
         "--trainer.logger=false"]  # fmt: skip


class Encoder(nn.Module):
    def __init__(self, width: int = 2, **others: Any) -> None:
        super().__init__()
        self.width, self.others = width, others


def make_model() -> Any:
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def __init__(
            self,
            lr: float = 0.1,
            encoder: Encoder | None = None,
            optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam,
            schedule: Callable[[Any], torch.optim.lr_scheduler.LRScheduler] | None = None,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.lr, self.encoder, self.optimizer, self.schedule = lr, encoder, optimizer, schedule

    return Model


def make_cli(*line: str, **options: Any) -> Any:
    from lightning.pytorch.cli import LightningCLI

    run = bool(line) and line[0] == "fit"
    arguments = [*line, *QUIET] if run else list(line)
    return LightningCLI(make_model(), args=arguments, run=run, **options)


FIXTURES = Path(__file__).parents[2] / "fixtures"
NAME = f"{Encoder.__module__}.Encoder"


def test_arguments_that_are_passed_on_stand_in_dict_kwargs() -> None:
    Path("c.yaml").write_text(f"model: {{encoder: {{class_path: {NAME}, dict_kwargs: {{q: 1}}}}}}\n")
    cli = make_cli("--config=c.yaml", "--model.encoder.width=5", "--model.encoder.dict_kwargs.z=t")
    assert (cli.model.encoder.width, cli.model.encoder.others) == (5, {"q": 1, "z": "t"})
    assert cli.config.model.encoder.dict_kwargs == {"q": 1, "z": "t"}


def test_what_is_typed_last_wins_files_as_well() -> None:
    Path("c.yaml").write_text("model: {lr: 0.25}\n")
    assert make_cli("--model.lr=2", "--config", "c.yaml").model.lr == 0.25
    assert make_cli("--config", "c.yaml", "--model.lr=2").model.lr == 2.0
    Path("m.yaml").write_text("lr: 0.75\n")
    assert make_cli("--config", '{"model": {"lr": 0.5}}', "--model=m.yaml").model.lr == 0.75


def test_hyperparameters_are_settings_of_which_the_model_is_made_again() -> None:
    cli = make_cli("fit", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.2", "--model.schedule=StepLR",
                   "--model.schedule.step_size=3", f"--model.encoder={NAME}", "--model.encoder.width=9")  # fmt: skip
    assert cli.model.hparams.encoder == {"class_path": NAME, "init_args": {"width": 9}}
    assert cli.model.hparams["_instantiator"] == "lightning.pytorch.cli.instantiate_module"
    cli.trainer.save_checkpoint("x.ckpt")
    with pytest.warns(UserWarning, match="'encoder' is an nn.Module"):
        model = type(cli.model).load_from_checkpoint("x.ckpt", lr=7.0)
    optimizer = model.optimizer(model.parameters())
    assert (model.lr, model.encoder.width) == (7.0, 9)
    assert (optimizer.param_groups[0]["lr"], model.schedule(optimizer).step_size) == (0.2, 3)
    with pytest.raises(ConfigError, match=r"encoder.*ReLU.* no parameter 'depth'"):
        make(Two, {"encoder": {"class_path": "torch.nn.ReLU", "init_args": {"depth": 3}}, "unknown": 1})
    with pytest.raises(ConfigError, match="expected a Module, got subprocess.Popen"):
        make(Two, {"encoder": {"class_path": "subprocess.Popen", "init_args": {"args": "ls"}}})


class Two(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()


def test_without_support_for_checkpoints_hyperparameters_are_objects() -> None:
    with pytest.warns(UserWarning, match="'encoder' is an nn.Module"):
        cli = make_cli(f"--model.encoder={NAME}", load_from_checkpoint_support=False)
    assert cli.model.hparams.encoder is cli.model.encoder


def test_a_configuration_can_be_changed_before_objects_are_made() -> None:
    from lightning.pytorch.cli import LightningCLI

    class CLI(LightningCLI):
        def before_instantiate_classes(self) -> None:
            self.config.model.lr = 0.75
            self.config["trainer.max_epochs"] = 5

    cli = CLI(make_model(), run=False, args=[])
    assert (cli.model.lr, cli.trainer.max_epochs) == (0.75, 5)


def test_a_saved_configuration_is_not_overwritten() -> None:
    from lightning.pytorch import Trainer

    class Folder(Trainer):
        @property
        def log_dir(self) -> str:
            return "here"

    make_cli("fit", "--model.lr=0.5", trainer_class=Folder)
    text = Path("here/config.yaml").read_text()
    assert text.startswith("# lightning.pytorch==")
    assert parse(text, "saved")["model"]["lr"] == 0.5
    with pytest.raises(RuntimeError, match=r"here/config.yaml to NOT exist"):
        make_cli("fit", trainer_class=Folder)
    assert Path("here/config.yaml").read_text() == text
    make_cli("fit", trainer_class=Folder, save_config_kwargs={"overwrite": True})
    assert parse(Path("here/config.yaml").read_text(), "saved")["model"]["lr"] == 0.1


def test_a_configuration_names_classes_as_lightning_does_without_parameters_of_loopwright(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        make_cli("fit", "--print_config", "--trainer.callbacks+=TQDMProgressBar",
                 "--trainer.callbacks+=RichProgressBar", "--trainer.callbacks.plain_interval_s=5")  # fmt: skip
    found = parse(capsys.readouterr().out, "printed")["trainer"]
    assert found["callbacks"][:1] == [
        {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar",
         "init_args": {"refresh_rate": 1, "process_position": 0, "leave": False}},
    ]  # fmt: skip
    assert found["callbacks"][1]["init_args"]["plain_interval_s"] == 5.0  # it was set


def test_the_only_section_of_a_file_is_the_subcommand() -> None:
    from lightning.pytorch.cli import LightningCLI

    Path("c.yaml").write_text("fit:\n  model: {lr: 0.5}\n  trainer: {fast_dev_run: true, accelerator: cpu}\n")
    cli = LightningCLI(make_model(), args=["--config", "c.yaml"])
    assert (cli.subcommand, cli.model.lr) == ("fit", 0.5)


def test_help_shows_what_is_declared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_cli("--help")
    assert ended.value.code == 0
    assert "--model.lr LR" in capsys.readouterr().out


def test_without_jsonargparse_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['jsonargparse'] = None\n"
        "from loopwright.compat.lightning import install; install(children=False)\n"
        "import loopwright.errors\n"
        "from lightning.pytorch.cli import OptimizerCallable, SaveConfigCallback, instantiate_class\n"
        "try:\n"
        "    from lightning.pytorch.cli import LightningCLI\n"
        "except loopwright.errors.MissingDependency as error:\n"
        "    assert \"pip install 'loopwright[lightning]'\" in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_parser_reads_and_makes_objects_alone() -> None:
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.cli import LightningArgumentParser

    parser = LightningArgumentParser()
    parser.add_lightning_class_args(EarlyStopping, "stopping")
    parser.add_argument("--x", nargs="+", type=int, default=[2])
    parser.link_arguments("x", "stopping.patience", compute_fn=sum)
    config = parser.parse_args(["--stopping.monitor=m", "--x", "4", "5"])
    stopping = parser.instantiate_classes(config).stopping
    assert (stopping.monitor, stopping.patience, parser.callback_keys) == ("m", 9, ["stopping"])
    assert parser.parse_object({"stopping": {"monitor": "y"}}).stopping.monitor == "y"
    parser.save(config, "c.yaml")
    assert parse(Path("c.yaml").read_text(), "saved")["x"] == [4, 5]
    assert "patience" not in Path("c.yaml").read_text()  # it follows from x
    with pytest.raises(ValueError, match="Refusing to overwrite"):
        parser.save(config, "c.yaml")
    again = parser.parse_path("c.yaml")
    assert (again.stopping, again.x) == (config.stopping, config.x)


def test_constructors_have_types_that_libraries_can_read() -> None:
    import inspect

    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    for one in (Trainer, EarlyStopping, ModelCheckpoint, CSVLogger):
        parameters = inspect.signature(one.__init__).parameters.values()
        assert not [parameter.name for parameter in parameters if isinstance(parameter.annotation, str)]
    assert inspect.signature(EarlyStopping).parameters["monitor"].annotation is str


def test_a_class_may_stand_in_a_file_and_the_subcommand_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("encoder.yaml").write_text(f"class_path: {NAME}\ninit_args: {{width: 9}}\ndict_kwargs: {{q: 1}}\n")
    cli = make_cli("--model.encoder=encoder.yaml")
    assert (cli.model.encoder.width, cli.model.encoder.others) == (9, {"q": 1})

    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setenv("PL_SUBCOMMAND", "fit")
    monkeypatch.setenv("PL_FIT__TRAINER__FAST_DEV_RUN", "true")
    monkeypatch.setenv("PL_FIT__TRAINER__ACCELERATOR", "cpu")
    assert LightningCLI(make_model(), args=[], parser_kwargs={"default_env": True}).subcommand == "fit"


def test_a_function_that_makes_the_model_leaves_its_hyperparameters() -> None:
    from lightning.pytorch.cli import LightningCLI

    kind = make_model()

    def build(rate: float = 0.5) -> Any:
        return kind(lr=2 * rate)

    build.__annotations__["return"] = kind
    model = LightningCLI(build, args=["--model.rate=0.25"], run=False).model
    assert model.hparams.lr == 0.5
    assert "_instantiator" not in model.hparams


def test_a_checkpoint_that_is_typed_starts_and_imports_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    Path("attacker.py").write_text("open('imported', 'w')\n")
    call = {"class_path": "subprocess.getoutput", "init_args": {"cmd": "touch called"}}
    attacks = ({"optimizer": call}, {"schedule": "attacker.x"}, {"encoder": {"class_path": "attacker.X"}},
               {"encoder": {"class_path": NAME, "dict_kwargs": {"q": call}}},
               {"_class_path": "attacker.X"})  # fmt: skip
    for attack in attacks:
        torch.save({"state_dict": {}, "hyper_parameters": attack}, "x.ckpt")
        with pytest.raises(SystemExit):
            make_cli("fit", "--ckpt_path=x.ckpt")
        assert "x.ckpt do not fit the model" in capsys.readouterr().err
    assert not Path("called").exists()
    assert not Path("imported").exists()
    torch.save({"state_dict": {}, "hyper_parameters": {"optimizer": "torch.optim.SGD", "lr": 0.5}}, "x.ckpt")
    with pytest.raises(RuntimeError, match="in loading state_dict"):  # its settings are right, its weights are missing
        make_cli("fit", "--ckpt_path=x.ckpt")


ATTRIBUTES = ("parser", "config", "config_init", "subcommand", "trainer", "model", "datamodule")


def kept_elsewhere(name: str) -> property:
    return property(
        lambda cli: vars(cli)["kept"][name], lambda cli, value: vars(cli).setdefault("kept", {}).update({name: value})
    )


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_subclass_may_keep_an_attribute_in_a_property(name: str) -> None:
    from lightning.pytorch.cli import LightningCLI

    class CLI(LightningCLI):
        pass

    setattr(CLI, name, kept_elsewhere(name))
    cli = CLI(make_model(), args=["fit", "--model.lr=0.5", "--trainer.fast_dev_run=1", "--trainer.accelerator=cpu"])
    assert (cli.model.lr, cli.trainer.global_step, cli.subcommand) == (0.5, 1, "fit")
    assert name in vars(cli)["kept"]


def test_a_subclass_that_makes_its_objects_may_show_them_by_properties() -> None:
    from lightning.pytorch.cli import LightningCLI

    class CLI(LightningCLI):
        def instantiate_classes(self) -> None:
            self.made = self.parser.instantiate_classes(self.config)
            self.own_trainer = self.instantiate_trainer()

        config_init = property(lambda self: self.made)
        model = property(lambda self: self._get(self.made, "model"))
        datamodule = property(lambda self: self._get(self.made, "data"))
        trainer = property(lambda self: self.own_trainer)

    for command in (["fit"], []):
        cli = CLI(
            make_model(), run=bool(command),
            args=[*command, "--model.lr=0.5", "--trainer.fast_dev_run=1", "--trainer.accelerator=cpu"],
        )  # fmt: skip
        assert (cli.model.lr, cli.datamodule, cli.trainer.global_step) == (0.5, None, len(command))


class Linked(nn.Module):
    def __init__(self, hidden: int, width: int = 1) -> None:
        super().__init__()
        self.width, self.hidden = width, hidden


@pytest.mark.parametrize("names_class", [False, True])
def test_a_link_within_a_group_is_applied(names_class: bool, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.cli import LightningArgumentParser

    below = "init_args." if names_class else ""
    line = [f"--net={__name__}.Linked"] if names_class else []
    for compute, hidden in ((None, 3), (lambda width: 2 * width, 6)):
        parser = LightningArgumentParser()
        (parser.add_subclass_arguments if names_class else parser.add_class_arguments)(Linked, "net")
        parser.link_arguments(f"net.{below}width", f"net.{below}hidden", compute_fn=compute)
        config = parser.parse_args([*line, "--net.width=3"])
        assert config[f"net.{below}hidden"] == hidden
        made = parser.instantiate_classes(config).net
        assert (made.width, made.hidden) == (3, hidden)
        assert parser.parse_args(line)[f"net.{below}hidden"] == hidden // 3  # of the default
        with pytest.raises(SystemExit):
            parser.parse_args([*line, "--net.width=x"])
        assert "width" in capsys.readouterr().err


def test_a_default_strategy_that_is_made_lazily_keeps_its_arguments() -> None:
    from jsonargparse import lazy_instance
    from lightning.pytorch.strategies import DDPStrategy

    lazy = lazy_instance(DDPStrategy, find_unused_parameters=True)
    cli = make_cli("--trainer.strategy.process_group_backend=gloo", trainer_defaults={"strategy": lazy})
    found = cli.config.trainer.strategy
    assert found.class_path == "lightning.pytorch.strategies.DDPStrategy"
    assert (found.init_args.find_unused_parameters, found.init_args.process_group_backend) == (True, "gloo")
    assert found.init_args.static_graph is False
    assert type(cli.trainer.strategy) is DDPStrategy
    assert cli.trainer.strategy._ddp_kwargs["find_unused_parameters"]


class Plain(nn.Module):
    def __init__(self, function: Callable = nn.Softmax) -> None:  # type: ignore[type-arg]  # as programs write it
        super().__init__()
        self.function = function


def test_small_things_of_a_configuration_are_lightnings(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    cli = LightningCLI(BoringModel, run=False, args=["--trainer.callbacks=DeviceStatsMonitor"])
    assert cli.config.trainer.callbacks.class_path == "lightning.pytorch.callbacks.DeviceStatsMonitor"
    named = ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=x"]
    (early,) = LightningCLI(BoringModel, run=False, args=named).config.trainer.callbacks
    assert early.init_args.monitor == "x"
    assert "DeviceStatsMonitor" in [type(one).__name__ for one in cli.trainer.callbacks]
    assert "model" not in cli.config  # it has no parameters
    for typed in ("lightning.pytorch.demos.BoringModel", "lightning.pytorch.demos.boring_classes.BoringModel"):
        assert LightningCLI(run=False, args=[f"--model={typed}"]).config.model.class_path == typed
    assert LightningCLI(run=False, args=["--model=BoringModel"]).config.model.class_path == (
        "lightning.pytorch.demos.BoringModel"
    )

    parser = LightningArgumentParser()
    parser.add_class_arguments(Plain, "net")
    made = parser.instantiate_classes(parser.parse_args(["--net.function=torch.nn.ReLU"])).net
    assert isinstance(made.function, nn.ReLU)  # which can be called
    ends: list[int] = []
    parser.exit = ends.append  # type: ignore[method-assign,assignment]
    parser.parse_args(["--net.unknown=1"])
    assert ends == [2]
    assert "unknown" in capsys.readouterr().err


ROWS = json.loads((FIXTURES / "command_line_rows.json").read_text())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what each program gives under Loopwright."""
    program = Path(__file__).parents[2] / "compat" / "programs" / "command_line_rows.py"
    environment = {key: value for key, value in os.environ.items() if "SEED" not in key}  # tests before set them
    found = subprocess.run(
        [sys.executable, "-m", "loopwright", "run-lightning", str(program)],
        cwd=tmp_path_factory.mktemp("rows"), env=environment, text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ROWS)
def test_a_small_program_gives_what_it_gives_under_lightning(name: str, rows: dict[str, Any]) -> None:
    assert rows[name] == ROWS[name]


def test_a_program_that_imports_the_command_line_alone_has_types_for_the_trainer() -> None:
    code = (
        "import inspect\n"
        "from loopwright.compat.lightning import install; install(children=False)\n"
        "from lightning.pytorch.cli import LightningCLI\n"
        "kind = inspect.signature(LightningCLI.__init__).parameters['trainer_class'].default\n"
        "kinds = [one.annotation for one in inspect.signature(kind.__init__).parameters.values()]\n"
        "assert not [one for one in kinds if isinstance(one, str)]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_loopwright_imports_no_jsonargparse() -> None:
    code = "import sys, loopwright as lw; lw.Trainer; assert 'jsonargparse' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
