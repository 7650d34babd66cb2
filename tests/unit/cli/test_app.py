"""`lw.cli.CLI`: sources, types, links, help and what is saved, in one process; and as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.cli.cli_program import Data, Net, Noise, Size, Wide
from hypothesis import example, given, settings
from hypothesis import strategies as st

import loopwright as lw
from loopwright.checkpoint import storage
from loopwright.cli.groups import Groups
from loopwright.cli.seeds import draw_seed
from loopwright.cli.sources import CommandLine, gather, parse_command_line
from loopwright.errors import ConfigError
from loopwright.settings.parameters import EMPTY
from loopwright.settings.tree import Settings, escaped, resolve
from loopwright.yaml_file import parse, parse_scalar, write

FOLDER = Path(__file__).parents[2] / "fixtures" / "cli"
QUIET = ["trainer.logger=false", "trainer.enable_checkpointing=false", "trainer.enable_progress_bar=false",
         "trainer.enable_model_summary=false", "trainer.accelerator=cpu"]  # fmt: skip


@pytest.fixture(autouse=True)
def _seed_is_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    monkeypatch.chdir(tmp_path)


def made(
    *args: str, model: Any = Net, data: Any = Data, cls: type[lw.cli.CLI] = lw.cli.CLI, **kwargs: Any
) -> lw.cli.CLI:
    return cls(model, data, args=[*QUIET, *args], run=False, exits=False, **kwargs)


def problems(*args: str, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        made(*args, **kwargs)
    return str(caught.value)


# -- YAML ----------------------------------------------------------------------------------------------------------


def test_yaml_takes_no_text_for_something_else() -> None:
    text = "a: 1e-3\nb: no\nc: on\nd: 12:30:00\ne: 0123\nf: 1_000\ng: .5\nh: 2026-01-01\ni: ~\nj: true\nk: nan\n"
    found = parse(text, "x")
    assert found.pop("k") != found.pop("k", None)
    assert found == {"a": 1e-3, "b": "no", "c": "on", "d": "12:30:00", "e": 123, "f": 1000, "g": 0.5,
                     "h": "2026-01-01", "i": None, "j": True}  # fmt: skip


def test_a_key_that_stands_twice_or_is_none_is_an_error_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"base.yaml, line 3, column 1: duplicate key 'a'"):
        parse("a: 1\nb: 2\na: 3\n", "base.yaml")
    with pytest.raises(ConfigError, match=r"base.yaml, line 1, column 3: \{'a': 1\} cannot be a key"):
        parse("? {a: 1}\n: 2\n", "base.yaml")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(PLAIN)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert parse(write(value), "x") == value


# -- sources -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["trainer.max_epochs", "model.lr", "model.act.init_args.x", "data.batch_size", "seed_everything"]
        ),
        st.sets(
            st.sampled_from(["checkpoint", "default", "first", "second", "section", "variable", "line"]), min_size=1
        ),
        min_size=1,
    )
)
def test_the_later_source_wins(tmp_path_factory: pytest.TempPathFactory, given_by: dict[str, set[str]]) -> None:
    order = ["checkpoint", "default", "first", "second", "section", "variable", "line"]
    folder = tmp_path_factory.mktemp("sources")

    def nested(source: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, sources in given_by.items():
            if source in sources:
                node = found
                *above, last = path.split(".")
                for part in above:
                    node = node.setdefault(part, {})
                node[last] = order.index(source)
        return found

    (folder / "first.yaml").write_text(write(nested("first")))
    (folder / "second.yaml").write_text(
        write({**nested("second"), "fit": nested("section"), "test": {"model": {"lr": 99}}})
    )
    found = gather(
        parse_command_line(
            ["--config", str(folder / "first.yaml"), f"--config={folder / 'second.yaml'}"]
            + [f"{path}={order.index('line')}" for path, sources in given_by.items() if "line" in sources]
        ),
        command="fit",
        commands=("fit", "test"),
        defaults={path: order.index("default") for path, sources in given_by.items() if "default" in sources},
        checkpoint=(nested("checkpoint"), "a checkpoint"),
        variables={
            f"LOOPWRIGHT__{path.upper().replace('.', '__')}": str(order.index("variable"))
            for path, sources in given_by.items()
            if "variable" in sources
        },
    )
    for path, sources in given_by.items():
        node: Any = found.tree
        for part in path.split("."):
            node = node[part]
        assert node == max(order.index(source) for source in sources)


def test_short_names_of_variables_are_accepted_and_long_ones_have_priority(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: 1\nb: 1\n")
    (tmp_path / "b.yaml").write_text("b: 2\n")
    variables = {"LW_CONFIG": str(tmp_path / "a.yaml"), "LW__C": "3", "LW__D__E": "3", "LOOPWRIGHT__D__E": "4"}

    def read(**more: str) -> Any:
        line, variables_now = parse_command_line([]), {**variables, **more}
        return gather(line, command="fit", commands=("fit",), defaults={}, variables=variables_now).tree

    assert read() == {"a": 1, "b": 1, "c": 3, "d": {"e": 4}}
    assert read(LOOPWRIGHT_CONFIG=str(tmp_path / "b.yaml")) == {"b": 2, "c": 3, "d": {"e": 4}}


def test_every_form_of_the_command_line() -> None:
    line = parse_command_line(
        [
            "a.b=1",
            "--c-d.e",
            "2",
            "--f=x=y",
            "g+=1",
            "--h+",
            "z",
            "~k.l",
            "--switch",
            "-c",
            "file.yaml",
            "--print_config",
            "--last",
        ]
    )
    assert [(one.path, one.text, one.op) for one in line.assignments] == [
        ("a.b", "1", "="), ("c_d.e", "2", "="), ("f", "x=y", "="), ("g", "1", "+="), ("h", "z", "+="),
        ("k.l", "", "~"), ("switch", "true", "="), ("last", "true", "="),
    ]  # fmt: skip
    assert line.files == ["file.yaml"]
    assert line.prints == "full"
    wrong = parse_command_line(["fast", "3", "a=1", "--print-config=long", "--config"]).wrong
    assert [one.partition(" ")[0] for one in wrong] == ["'fast'", "'3'", "--print-config=long", "--config"]


def test_files_of_a_group_are_found_beside_a_file_and_in_conf(tmp_path: Path) -> None:
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "digits.yaml").write_text("batch_size: 3\n")
    assert (
        made("data=digits", "data.samples=12").datamodule.__dict__.items() >= {"batch_size": 3, "samples": 12}.items()
    )
    (tmp_path / "other" / "data").mkdir(parents=True)
    (tmp_path / "other" / "data" / "digits.yaml").write_text("batch_size: 5\n")
    (tmp_path / "other" / "base.yaml").write_text("data: digits\n")
    assert made("--config", str(tmp_path / "other" / "base.yaml")).datamodule.batch_size == 5


def test_interpolations_reach_other_settings_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDTH", "12")
    cli = made(
        "data.batch_size=${model.width}",
        "model.class_path=fixtures.cli.cli_program.Net",
        "model.width=${oc.decode:${oc.env:WIDTH}}",
    )
    assert cli.datamodule.batch_size == 12
    assert "model.lr (command line): Interpolation key 'nowhere' not found" in problems("model.lr=${nowhere}")
    assert "???" in problems("model.lr=???") or "Missing" in problems("model.lr=???")


# -- types ---------------------------------------------------------------------------------------------------------


def test_values_get_the_types_of_the_signature() -> None:
    cli = made(
        "model.lr=1", "model.width=1e1", "model.name=123", "model.size=large", "model.noise.scale=0.5",
        "model.layers=[1,2]", "model.place=/tmp", "model.dtype=bfloat16", "model.act=Tanh",
        "model.whatever={a: [1, no]}",
        "model.optimizer.class_path=torch.optim.Adam", "model.optimizer.lr=0.25", "model.steps=007x",
        "trainer.max_time=00:00:30:00", "trainer.devices=1", "trainer.callbacks=[LearningRateMonitor]",
    )  # fmt: skip
    model = cli.model
    assert (model.lr, type(model.lr)) == (1.0, float)
    assert model.layer[0].out_features == 10
    assert (model.name, model.size, model.mode) == ("123", Size.LARGE, "b")
    assert model.noise == Noise(0.5)
    assert (model.layers, model.place, model.dtype_) == ([1, 2], Path("/tmp"), torch.bfloat16)
    assert isinstance(model.layer[1], torch.nn.Tanh)
    assert model.whatever == {"a": [1, "no"]}
    assert model.steps == "007x"
    optimizer = model.optimizer(model.parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert any(isinstance(one, lw.LearningRateMonitor) for one in cli.trainer.callbacks)


def test_everything_that_is_wrong_is_named_at_once() -> None:
    said = problems(
        "trainer.max_epoch=1", "model.lr=fast", "model.widht=3", "model.size=huge", "model.noise.scle=1",
        "model.mode=a", "model.layers=[1,x]", "model.act=Tanhh", "data.batch_size=2.5",
        "trainer.callbacks=[{class_path: EarlyStopping}]", "trainr.max_epochs=1", "model.dtype=float33",
    )  # fmt: skip
    for line in (
        "trainer.max_epoch (command line): Trainer has no parameter 'max_epoch'; did you mean 'max_epochs'?",
        "model.lr (command line): expected float, got fast",
        "model.widht (command line): Net has no parameter 'widht'; did you mean 'width'?",
        "model.size (command line): expected one of SMALL, LARGE, got 'huge'",
        "model.noise.scle (command line): Noise has no parameter 'scle'; did you mean 'scale'?",
        "model.mode (command line): Net has no parameter 'mode'",
        "model.layers.1 (command line): expected int, got 'x'",
        "model.act (command line): no Module is called 'Tanhh' (did you mean 'Tanh'?)",
        "data.batch_size (command line): expected int, got 2.5",
        "trainer.callbacks.0 (command line): EarlyStopping needs monitor",
        "trainr (command line): unknown setting (did you mean 'trainer'?)",
        "model.dtype (command line): expected a torch dtype, got 'float33'",
    ):
        assert f"\n  - {line}" in said.replace(".init_args", ""), line
    assert "got 12 problems" in said


def test_files_are_named_with_their_mistakes(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("# a comment\nmodel:\n  lr: yes\nfit:\n  data:\n    batch_size: 2.5\n")
    (tmp_path / "more.yaml").write_text(
        "model:\n  name: 1.10\n"
        "trainer:\n  callbacks:\n    - class_path: EarlyStopping\n      init_args: {patience: x}\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits.yaml").write_text("\nsize: 3\n")
    said = problems("--config", "base.yaml", "-c", "more.yaml", "data=digits")
    for line in (
        "model.lr (base.yaml:3): expected float, got 'yes'",
        "model.name (more.yaml:2): expected str, got 1.1; put it between quotes",
        "trainer.callbacks.0.patience (more.yaml:6): expected int, got 'x'",
        "trainer.callbacks.0 (more.yaml:5): EarlyStopping needs monitor",
        "data.size (data/digits.yaml:2): Data has no parameter 'size'",
    ):
        assert f"\n  - {line}" in said, said
    found = gather(parse_command_line(["-c", "base.yaml"]), command="fit", commands=["fit"], defaults={})
    assert found.named("data.batch_size") == "data.batch_size (base.yaml:6, section fit)"
    assert "cannot be read" in problems("--config", "nothing.yaml")


def test_a_class_must_be_of_the_kind_that_is_expected() -> None:
    assert "expected a Module, got subprocess.Popen" in problems("model.act=subprocess.Popen")
    assert "expected a class of Module, got os.system" in problems("model.act.class_path=os.system")
    assert "annotate the parameter" in problems("model.whatever={_target_: subprocess.Popen, args: [ls]}")
    assert "expected a Callback, got subprocess.Popen" in problems("trainer.callbacks=[{_target_: subprocess.Popen}]")
    assert isinstance(
        made("model.whatever={_target_: torch.nn.Linear, in_features: 1, out_features: 2}").model.whatever,
        torch.nn.Linear,
    )


# -- classes -------------------------------------------------------------------------------------------------------


def test_another_class_drops_arguments_that_it_does_not_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text(
        "model: {class_path: fixtures.cli.cli_program.Net, init_args: {width: 7, lr: 0.5}}\n"
    )
    cli = made("--config", "base.yaml", "model=fixtures.cli.cli_program.Wide", "model.depth=2")
    assert type(cli.model) is Wide
    assert (cli.model.depth, cli.model.layer[0].out_features) == (2, 7)
    assert "model.init_args.lr is ignored" in capsys.readouterr().err
    assert "Wide has no parameter 'lr'" in problems("model=fixtures.cli.cli_program.Wide", "model.lr=1")


def test_classes_without_a_program() -> None:
    cli = made(
        "--model",
        "fixtures.cli.cli_program.Net",
        "--data=fixtures.cli.cli_program.Data",
        "data.samples=8",
        model=None,
        data=None,
    )
    assert type(cli.model) is Net
    assert cli.datamodule.samples == 8
    assert "model: name a class" in problems(model=None, data=None)
    assert "module 'nowhere' not found" in problems("model=nowhere.Net", model=None, data=None)
    assert "has no 'Nett' (did you mean 'Net'?)" in problems("model=fixtures.cli.cli_program.Nett", model=None)
    assert "expected a Module, got" in problems("model=fixtures.cli.cli_program.Data", model=None)


def test_optimizers_and_schedules_by_name() -> None:
    cli = made(
        "optimizer=adam",
        "optimizer.lr=0.03",
        "lr_scheduler=StepLR",
        "lr_scheduler.step_size=2",
        "lr_scheduler.interval=step",
        "trainer.max_steps=3",
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    optimizer = cli.trainer.optimizers[0]
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.003)
    assert cli.config["lr_scheduler"]["init_args"]["interval"] == "step"
    assert "lr_scheduler: it needs an optimizer" in problems("lr_scheduler=StepLR")
    assert "StepLR needs step_size" in problems("optimizer=SGD", "lr_scheduler=StepLR")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("optimizer=SGD", "optimizer.lr=-1"), "Invalid learning rate: -1.0"),
        (("optimizer=Muon", "optimizer.lr=0.01"), "only supports 2D parameters"),
    ],
)
def test_an_optimizer_that_refuses_its_arguments_is_named(given: tuple[str, ...], text: str) -> None:
    cli = made(*given, "trainer.max_steps=1")
    with pytest.raises(lw.ConfigError, match=f"optimizer= cannot be created: .*{text}"):
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)


def test_schedules_of_loopwright_get_the_length_of_the_run() -> None:
    given = ("optimizer=SGD", "optimizer.lr=1", "lr_scheduler=wsd", "lr_scheduler.warmup=1", "lr_scheduler.decay=0.5")
    cli = made(*given, "trainer.max_steps=4")
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0
    assert cli.trainer.lr_scheduler_configs[0].interval == "step"
    assert cli.config["lr_scheduler"]["init_args"] == {
        "warmup": 1, "decay": 0.5, "shape": "linear", "min_lr_ratio": 0.0, "devices": 1
    }  # fmt: skip
    longer = made(*given, "lr_scheduler.num_steps=8", "trainer.max_steps=6")
    longer.trainer.fit(longer.model, datamodule=longer.datamodule)
    assert longer.trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    assert "wsd has no parameter 'warm'; did you mean 'warmup'" in problems(*given, "lr_scheduler.warm=1")
    assert "did you mean 'cosine'" in problems("optimizer=SGD", "lr_scheduler=cosin")


def test_strategies_loggers_and_profilers_by_name(tmp_path: Path) -> None:
    cli = made("trainer.logger=[csv, tensor_board]", "trainer.default_root_dir=logs", "trainer.profiler=simple",
               "trainer.strategy=ddp", "trainer.strategy.find_unused_parameters=true")  # fmt: skip
    assert [type(one) for one in cli.trainer.loggers] == [lw.CSVLogger, lw.TensorBoardLogger]
    assert cli.trainer.loggers[0].save_dir == "logs"
    assert isinstance(cli.trainer.strategy, lw.DDPStrategy)


def test_a_mesh_by_name_and_sizes() -> None:
    cli = made("trainer.strategy=mesh:fsdp=2,tp=2", "trainer.devices=4")
    strategy = cli.trainer.strategy
    assert isinstance(strategy, lw.strategies.MeshStrategy)
    assert (strategy.axes.fsdp, strategy.axes.tp) == (2, 2)
    assert "'tpp' is not an axis (did you mean 'tp'?)" in problems("trainer.strategy=mesh:tpp=2", "trainer.devices=2")


def test_lists_are_changed_by_place_and_by_adding() -> None:
    file = str(FOLDER / "base.yaml")
    args = [
        "trainer.callbacks.0.patience=9",
        "trainer.callbacks+=LearningRateMonitor",
        "trainer.callbacks.logging_interval=step",
    ]
    cli = made("--config", file, *args)
    stopping, monitor = cli.config["trainer"]["callbacks"]
    assert stopping["init_args"]["patience"] == 9
    assert monitor["init_args"]["logging_interval"] == "step"
    assert "callbacks" not in made("--config", file, "~trainer.callbacks").settings.tree["trainer"]
    assert "the list has 1 entries" in problems("--config", file, "trainer.callbacks.4.patience=9")


# -- programs ------------------------------------------------------------------------------------------------------


class Program(lw.cli.CLI):
    seen: list[str]

    def add_arguments(self, groups: Groups) -> None:
        groups.add_class("stopping", lw.EarlyStopping)
        groups.add_value("tag", str, "none", "What the run is called.")
        groups.set_defaults({"stopping.monitor": "val_loss", "trainer.max_epochs": 1})
        groups.link("data.batch_size", "model.width", lambda size: 2 * size)
        groups.link("data.classes", "model.classes", after_build=True)
        groups.link("tag", "model.name")

    def before_fit(self) -> None:
        self.seen = ["before"]

    def after_fit(self) -> None:
        self.seen.append(f"after {self.trainer.current_epoch}")


def test_a_program_declares_classes_values_defaults_and_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = made("data.batch_size=6", "tag=1", "stopping.patience=4", cls=Program)
    assert cli.model.layer[0].out_features == 12
    assert cli.model.layer[2].out_features == 2
    assert (cli.groups["tag"], cli.model.name) == ("1", "1")
    assert [one.patience for one in cli.trainer.callbacks if isinstance(one, lw.EarlyStopping)] == [4]
    assert "Expected model.width to be unset, since it follows from data.batch_size" in problems(
        "data.batch_size=6", "model.width=1", cls=Program
    )
    default = made(cls=Program)  # batch_size is 4 where nothing is said
    assert (default.model.layer[0].out_features, default.model.name) == (8, "none")
    # The saved configuration has what followed, and follows again when it is read.
    assert default.config["model"]["init_args"].items() >= {"width": 8, "classes": 2}.items()
    (tmp_path / "saved.yaml").write_text(write(default.config))
    assert made("--config", "saved.yaml", cls=Program).config == default.config
    assert not capsys.readouterr().err
    assert made("--config", "saved.yaml", "data.batch_size=5", cls=Program).config["model"]["init_args"]["width"] == 10
    assert "model.width=8 becomes 10: it follows from data.batch_size" in capsys.readouterr().err


def test_defaults_of_the_program_and_objects_that_yaml_cannot_hold() -> None:
    stop = lw.EarlyStopping("val_loss")
    defaults = {"max_epochs": 5, "callbacks": [stop], "logger": False}
    assert made("trainer.max_epochs=2", trainer_defaults=defaults).trainer.max_epochs == 2
    cli = made(trainer_defaults=defaults)
    assert cli.trainer.max_epochs == 5
    assert stop in cli.trainer.callbacks
    assert defaults["callbacks"] == [stop]


def test_a_subcommand_runs_with_its_hooks_and_saves_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["fit", "--config", str(FOLDER / "base.yaml"), "trainer.default_root_dir=runs", "trainer.logger=csv",
            "trainer.max_epochs=1", "data.batch_size=8", "~model.width", "~trainer.callbacks"]  # fmt: skip
    cli = Program(Net, Data, args=args, exits=False)
    assert cli.seen == ["before", "after 1"]
    path = cli.trainer.checkpoint_callback.best_model_path
    beside = (Path(path).parent / "config.yaml").read_text()
    assert (Path(cli.trainer.log_dir) / "config.yaml").read_text() == beside
    assert storage.load(path)["callbacks"]["SaveConfig"]["config"] == beside
    assert parse(beside, "x")["data"]["init_args"] == {"batch_size": 8, "samples": 32}
    capsys.readouterr()

    again = lw.cli.CLI(args=["test", "--ckpt_path", path, "trainer.logger=false"], exits=False)
    assert type(again.model) is Net
    assert again.datamodule.batch_size == 8
    assert again.model.layer[0].out_features == 16
    assert again.result[0]["test_loss"] == pytest.approx(
        float(cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]["test_loss"])
    )
    assert "states of callbacks" not in capsys.readouterr().err


def test_the_printed_configuration_makes_the_same_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "--config",
        str(FOLDER / "base.yaml"),
        "model.act=Tanh",
        "model.noise.scale=0.5",
        "model.size=LARGE",
        "optimizer=SGD",
        "optimizer.lr=0.1",
    ]
    with pytest.raises(SystemExit) as ended:
        made(*args, "--print-config")
    assert ended.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert made("--config", "printed.yaml").config == made(*args).config


def test_short_configurations_are_as_expected(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["-c", str(FOLDER / "base.yaml"), "model.act._target_=torch.nn.Tanh", "optimizer=adam", "optimizer.lr=1e-2"]
    with pytest.raises(SystemExit):
        lw.cli.CLI(Net, Data, args=["fit", *args, "--trainer.logger", "csv", "--print-config=short"])
    assert capsys.readouterr().out == (FOLDER / "short.yaml").read_text()


def test_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED")
    first = made().config["seed_everything"]
    assert isinstance(first, int)
    assert os.environ["PL_GLOBAL_SEED"] == str(first)
    assert made().config["seed_everything"] == first  # a process that was started by it
    same = [made("seed_everything=3").model.layer[0].weight for _ in range(2)]
    assert torch.equal(*same)
    assert made("seed_everything=false").config["seed_everything"] is False


def test_help_comes_from_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*args: str) -> str:
        with pytest.raises(SystemExit) as ended:
            lw.cli.CLI(Net, Data, args=list(args), program="train.py")
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert "  validate   evaluate a model" in said("--help")
    text = said("fit", "--help")
    assert "usage: train.py fit" in text
    assert "max_epochs" in text
    assert "model.lr: float (default 0.1)\n      Learning rate." in said("fit", "--help", "model")
    assert "model.size: SMALL | LARGE (default SMALL)" in said("fit", "--help", "model")
    assert "model.mode" not in said("fit", "--help", "model")  # the class sets it itself
    assert "monitor: str (required)" in said("fit", "--trainer.callbacks.help", "EarlyStopping")


def test_hydras_containers_are_taken_for_lists_and_dicts(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    node = OmegaConf.create(
        {"devices": 1, "max_time": {"hours": 1}, "callbacks": [], "limit_train_batches": 1.0, "layers": [1, 2]}
    )
    trainer = lw.Trainer(
        devices=node.devices, max_time=node.max_time, callbacks=node.callbacks,
        logger=lw.CSVLogger(tmp_path), max_steps=1, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu",
    )  # fmt: skip
    model = Net(layers=node.layers)
    trainer.fit(model, datamodule=Data())
    path = trainer.checkpoint_callback.best_model_path
    assert Net.load_from_checkpoint(path).layers == [1, 2]


def test_a_program_as_it_is_typed(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LW__MODEL__LR": "0.5", "PYTHONPATH": str(FOLDER)}
    shared = ["trainer.fast_dev_run=2", "trainer.enable_progress_bar=false", "trainer.accelerator=cpu"]

    def typed(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env=environment, check=False, cwd=tmp_path
        )

    done = typed(str(FOLDER / "cli_program.py"), "fit", "-c", str(FOLDER / "base.yaml"), *shared, "model.widht=1")
    assert done.returncode == 2
    assert "did you mean 'width'?" in done.stderr
    assert "Traceback" not in done.stderr
    done = typed(str(FOLDER / "cli_program.py"), "fit", *shared, "trainer.devices=2")
    assert done.returncode == 0, done.stderr
    done = typed("-m", "loopwright", "validate", "--model", "cli_program.Net", "--data", "cli_program.Data", *shared)
    assert done.returncode == 0, done.stderr
    assert "val_loss" in done.stdout
    assert not [one for one in tmp_path.rglob("*") if one.is_file()]  # a fast_dev_run leaves nothing


def test_command_line_keeps_its_type() -> None:
    assert isinstance(parse_command_line([]), CommandLine)
    assert parse_scalar("[1, 2") == "[1, 2"


# -- what goes wrong -----------------------------------------------------------------------------------------------


def ended(capsys: pytest.CaptureFixture[str], *args: str, **kwargs: Any) -> str:
    """Return what a program says that ends with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        lw.cli.CLI(kwargs.pop("model", Net), Data, args=["fit", *QUIET, *args], program="train.py", **kwargs)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_all_that_is_wrong_with_the_sources_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "fast.yaml").write_text("{}\n")
    said = problems("--config", "nope.yaml", "--config", "fas.yaml", "foo")
    assert "nope.yaml cannot be read: No such file or directory" in said
    assert "fas.yaml cannot be read: No such file or directory (did you mean 'fast.yaml'?)" in said
    assert "'foo' (command line): expected an option or a setting" in said
    said = problems("bar", "model.lr=${trainer.max_epochz}", "model.name=${oc.env:NOPE}", "model.width=???",
                    "model.place=a${b", "model.layers=[x]", "~nothing", "trainer.max_epochs=2")  # fmt: skip
    for line in (
        "'bar' (command line): expected",
        "model.lr (command line): Interpolation key 'trainer.max_epochz' not found (did you mean 'trainer.max_epochs'?",
        "model.name (command line): Environment variable 'NOPE' not found",
        "model.width (command line): must be given (it is ???)",
        r"model.place (command line): no viable alternative at input '${b'; write \${ where",
        "model.layers.0 (command line): expected int, got 'x'",
        "Expected a setting to remove, got ~nothing, which is not set",
    ):
        assert f"\n  - {line}" in said, line


