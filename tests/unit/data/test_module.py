"""Data modules and hyperparameters."""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, TensorDataset

import loopwright as lw
from loopwright.data import AttributeDict, DataModule
from loopwright.errors import ConfigError, ModuleError


class Base(DataModule):
    def __init__(self, root: str, size: int = 3, **kwargs: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Child(Base):
    def __init__(self, flavour: str = "plain", size: int = 7, *args: Any) -> None:
        super().__init__("here", size=size + 1, extra=1)


class Chosen(DataModule):
    def __init__(self, first: int, second: int, third: int) -> None:
        self.save_hyperparameters("first", "third", ignore="third")


class Config(DataModule):
    def __init__(self, conf: Any, other: int = 1) -> None:
        self.save_hyperparameters(conf)


@dataclass
class Fields(DataModule):
    a: int
    b: str = "x"

    def __post_init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)


def test_all_arguments_are_kept() -> None:
    module = Base("there", more=[1])
    assert module.hparams == {"root": "there", "size": 3, "more": [1]}
    assert module.hparams.more is not module.hparams_initial.more
    assert module._lw_hparams_name == "kwargs"
    assert module._lw_log_hyperparams


def test_a_subclass_adds_its_arguments_and_its_values_win() -> None:
    assert Child().hparams == {"root": "here", "size": 7, "extra": 1, "flavour": "plain"}


def test_chosen_names_without_ignored_ones() -> None:
    assert Chosen(1, 2, 3).hparams == {"first": 1}


@pytest.mark.parametrize(
    "conf", [{"lr": 0.1}, argparse.Namespace(lr=0.1), AttributeDict(lr=0.1), OmegaConf.create({"lr": 0.1})]
)
def test_one_object_becomes_the_hyperparameters(conf: Any) -> None:
    module = Config(conf)
    assert module.hparams.lr == 0.1
    assert module._lw_hparams_name == "conf"


def test_a_dataclass_is_read_from_its_init() -> None:
    module = Fields(1)
    assert module.hparams == {"a": 1, "b": "x"}
    assert not module._lw_log_hyperparams


def test_later_changes_do_not_reach_the_initial_copy() -> None:
    module = Base("there")
    module.hparams.size = 99
    assert (module.hparams["size"], module.hparams_initial.size) == (99, 3)


