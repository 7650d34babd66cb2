"""A Trainer within a hook of another one, on the same module: the outer run continues as if there were no inner one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from toys import quiet

import loopwright as lw


class InnerError(Exception):
    """Ends an inner run."""


def data(num: int) -> DataLoader[Any]:
    x = torch.randn(num, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=2)


class Nested(lw.Module):
    """Runs a verb of another Trainer in one of its hooks, as deep as asked, and puts its weights back after it."""

    def __init__(self, hook: str = "", verb: str = "", *, depth: int = 1, fails: bool = False, manual: bool = False):
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.means = nn.ModuleDict({name: MeanMetric() for name in ("of_train", "of_val", "of_test")})
        self.hook, self.verb, self.depth, self.fails = hook, verb, depth, fails
        self.level = self.num_inner = 0
        self.seen: list[Any] = []

    def maybe_run(self, hook: str) -> None:
        if hook != self.hook or self.level == self.depth:
            return
        self.level += 1
        self.num_inner += 1
        state, trainer = (
            copy.deepcopy(self.state_dict()),
            quiet(max_epochs=1, limit_val_batches=2 if self.verb == "validate" else 0),
        )
        try:
            getattr(trainer, self.verb)(self, data(4))
        except InnerError:
            assert self.fails
        self.load_state_dict(state)
        self.level -= 1

    def compute(self, batch: list[Tensor], name: str) -> Tensor:
        if self.level and self.fails:
            raise InnerError
        loss: Tensor = self.layers(batch[0]).square().mean()
        mean = self.means[f"of_{name}"]
        mean(loss.detach())
        self.log(name, loss, on_step=False, on_epoch=True)
        self.log(f"{name}_mean", mean, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.maybe_run("training_step")
        loss = self.compute(batch, "train")
        if not self.level:
            self.seen.append((loss.item(), self.training))
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.compute(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.compute(batch, "test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.maybe_run("on_before_optimizer_step")

    def on_train_batch_end(self, *args: Any) -> None:
        self.maybe_run("on_train_batch_end")

    def on_validation_batch_end(self, *args: Any) -> None:
        self.maybe_run("on_validation_batch_end")

    def on_train_epoch_end(self) -> None:
        self.maybe_run("on_train_epoch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Rows(lw.Callback):
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_train_epoch_end(self, trainer: lw.Trainer, pl_module: lw.Module) -> None:
        assert pl_module.trainer is trainer
        assert pl_module.fabric is trainer.fabric
        self.rows.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def outer_run(*args: Any, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(3)
    module, rows = Nested(*args, **options), Rows()
    trainer = quiet(max_epochs=4, callbacks=[rows, lw.EarlyStopping("val", patience=1, min_delta=0.01)])
    trainer.fit(module, data(6), data(4))
    assert bool(args) == bool(module.num_inner)
    assert module.trainer is trainer
    assert module._lw_log is None
    weights = [value.tolist() for name, value in module.state_dict().items()]
    return rows.rows, module.seen, trainer.current_epoch, trainer.global_step, weights


@pytest.mark.parametrize(
    ("hook", "verb", "options"),
    [
        ("training_step", "fit", {}),
        ("on_before_optimizer_step", "fit", {"depth": 2}),
        ("on_train_batch_end", "fit", {"manual": True}),  # its steps are not the outer run's
        ("on_train_batch_end", "test", {"fails": True}),
        ("on_validation_batch_end", "fit", {"fails": True}),  # gradients are on there
        ("on_validation_batch_end", "validate", {"depth": 2}),
        ("on_train_epoch_end", "predict", {}),
    ],
)
def test_the_outer_run_continues_as_without_the_inner_one(hook: str, verb: str, options: dict[str, Any]) -> None:
    plain = outer_run(manual=options.get("manual", False))
    assert plain[2] < 4  # EarlyStopping ended it
    assert outer_run(hook, verb, **options) == plain


def test_a_run_that_fails_before_its_hooks_gives_the_module_back() -> None:
    class Refuses(Nested):
        def configure_callbacks(self) -> Any:
            if self.level:
                raise InnerError
            return []

    module = Refuses("on_train_batch_end", "fit", fails=True)
    trainer = quiet(max_epochs=1, limit_val_batches=0)
    trainer.fit(module, data(4))
    assert trainer.callback_metrics["train"] == pytest.approx(sum(loss for loss, _ in module.seen) / 2)


def test_a_run_on_a_part_and_a_data_module_gives_both_back() -> None:
    class Data(lw.DataModule):
        def train_dataloader(self) -> Any:
            return data(4)

        def test_dataloader(self) -> Any:
            return data(4)

    class Whole(Nested):
        def __init__(self) -> None:
            super().__init__()
            self.part = Nested()

        def on_train_epoch_end(self) -> None:
            quiet().test(self.part, datamodule=source)
            assert source.trainer is self.trainer is self.part.trainer is trainer
            self.part.log("of_part", 1.0)

    source, trainer = Data(), quiet(max_epochs=1, limit_val_batches=0)
    trainer.fit(Whole(), datamodule=source)
    assert trainer.callback_metrics["of_part"] == 1