def test_modules_that_cannot_be_imported_are_problems_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unfinished.py").write_text("class Net(:\n")
    (tmp_path / "failing.py").write_text("\n\nraise RuntimeError('the database is down')\n")
    said = problems("--model", "unfinished.Net", "--data", "failing.Data", model=None, data=None)
    assert "model (command line): unfinished.Net: importing unfinished raised SyntaxError: invalid syntax" in said
    assert "(unfinished.py, line 1)" in said
    assert "failing raised RuntimeError: the database is down (failing.py, line 3, in <module>)" in said


def test_constructors_that_fail_are_named_at_once_with_their_places(capsys: pytest.CaptureFixture[str]) -> None:
    stopping = "trainer.callbacks=[{class_path: EarlyStopping, init_args: {monitor: a, mode: up}}]"
    said = ended(capsys, "model.lr=7", stopping, model=Steep)
    assert "model (command line): Steep raised ValueError: lr must be below 1, got 7.0 (" in said
    assert "test_app.py, line" in said
    assert "trainer.callbacks.0 (command line): EarlyStopping: mode='up' (expected 'min' or 'max')" in said
    with pytest.raises(ValueError, match="below 1") as caught:
        made("model.lr=7", model=Steep)
    assert caught.value.__notes__ == ["while creating model (Steep)"]


class Steep(Net):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        if lr > 1:
            raise ValueError(f"lr must be below 1, got {lr}")


def test_what_a_run_refuses_is_said_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train.py fit: there is no checkpoint at 'nope.ckpt'" in ended(capsys, "--ckpt_path", "nope.ckpt")
    assert "strategy='ddq' (did you mean 'ddp'?)" in ended(capsys, "trainer.strategy=ddq")

    class Refusing(lw.cli.CLI):
        def before_fit(self) -> None:
            raise ConfigError("mine", fix="look at the traceback.")  # the user's code: its place is of use

    with pytest.raises(ConfigError, match="mine"):
        Refusing(Net, Data, args=["fit", *QUIET])

    class Interrupted(lw.cli.CLI):
        def before_fit(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        Interrupted(Net, Data, args=["fit", *QUIET])
    assert caught.value.code == 130


# -- what is written -----------------------------------------------------------------------------------------------


class Rich(Net):
    def __init__(
        self,
        day: date = date(2026, 1, 2),
        flag: bool = False,
        size: Size = Size.LARGE,
        noise: Noise = Noise(0.25),  # noqa: B008  # as users write it
        place: Path = Path("a"),
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        layers: list[int] = [1, 2],  # noqa: B006
        name: str = "x",
        share: float = 0,
    ) -> None:
        super().__init__()
        self.rich = {"day": day, "flag": flag, "layers": layers, "name": name}


def test_every_default_is_printed_and_both_prints_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*args: str) -> str:
        with pytest.raises(SystemExit):
            made(*args, model=Rich)
        return capsys.readouterr().out

    args = ["model.layers+=3", "model.layers+=[4, 5]", "model.name=1e-3", "model.flag=yes", "trainer.strategy=ddp",
            "data.samples=${data.batch_size}", "optimizer=SGD", "lr_scheduler=StepLR",
            "lr_scheduler.step_size=1"]  # fmt: skip
    assert made(*args, model=Rich).model.rich == {
        "day": date(2026, 1, 2), "flag": True, "layers": [1, 2, 3, 4, 5], "name": "1e-3"
    }  # fmt: skip
    for form in ("--print-config", "--print-config=short"):
        first = printed(*args, form)
        (tmp_path / "printed.yaml").write_text(first)
        assert printed("--config", "printed.yaml", form) == first
    of_model = parse(printed("--print-config"), "x")["model"]["init_args"]
    assert of_model.pop("optimizer")["class_path"] == "torch.optim.SGD"
    assert of_model == {"day": "2026-01-02", "flag": False, "size": "LARGE", "noise": {"scale": 0.25, "seed": 0},
                        "place": "a", "layers": [1, 2], "name": "x", "share": 0.0}  # fmt: skip
    assert "model.day (command line): expected date, got tomorrow; write it as in 2026-12-31" in problems(
        "model.day=tomorrow", model=Rich
    )


TEXT = st.text(st.sampled_from(["\\", "$", "{", "}", "a", "'", " ", "?"]), max_size=8)


@settings(max_examples=60, deadline=None)
@given(TEXT.filter(lambda text: text != "???"))
@example("? ?")  # in YAML a mapping as a key
@example("\\???")  # in OmegaConf 2.4 an escape
@example("${\\")  # whose end OmegaConf 2.3 reads otherwise than 2.4
def test_no_text_that_is_saved_becomes_an_interpolation(text: str) -> None:
    found = Settings()
    found.lay(parse(write(escaped({"trainer": {"name": text, "more": [text]}})), "x"), "a file")
    assert resolve(found, lambda tree, path: EMPTY) == {"trainer": {"name": text, "more": [text]}}
    assert not found.problems


def test_a_file_that_no_run_has_written_is_left_alone(tmp_path: Path) -> None:
    mine = "model: {width: 3}  # my own\n"
    (tmp_path / "config.yaml").write_text(mine)
    with pytest.warns(UserWarning, match="was not written by a run and is kept"):
        lw.cli.CLI(Net, Data, args=["fit", *QUIET, "--config", "config.yaml", "trainer.max_steps=1"])
    assert (tmp_path / "config.yaml").read_text() == mine


class Writer(lw.BasePredictionWriter):
    def write_on_batch_end(self, *args: Any) -> None: ...


class Listening(Net):
    def on_predict_batch_end(self, *args: Any) -> None: ...


@pytest.mark.parametrize("kept_by", ["nobody", "a writer", "the module"])
def test_predictions_that_nobody_keeps_are_announced(
    kept_by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Listening if kept_by == "the module" else Net
    monkeypatch.setattr(model, "predict_step", lambda self, batch, batch_idx: batch[0], raising=False)
    monkeypatch.setattr(Data, "predict_dataloader", Data.val_dataloader, raising=False)
    defaults = {"callbacks": [Writer()]} if kept_by == "a writer" else {}
    lw.cli.CLI(model, Data, args=["predict", *QUIET], trainer_defaults=defaults, exits=False)
    text = capsys.readouterr().err
    assert ("no callback writes the predictions" in text) == (kept_by == "nobody")


def test_help_is_about_parameters_and_the_class_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*args: str) -> str:
        with pytest.raises(SystemExit) as caught:
            lw.cli.CLI(None, None, args=["fit", *args], program="train.py")
        assert caught.value.code == 0
        return capsys.readouterr().out

    named = "--model=fixtures.cli.cli_program.Net"
    assert "model.lr: float (default 0.1)" in said(named, "--help", "model")
    assert said("--help", "max_epochs").startswith("  trainer.max_epochs: int | null (default null)")
    assert said(named, "--help", "model.size") == "  model.size: SMALL | LARGE (default SMALL)\n"
    assert "EarlyStopping" in said("--help", "trainer.callbacks")
    assert "Adadelta" in said("--help", "optimizer")
    assert "trainer.devices: int | str | list[int]" in said("--help", "trainer")


def test_ranks_that_a_launcher_started_draw_the_same_seed() -> None:
    job = {"TORCHELASTIC_RUN_ID": "7", "MASTER_ADDR": "host", "MASTER_PORT": "1234", "WORLD_SIZE": "2"}
    assert draw_seed(1, {**job, "RANK": "0"}) == draw_seed(1, {**job, "RANK": "1"})
    assert draw_seed(1, job) != draw_seed(1, {**job, "MASTER_PORT": "1235"})
    assert draw_seed(2, {"MASTER_PORT": "1"}) == draw_seed(2, {"MASTER_PORT": "1", "NODE_RANK": "1"})
    assert draw_seed(1, {}) != draw_seed(1, {})
    assert draw_seed(2, {"LOOPWRIGHT_SEED": "5"}) == 5
    assert draw_seed(1, {"LOOPWRIGHT_SEED": "5", "PL_GLOBAL_SEED": "6"}) == 6  # of the process that started this one
    with pytest.raises(ConfigError, match="LOOPWRIGHT_SEED"):
        draw_seed(1, {"LOOPWRIGHT_SEED": "five"})
    assert draw_seed(1, {**job, "PL_GLOBAL_SEED": "5"}) == 5
