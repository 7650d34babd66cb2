from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import ValidatedNet, loader, net, quiet

import loopwright as lw

# Any in this file: arguments of a Trainer.

VERBS = ("fit", "validate", "test", "predict")


class Failing(ValidatedNet):
    """Raises in its second step."""

    def loss(self, batch: Any) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2:
            raise ArithmeticError
        return super().loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


class Manual(ValidatedNet):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Moving(ValidatedNet):
    """Changes each batch in a hook, and clears gradients itself."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [one * 2 for one in batch]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class Data(lw.DataModule):
    def train_dataloader(self) -> Any:
        return loader()

    val_dataloader = train_dataloader


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive_after(run: Callable[[Any, Any], Any], kind: type[ValidatedNet] = ValidatedNet, **kwargs: Any) -> list[str]:
    """Return which objects of a run still exist after the Trainer and the module were deleted."""
    trainer, module = quiet(max_epochs=2, **kwargs), net(kind)
    weak = [weakref.ref(trainer), weakref.ref(module), weakref.ref(module.net[0].weight)]
    with suppress(ArithmeticError):
        run(trainer, module)
    assert module.trainer is trainer
    del trainer, module
    return [type(one()).__name__ for one in weak if one() is not None]


def call(verb: str) -> Callable[[Any, Any], Any]:
    loaders = [loader(), loader()] if verb == "fit" else [loader()]
    return lambda trainer, module: getattr(trainer, verb)(module, *loaders)


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("kind", [ValidatedNet, Failing, Manual, Moving])
@pytest.mark.parametrize("verb", VERBS)
def test_a_finished_run_leaves_no_cycle(verb: str, kind: type[ValidatedNet]) -> None:
    assert alive_after(call(verb), kind) == []


def fit_and_test(trainer: Any, module: Any) -> None:
    trainer.fit(module, loader(), loader())
    trainer.test(dataloaders=loader(), ckpt_path="last")
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "x.ckpt")


def fit_twice(trainer: Any, module: Any) -> None:
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, loader(), loader())


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize(
    ("run", "kwargs"),
    [
        (fit_and_test, {"enable_checkpointing": True, "logger": True, "enable_progress_bar": True}),
        (fit_twice, {"profiler": "simple"}),
        (lambda trainer, module: trainer.fit(module, datamodule=Data()), {}),
        (call("fit"), {"accumulate_grad_batches": 3, "accumulate_across_epochs": True, "max_samples": 8}),
        (call("fit"), {"callbacks": lw.EarlyStopping("val_loss", strict=False)}),  # no step is logged
    ],
    ids=["fit, test, save", "twice", "data module", "carried window", "monitored"],
)
def test_neither_do_callbacks_loggers_and_kinds_of_loops(
    run: Callable[[Any, Any], Any], kwargs: Any, tmp_path: Path
) -> None:
    assert alive_after(run, default_root_dir=tmp_path, **kwargs) == []


def test_a_module_finds_its_trainer_as_long_as_it_exists() -> None:
    module = net(ValidatedNet)
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader(), loader())
    assert module.trainer is trainer
    assert module.global_step == trainer.global_step
    del trainer
    gc.collect()
    with pytest.raises(RuntimeError, match="its Trainer no longer exists"):
        module.trainer  # noqa: B018
    assert module.global_step == 0
    assert module.fabric is None


@pytest.mark.slow
def test_a_script_that_keeps_its_module_to_the_end_prints_no_error(tmp_path: Path) -> None:
    program = """
import torch, loopwright as lw

class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def train(module):
    trainer.fit(module, [torch.ones(1, 2)])

trainer = lw.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
module = Net()
train(module)
print(module.trainer.global_step)
"""
    script = tmp_path / "script.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split()[-1] == "1"
    assert "Exception ignored" not in done.stderr, done.stderr
