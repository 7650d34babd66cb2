"""Objects among hyperparameters: never silently something else, in whichever reader."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import functools
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn
from toys import Net, loader, quiet

import loopwright as lw
from loopwright.errors import ConfigError


class Kind(enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Options:
    width: int = 5


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


Pair = namedtuple("Pair", "a b")
COUNTS = defaultdict(int, a=1)

# What the constructor gets is equal to what was saved, as a plain value.
KEPT: dict[str, Any] = {
    "IntEnum": Level.HIGH,
    "np.float64": np.float64(2.5),
    "np.int64": np.int64(3),
    "namedtuple": Pair(1, 2),
    "OrderedDict": OrderedDict(a=1),
    "defaultdict": COUNTS,
    "set": {1, 2},
    "frozenset": frozenset({1, 2}),
    "torch.dtype": torch.bfloat16,
    "torch.device": torch.device("cpu"),
    "nested": {"layers": [1, {"rate": 0.5}]},
}

# These are not in the file as they are.
TO_PASS: dict[str, Any] = {
    "module": nn.GELU(),
    "class": nn.GELU,
    "function": torch.relu,
    "lambda": lambda x: x,
    "partial": functools.partial(torch.relu),
    "Enum": Kind.FAST,
    "timedelta": datetime.timedelta(seconds=1),
    "dataclass": Options(7),
    "Namespace": argparse.Namespace(width=7),
    "Tensor subclass": torch.ones(2).as_subclass(Tagged),
    "object in a dict": {"activation": nn.GELU(), "width": 3},
    "object in a list": [nn.GELU()],
}


class Model(Net):
    """Has a default that is something else than what it is made with."""

    def __init__(self, argument: Any = "the default", width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.argument = argument


class Data(lw.DataModule):
    def __init__(self, argument: Any = "the default") -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.argument = argument

    def train_dataloader(self) -> Any:
        return loader()


def saved(argument: Any, path: Path) -> Path:
    """Return the path of a checkpoint of a module that was made with the argument."""
    trainer = quiet(max_epochs=1, limit_train_batches=1)
    trainer.fit(Model(argument, width=4), datamodule=Data(argument))
    trainer.save_checkpoint(path)
    return path


pytestmark = pytest.mark.filterwarnings("ignore:The argument 'argument' is an nn.Module")


@pytest.mark.parametrize("name", KEPT)
def test_what_has_an_equal_plain_form_comes_back_in_it(name: str, tmp_path: Path) -> None:
    path = saved(KEPT[name], tmp_path / "x.ckpt")
    for built in (Model.load_from_checkpoint(path), Data.load_from_checkpoint(path)):
        assert built.argument == KEPT[name]
    content = torch.load(path, weights_only=True)
    assert content["hyper_parameters"] == {"argument": KEPT[name], "width": 4}
    assert "hyper_parameters_to_pass" not in content


def test_a_path_comes_back_as_its_text(tmp_path: Path) -> None:
    path = saved(Path("a/b"), tmp_path / "x.ckpt")
    assert Model.load_from_checkpoint(path).argument == "a/b"


@pytest.mark.parametrize("name", TO_PASS)
def test_what_has_none_has_to_be_passed_and_the_error_shows_the_call(name: str, tmp_path: Path) -> None:
    argument = TO_PASS[name]
    path = saved(argument, tmp_path / "x.ckpt")
    for cls in (Model, Data):
        with pytest.raises(ConfigError, match=r"argument was (.|\n)*load_from_checkpoint\('.*', argument=\.\.\.\)"):
            cls.load_from_checkpoint(path)
        assert cls.load_from_checkpoint(path, argument=argument).argument is argument
    assert Model.load_from_checkpoint(path, argument=argument).hparams.width == 4
    resumed = quiet(max_epochs=2, limit_train_batches=1)
    resumed.fit(Model(argument, width=4), datamodule=Data(argument), ckpt_path=path)
    assert resumed.global_step == 2


@pytest.mark.parametrize("weights_only", [True, False])
def test_another_reader_finds_no_stand_in(weights_only: bool, tmp_path: Path) -> None:
    path = saved(nn.GELU(), tmp_path / "x.ckpt")
    content = torch.load(path, weights_only=weights_only)
    assert "argument" not in content["hyper_parameters"]
    assert "nn.modules.activation.GELU" in content["hyper_parameters_to_pass"]["argument"]
    # Lightning refuses an instantiator that it does not know, and shows its text.
    assert content["hyper_parameters"]["_instantiator"].startswith("loopwright.Model(argument=...)")


def test_a_new_process_without_the_class_gets_an_error_that_describes_it(tmp_path: Path) -> None:
    path = saved(Kind.FAST, tmp_path / "x.ckpt")
    program = f"""
import loopwright as lw, torch
class Model(lw.Module):
    def __init__(self, argument=None, width=3):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.argument = argument
try:
    Model.load_from_checkpoint({str(path)!r})
except lw.ConfigError as error:
    print(error)
