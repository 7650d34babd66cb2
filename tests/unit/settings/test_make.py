"""Settings in a checkpoint that may be somebody else's: they name classes, and nothing is imported or called."""

from __future__ import annotations

import collections.abc
import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.settings.make import make

SETTINGS = "lightning.pytorch.cli.instantiate_module"
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "called"]}}
CALL = {"class_path": "subprocess.getoutput", "init_args": {"cmd": "touch called"}}
IMPORT = {"class_path": "attacker.Layer", "init_args": {}}
ATTACKS: dict[str, object] = {
    "function with arguments": CALL,
    "class with arguments": POPEN,
    "module of the attacker": IMPORT,
    "in a list": [POPEN],
    "in a dict": {"a": CALL},
    "as Hydra names it": {"_target_": "subprocess.Popen", "args": ["touch", "called"]},
    "partial": {**POPEN, "partial": True},
    "below a harmless class": {"class_path": "torch.nn.ReLU", "init_args": {"inplace": POPEN}},
    "with open arguments": {"class_path": f"{__name__}.Open", "init_args": {"further": CALL}},
    "function by its name": "subprocess.getoutput",
    "class of the attacker by its name": "attacker.Layer",
}
T = TypeVar("T")
ANNOTATIONS: dict[str, Any] = {
    "module": nn.Module,
    "factory": Callable[..., nn.Module],
    "callable": Callable,
    "returns anything": Callable[..., Any],
    "returns object": Callable[..., object],
    "class": type,
    "class of anything": type[Any],
    "class of modules": type[nn.Module],
    "anything": Any,
    "object": object,
    "type variable": T,
    "unknown name": "Undefined",
    "text": "Callable[..., nn.Module]",
    "none": None,
    "modules": list[nn.Module],
    "functions by name": dict[str, Callable[..., Any]],
    "module or text": nn.Module | str,
    "module or mapping": nn.Module | dict[str, Any],
    "protocol of contexts": contextlib.AbstractContextManager,
    "protocol of hashable objects": collections.abc.Hashable,
}


class Open(nn.Module):
    def __init__(self, **further: object) -> None:
        super().__init__()


