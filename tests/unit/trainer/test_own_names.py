"""Programs may give the objects that they hold and subclass attributes under any name; ours begin with `_lw_`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.compat.lightning import install, uninstall
from loopwright.lazy import is_core

# What programs call their attributes, and what Loopwright called its own or may come to call them.
PLAUSIBLE = [
    "batches", "cache", "config", "counts", "data", "dataset", "epoch_", "finish", "history", "hooks", "inner",
    "latest", "loader", "losses", "metrics_", "module", "names", "net", "output_", "plan", "pool", "progress_",
    "results", "run", "scheduler", "session", "start", "stats", "step", "store", "stream", "table", "window", "world",
]  # fmt: skip
# Names of Lightning's own modules, which mean the same in this layer.
LIGHTNING = {
    "_trainer", "_fabric", "_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams", "_strict_loading",
    "_fabric_optimizers", "_compiler_ctx", "_current_fx_name", "_set_hparams", "_apply_batch_transfer_handler",
}  # fmt: skip
# Of torch's modules, and of Python.
TORCH = {*dir(torch.nn.Module), *vars(torch.nn.Module()), "_abc_impl"}


def private_names(cls: type) -> set[str]:
    """Return the private names of the attributes and methods of our classes among the bases of a class."""
    found = set[str]()
    for base in cls.__mro__:
        if is_core(base):
            found.update(name for name in vars(base) if name.startswith("_") and not name.startswith("__"))
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    is_own = isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr.startswith("_")
                    found.update([node.attr] * is_own)
    return found


@pytest.mark.parametrize("cls", [lw.Trainer, lw.Module, lw.DataModule], ids=lambda cls: cls.__name__)
def test_private_names_have_a_prefix_that_no_program_uses(cls: type) -> None:
    assert sorted(name for name in private_names(cls) - TORCH if not name.startswith("_lw_")) == []


class Value:
    """A value that can be kept and copied, and nothing else."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("called a value of the program")

    def __bool__(self) -> bool:
        raise AssertionError("read a value of the program")


def names_for(cls: type) -> list[str]:
    """Return the names that a program gives attributes on an object of a class: none that its users know."""
    earlier = {f"_{name.removeprefix('_lw_')}" for name in private_names(cls)}
    wanted = {*PLAUSIBLE, *(f"_{name}" for name in PLAUSIBLE), *earlier}
    return sorted(name for name in wanted if not hasattr(cls, name) and name not in TORCH | LIGHTNING)


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
    bases = (library.Trainer, library.Module, library.DataModule, lw.Callback)
    made: Any = [type(base.__name__, (base,), {}) for base in (library.Trainer, lw.Callback)]

    class Model(Net, library.Module):  # type: ignore[misc]
        pass

    class Points(Data, library.DataModule):  # type: ignore[misc]
        pass

    classes = [made[0], Model, Points, made[1]]

    def mark(thing: Any, base: type) -> Any:
        for name in names_for(base) if named else []:
            setattr(thing, name, Value())
        return thing

    def trainer(**options: Any) -> Any:
        saving = lw.ModelCheckpoint(dirpath=folder, save_last=True, save_top_k=-1)
        return mark(
            classes[0](
                accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                callbacks=[mark(classes[3](), bases[3]), saving], **options,
            ),
            bases[0],
        )  # fmt: skip

    torch.manual_seed(0)
    for cls, base in zip(classes, bases, strict=True):
        mark(cls, base)
    model, data = mark(Model(), bases[1]), mark(Points(), bases[2])
    first = trainer(max_epochs=2)
    first.fit(model, datamodule=data)
    found = {verb: getattr(first, verb)(model, datamodule=data) for verb in ("validate", "test")}
    found["predict"] = torch.cat(first.predict(model, datamodule=data)).tolist()
    second, again = trainer(max_epochs=3), mark(Model(), bases[1])
    second.fit(again, datamodule=data, ckpt_path=folder / "last.ckpt")
    loaded = Model.load_from_checkpoint(folder / "last.ckpt")
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