@pytest.mark.parametrize("base", [DataModule, lw.Module])
def test_a_constructor_may_change_its_containers_afterwards(base: Any) -> None:
    class Changing(base):  # type: ignore[misc]
        def __init__(self, config: Any, layers: Any, options: Any, conf: Any, shared: Any, **more: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            config["sizes"].append(config.pop("width"))
            layers[1].append(3)
            options.names["more"] = 1
            conf.betas[0] = 7
            more["extra"].clear()
            config["itself"]["sizes"] = None
            shared.values = []

    tensor, network, opaque = torch.ones(2), nn.Linear(1, 1), object()
    config: dict[str, Any] = {"width": 1, "sizes": [1], "tensor": tensor, "net": [network], "opaque": (opaque,)}
    config["itself"] = config
    tree = OrderedDict(a=defaultdict(list, b=[1]), c=Counter("aab"), d=deque([[1]], maxlen=3))
    module = Changing(
        config, (1, [2]), argparse.Namespace(names={}), OmegaConf.create({"betas": [1, "${betas[0]}"]}),
        SimpleNamespace(values=[1]), extra={1}, tree=tree,
    )  # fmt: skip
    tree["a"]["b"].append(2)
    tree["d"][0].append(2)
    kept = module.hparams
    assert (kept.config["width"], kept.config["sizes"]) == (1, [1])
    assert kept.config["itself"] is kept.config
    assert (kept.layers, kept.options.names, kept.extra, kept.shared.values) == ((1, [2]), {}, {1}, [1])
    assert (list(kept.conf.betas), type(kept.conf)) == ([1, 1], type(OmegaConf.create({})))
    assert kept.tree == OrderedDict(a={"b": [1]}, c=Counter("aab"), d=deque([[1]]))
    assert [type(value) for value in kept.tree.values()] == [defaultdict, Counter, deque]
    # What is not a plain container is kept by reference.
    assert kept.config["tensor"] is tensor
    assert kept.config["net"][0] is network
    assert kept.config["opaque"][0] is opaque


def test_a_checkpoint_has_the_arguments_as_they_were_passed(tmp_path: Path) -> None:
    class Popping(lw.Module):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(config.pop("width"), 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Popping({"width": 3})
    trainer = lw.Trainer(
        max_epochs=1, logger=False, accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, [torch.ones(2, 3)])
    trainer.save_checkpoint(tmp_path / "t.ckpt")
    assert Popping.load_from_checkpoint(tmp_path / "t.ckpt").net.in_features == 3
    fabric = lw.Fabric(accelerator="cpu")
    fabric.save(tmp_path / "f.ckpt", {"hparams": dict(module.hparams)})
    assert fabric.load(tmp_path / "f.ckpt")["hparams"] == {"config": {"width": 3}}


def test_a_second_call_adds() -> None:
    class Twice(DataModule):
        def __init__(self, a: int, b: int) -> None:
            self.save_hyperparameters("a")
            self.save_hyperparameters({"c": 5})

    assert Twice(1, 2).hparams == {"a": 1, "c": 5}


def test_modules_as_arguments_warn() -> None:
    with pytest.warns(UserWarning, match="'net' is an nn.Module"):
        Base("x", net=nn.Linear(1, 1))


def test_wrong_arguments_are_errors() -> None:
    class Unknown(DataModule):
        def __init__(self, first: int) -> None:
            self.save_hyperparameters("frist")

    with pytest.raises(ConfigError, match=r"no argument 'frist' \(did you mean 'first'\?\)"):
        Unknown(1)
    with pytest.raises(ConfigError, match="got a int"):
        Config(3)


def test_attribute_dict() -> None:
    entries = AttributeDict(a=1)
    entries.b = 2
    del entries.a
    assert entries == {"b": 2}
    assert repr(AttributeDict(a=1, long=2)) == '"a":    1\n"long": 2'
    with pytest.raises(AttributeError, match="did you mean 'batch_size'"):
        AttributeDict(batch_size=1).batchsize  # noqa: B018


def test_a_subclass_need_not_call_super() -> None:
    class Bare(DataModule):
        def __init__(self) -> None:
            pass

    module = Bare()
    assert (module.hparams, module.hparams_initial, module.trainer, module.name) == ({}, {}, None, None)
    assert module.state_dict() == {}


def test_a_missing_loader_is_an_error_that_names_the_hook() -> None:
    with pytest.raises(ConfigError, match="DataModule has no val_dataloader"):
        DataModule().val_dataloader()


def test_transfer_moves_to_the_device() -> None:
    batch = DataModule().transfer_batch_to_device([torch.zeros(1)], torch.device("meta"), 0)
    assert batch[0].device.type == "meta"


def test_from_datasets_has_the_hooks_of_the_sets_that_were_given() -> None:
    data = TensorDataset(torch.zeros(4, 1))
    module = DataModule.from_datasets(data, [data, data], {"a": data}, batch_size=2)
    train = module.train_dataloader()
    assert isinstance(train.sampler, RandomSampler)
    assert train.batch_size == 2
    assert [type(loader.sampler) for loader in module.val_dataloader()] == [SequentialSampler] * 2
    assert set(module.test_dataloader()) == {"a"}
    assert "predict_dataloader" not in vars(module)


def test_from_datasets_does_not_shuffle_iterable_data() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([1, 2])

    assert list(DataModule.from_datasets(Stream()).train_dataloader()) == [torch.tensor([1]), torch.tensor([2])]


def test_from_datasets_passes_arguments_on() -> None:
    module = Base.from_datasets(torch.zeros(2), root="r", batch_size=5)
    assert module.hparams == {"root": "r", "size": 3, "batch_size": 5, "num_workers": 0}


class Saved(DataModule):
    def __init__(self, root: str, size: int = 3) -> None:
        self.save_hyperparameters()
        self.seen = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def test_load_from_checkpoint_builds_the_module_and_loads_its_state(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"datamodule_hyper_parameters": {"root": "r", "size": 5}, "Saved": {"seen": 4}, "state_dict": {}}, path)
    module = Saved.load_from_checkpoint(path, size=9)
    assert (module.hparams, module.seen) == ({"root": "r", "size": 9}, 4)


def test_load_from_checkpoint_on_an_instance_is_an_error() -> None:
    with pytest.raises(ModuleError, match=r"it would leave as it is(?s:.*)new = Saved.load_from_checkpoint"):
        Saved("r", size=1).load_from_checkpoint("x.ckpt")


def test_load_from_checkpoint_names_a_missing_argument(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(TypeError, match="root"):
        Saved.load_from_checkpoint(tmp_path / "x.ckpt")


def test_a_subclass_removes_what_it_ignores() -> None:
    class Less(Base):
        def __init__(self, root: str, extra: int = 1) -> None:
            super().__init__(root)
            self.save_hyperparameters(ignore="size")

    assert dict(Less("here").hparams) == {"root": "here", "extra": 1}