class Net(lw.Module):
    """Calls what it gets, as models call their `act_layer`."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part() if callable(part) and not isinstance(part, nn.Module) else part


def net(annotation: object) -> type[Net]:
    def __init__(self: Net, part: Any) -> None:
        Net.__init__(self, part)

    __init__.__annotations__ = {} if annotation is None else {"part": annotation}
    return type("Other", (Net,), {"__init__": __init__, "__module__": __name__})


def saved(path: Path, **hparams: object) -> Path:
    torch.save({"state_dict": {}, "hyper_parameters": {"_instantiator": SETTINGS, **hparams}}, path)
    return path


@pytest.mark.parametrize("annotation", ANNOTATIONS.values(), ids=ANNOTATIONS)
def test_a_file_starts_and_imports_nothing(annotation: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "attacker.py").write_text("open('imported', 'w')\nfrom torch.nn import ReLU as Layer\n")
    for name, attack in ATTACKS.items():
        path = saved(tmp_path / "x.ckpt", part=attack)
        module = None
        with contextlib.suppress(ConfigError):
            module = net(annotation).load_from_checkpoint(path)
        assert not (tmp_path / "called").exists(), name
        assert not (tmp_path / "imported").exists(), name
        assert "attacker" not in sys.modules
        if module is not None and name != "as Hydra names it":  # plain values are passed on
            assert module.part == attack or name == "with open arguments", name


def test_the_error_names_the_argument_to_pass(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", part=CALL)
    with pytest.raises(ConfigError, match=r"(?s)subprocess.getoutput is not a class.*pass it yourself.*part=\.\.\."):
        net(Callable[..., nn.Module]).load_from_checkpoint(path)
    module = net(Callable[..., nn.Module]).load_from_checkpoint(path, part=nn.Identity)
    assert isinstance(module.part, nn.Identity)


def test_classes_of_the_annotation_are_made(tmp_path: Path) -> None:
    gelu = {"class_path": "torch.nn.GELU", "init_args": {"approximate": "tanh"}}
    for annotation in (nn.Module, Callable[..., nn.Module], "nn.Module", nn.Module | None):
        part = net(annotation).load_from_checkpoint(saved(tmp_path / "x.ckpt", part=gelu)).part
        assert isinstance(part, nn.GELU)
        assert part.approximate == "tanh"
    assert isinstance(net(type[nn.Module]).load_from_checkpoint(saved(tmp_path / "x.ckpt", part="GELU")).part, nn.GELU)


def test_classes_that_the_caller_trusts_are_imported_and_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trusted_parts").mkdir()
    (tmp_path / "trusted_parts" / "__init__.py").write_text("")
    (tmp_path / "trusted_parts" / "later.py").write_text("from torch.nn import ReLU\nclass Layer(ReLU): pass\n")
    import trusted_parts  # type: ignore[import-not-found]  # written above

    loss = {"class_path": "torch.nn.CrossEntropyLoss", "init_args": {"label_smoothing": 0.5}}
    later = {"class_path": "trusted_parts.later.Layer", "init_args": {}}
    with pytest.raises(ConfigError, match="is not imported"):
        make(net(nn.Module), {"part": later})
    assert type(make(net(nn.Module), {"part": later}, trusted_classes=[trusted_parts]).part).__name__ == "Layer"
    for trusted in (nn.CrossEntropyLoss, nn):
        for annotation in (Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
            saved(tmp_path / "x.ckpt", part=loss)
            build = net(annotation).load_from_checkpoint
            with pytest.raises(ConfigError, match="trusted_classes"):
                build(tmp_path / "x.ckpt")
            # Net calls it without arguments only if it is no module.
            assert build(tmp_path / "x.ckpt", trusted_classes=[trusted]).part.label_smoothing == 0.5
    with pytest.raises(ConfigError, match="not a class"):
        make(net(Callable), {"part": CALL}, trusted_classes=[subprocess])


def test_a_subclass_must_be_imported(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", _class_path="attacker.Layer", part=1)
    with pytest.raises(ConfigError, match=r"(?s)attacker.Layer is not imported.*import the module"):
        Net.load_from_checkpoint(path)
    assert type(Net.load_from_checkpoint(saved(path, _class_path=f"{__name__}.Sub", part=1))) is Sub


class Sub(Net):
    pass


def test_arguments_of_the_caller_are_not_restricted(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", part=1, **{"a.b": 1})
    typed = net(Callable[..., Any]).load_from_checkpoint(path, part=lambda: "called")
    assert typed.part == "called"


def test_a_key_with_dots_does_not_pass_for_a_setting_of_the_caller(tmp_path: Path) -> None:
    class Keywords(lw.Module):
        def __init__(self, part: object = None, **others: Any) -> None:
            super().__init__()

    attack = {"part.further": {"class_path": f"{__name__}.Open", "init_args": {"x": POPEN}}}
    with pytest.raises(ConfigError, match="names no class"):
        Keywords.load_from_checkpoint(saved(tmp_path / "x.ckpt", **attack), part=1)


def test_data_modules_have_the_same_rule(tmp_path: Path) -> None:
    class Data(lw.DataModule):
        def __init__(self, transform: Callable[..., Any]) -> None:
            super().__init__()
            transform()

    hparams = {"_instantiator": SETTINGS, "transform": CALL}
    torch.save({"datamodule_hyper_parameters": hparams}, tmp_path / "x.ckpt")
    with pytest.raises(ConfigError, match=r"(?s)pass it yourself.*transform=\.\.\."):
        Data.load_from_checkpoint(tmp_path / "x.ckpt")
    called = []
    Data.load_from_checkpoint(tmp_path / "x.ckpt", transform=lambda: called.append(1))
    assert called == [1]


def test_a_required_mapping_has_the_entries_of_the_file() -> None:
    assert make(net(dict[str, int]), {"part": {"a": 1}}).part == {"a": 1}


# -- the configuration of a run, in its checkpoint -------------------------------------------------------------------


class Plain(lw.Module):
    def __init__(self, act: Callable[..., nn.Module] = nn.ReLU, width: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.act = act()
        self.width = width

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.layer(batch).sum())

    def test_dataloader(self) -> object:
        return torch.utils.data.DataLoader(torch.ones(2, 1))


def evaluated(path: Path, text: str, *line: str) -> lw.cli.CLI:
    """Test the module in a checkpoint whose configuration is `text`."""
    state = {"state_dict": Plain().state_dict(), "callbacks": {"SaveConfig": {"config": text}}}
    torch.save({**state, "epoch": 0, "global_step": 0, "pytorch-lightning_version": "2.5"}, path)
    quiet = ("trainer.logger=false", "trainer.enable_progress_bar=false", "trainer.accelerator=cpu")
    return lw.cli.CLI(Plain, args=["test", f"ckpt_path={path}", *quiet, *line], exits=False, save_config=False)


CONFIGURATIONS = {
    "function": "model: {act: subprocess.getoutput}",
    "function with arguments": "model: {act: {class_path: subprocess.getoutput, init_args: {cmd: touch called}}}",
    "model": "model: {class_path: attacker.Layer}",
    "callback": "trainer: {callbacks: [{class_path: attacker.Layer}]}",
    "optimizer": "optimizer: {class_path: attacker.Layer}",
    "function as optimizer": "optimizer: {class_path: attacker.optimizer}",
    "interpolation": "model: {width: '${oc.env:HOME}'}",
    "another file": "trainer: {callbacks: ['other.yaml']}",
    "a list": "[1]",
    "no names": "{1: 2}",
    "no YAML": "model: [",
}


@pytest.mark.parametrize("text", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_the_configuration_in_a_checkpoint_starts_and_imports_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "attacker.py").write_text("open('imported', 'w')\n")
    (tmp_path / "other.yaml").write_text("class_path: loopwright.EarlyStopping\ninit_args: {monitor: x}\n")
    with pytest.raises(ConfigError):
        evaluated(tmp_path / "x.ckpt", text)
    assert not (tmp_path / "called").exists()
    assert not (tmp_path / "imported").exists()


def test_what_the_user_writes_takes_the_place_of_what_a_checkpoint_must_not_name(tmp_path: Path) -> None:
    text = "model: {act: torch.nn.functional.relu, width: 3}\ntrainer: {callbacks: [{class_path: loopwright.Timer}]}\n"
    with pytest.raises(ConfigError, match=r"(?s)act .the configuration in .*set model.act yourself"):
        evaluated(tmp_path / "x.ckpt", text)
    made = evaluated(tmp_path / "x.ckpt", text, "model.act=torch.nn.GELU")
    assert isinstance(made.model.act, nn.GELU)
    assert made.model.width == 3