print(Model.load_from_checkpoint({str(path)!r}, argument="fast").argument)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "argument was <Kind.FAST: 'fast'>" in done.stdout
    assert done.stdout.splitlines()[-1] == "fast"


def test_a_loggers_text_of_an_object_does_not_stand_in_for_it(tmp_path: Path) -> None:
    path, file = saved(nn.GELU(), tmp_path / "x.ckpt"), tmp_path / "hparams.yaml"
    file.write_text("argument: GELU()\nwidth: 4\n")
    for cls in (Model, Data):
        with pytest.raises(ConfigError, match="argument was GELU"):
            cls.load_from_checkpoint(path, hparams_file=file)
    built = Model.load_from_checkpoint(path, hparams_file=file, argument=nn.ReLU())
    assert isinstance(built.argument, nn.ReLU)


class Configured(Net):
    def __init__(self, cfg: Any, sizes: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class OneConfig(Net):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters(cfg)


def saved_from(module: Any, folder: Path) -> Path:
    trainer = quiet(max_epochs=1, default_root_dir=folder)
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder / "x.ckpt")
    torch.load(folder / "x.ckpt", weights_only=True)
    return folder / "x.ckpt"


def test_omegaconf_arguments_come_back_as_such(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"width": 3, "twice": "${width}", "inner": {"a": [1, 2]}})
    module = Configured(cfg, sizes=OmegaConf.create([1, 2]))
    assert module.hparams.cfg.inner.a == [1, 2]
    again = Configured.load_from_checkpoint(saved_from(module, tmp_path))
    assert isinstance(again.hparams.cfg, DictConfig)
    assert isinstance(again.hparams.sizes, ListConfig)
    assert (again.hparams.cfg.twice, again.hparams.cfg.inner.a[1]) == (3, 2)
    again.hparams.cfg.width = 4
    assert again.hparams.cfg.twice == 4
    plain = Configured.load_from_checkpoint(tmp_path / "x.ckpt", cfg={"mine": 1})
    assert plain.hparams.cfg == {"mine": 1}


def test_interpolations_that_lead_out_of_an_argument_are_resolved(tmp_path: Path) -> None:
    whole = OmegaConf.create({"width": 3, "net": {"twice": "${width}"}})
    again = Configured.load_from_checkpoint(saved_from(Configured(whole.net), tmp_path))
    assert again.hparams.cfg == {"twice": 3}


def test_omegaconf_hyperparameters_come_back_as_such(tmp_path: Path) -> None:
    path = saved_from(OneConfig(OmegaConf.create({"lr": 0.1, "net": {"width": 3}})), tmp_path)
    again = OneConfig.load_from_checkpoint(path, lr=0.5)
    assert isinstance(again.hparams, DictConfig)
    assert (again.hparams.lr, again.hparams.net.width) == (0.5, 3)


def test_a_file_calls_no_resolver_of_omegaconf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setenv("SECRET", "the value of today")
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register("call", lambda text: called.append(text) or text)
    try:
        cfg = OmegaConf.create(
            {"home": "${oc.env:SECRET}", "n": {"a": "${call:1}"}, "twice": "${n}", "of": ["${home}"]}
        )
        path = saved_from(Configured(cfg, sizes=OmegaConf.create([1, "${call:2}"])), tmp_path)
        monkeypatch.setenv("SECRET", "the value of tomorrow")
        called.clear()
        again = Configured.load_from_checkpoint(path).hparams
        assert OmegaConf.to_container(again.cfg, resolve=True) == {
            "home": "the value of today", "n": {"a": 1}, "twice": {"a": 1}, "of": ["the value of today"]
        }  # fmt: skip
        assert OmegaConf.to_container(again.cfg)["twice"] == "${n}"
        assert list(again.sizes) == [1, 2]

        content = torch.load(path, weights_only=True)
        for text in ("${call:x}", "a${call:x}b", "${n.${call:x}}", r"\\${call:x}", "${ call:x}", "${call:${n.a}}"):
            content["hyper_parameters_omegaconf"]["cfg"] = {"home": text}
            content["hyper_parameters"]["cfg"] = {"home": text}
            torch.save(content, path)
            assert Configured.load_from_checkpoint(path).hparams.cfg.home == text
        assert called == []
    finally:
        OmegaConf.clear_resolver("call")


@pytest.mark.parametrize("text", ["argument: ${call:x}", "argument: [{a: 'x${oc.env:HOME}'}]"])
def test_a_file_of_hyperparameters_calls_no_resolver(text: str, tmp_path: Path) -> None:
    path = saved(1, tmp_path / "x.ckpt")
    (tmp_path / "hparams.yaml").write_text(text)
    for cls in (Model, Data):
        with pytest.raises(ConfigError, match=r"(?s)argument has the interpolation.*argument=\.\.\."):
            cls.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml")
    (tmp_path / "hparams.yaml").write_text("width: 7\nargument: {a: '${width}', b: yes, c: 1e-3}\n")
    built = Model.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml")
    assert built.argument == {"a": 7, "b": "yes", "c": 0.001}
