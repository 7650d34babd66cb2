"""A second `fit` of one Trainer equals one fit of the total length, bit for bit; what starts anew is said."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_program import digest
from toys import ValidatedNet, assert_same, loader, quiet

import loopwright as lw

Configure = Callable[[Any], Any]


def decayed(module: Any) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def warmed_up(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def plateau(module: Any) -> Any:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def lbfgs(module: Any) -> Any:
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)


class Net(ValidatedNet):
    """Logs, draws random numbers, and is trained as `configure` says."""

    def __init__(self, configure: Configure = decayed) -> None:
        super().__init__(dropout=0.3)
        self.configure = configure

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class Manual(Net):
    """Steps two optimizers with momentum itself, one of them every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        if batch_idx % 2 == 0:
            second.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()

    def configure_optimizers(self) -> Any:
        weight, bias, *others = self.net.parameters()
        return torch.optim.Adam([weight, bias], lr=0.01), torch.optim.SGD(others, lr=0.05, momentum=0.9)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "epoch schedule": (Net, {}),
    "step schedule": (lambda: Net(warmed_up), {"accumulate_grad_batches": 2}),
    "plateau": (lambda: Net(plateau), {}),
    "scaler": (Net, {"precision": "16-mixed"}),
    "closure": (lambda: Net(lbfgs), {}),
    "manual": (Manual, {}),
}


def trainer_for(folder: Path, **arguments: Any) -> lw.Trainer:
    return quiet(
        default_root_dir=folder,
        logger=lw.CSVLogger(folder, "csv", version=0),
        enable_checkpointing=True,
        log_every_n_steps=1,
        callbacks=[
            lw.EMA(0.8),
            lw.EarlyStopping("val_loss", patience=9),
            lw.ModelCheckpoint(folder / "kept", "{step}", "val_loss", save_top_k=2),
        ],
        **arguments,
    )


def state(trainer: lw.Trainer, module: Any, folder: Path) -> dict[str, Any]:
    """Return what one run and two have to have in common."""
    return {
        "optimizers": [digest(one.state_dict()) for one in trainer.optimizers],
        "schedules": [_plain(one.scheduler.state_dict()) for one in trainer.lr_scheduler_configs],
        "scaler": trainer.scaler.state_dict() if trainer.scaler is not None else None,
        "callbacks": [digest(_without_paths(one.state_dict())) for one in trainer.callbacks],
        "progress": {name: x for name, x in trainer.progress.state_dict().items() if name != "validated_s"},
        "rows": (folder / "csv/version_0/metrics.csv").read_text(),
        "draw": float(torch.rand(())),
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not callable(value)}


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if "path" not in name and "models" not in name and name != "dirpath"
    }


def data() -> tuple[Any, Any]:
    return loader(16, shuffle=True), loader(4, seed=2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("between", [None, "validate"])
def test_two_fits_equal_one_of_the_total_length(name: str, between: str | None, tmp_path: Path) -> None:
    make, arguments = CASES[name]
    lw.seed_everything(3, verbose=False)
    once, whole = trainer_for(tmp_path / "once", max_epochs=3, **arguments), make()
    once.fit(whole, *data())
    expected = state(once, whole, tmp_path / "once")

    lw.seed_everything(3, verbose=False)
    twice, module = trainer_for(tmp_path / "twice", max_epochs=1, **arguments), make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice.fit(module, *data())
        for epochs in (2, 3):
            if between is not None:
                rng = torch.get_rng_state()
                twice.validate(module, data()[1], verbose=False)
                torch.set_rng_state(rng)
            twice.fit_loop.max_epochs = epochs
            twice.fit(module, *data())
    assert_same(module, whole)
    found = state(twice, module, tmp_path / "twice")
    if between is not None:  # those validations have logged rows and counted batches
        for one in (expected, found):
            del one["rows"], one["progress"]["eval_batches"]
    assert found == expected


def faster(module: Any) -> Any:
    module.lr = 0.02 if getattr(module, "lr", None) is None else 0.5
    return torch.optim.AdamW(module.parameters(), lr=module.lr)


def other_class(module: Any) -> Any:
    module.fits = getattr(module, "fits", 0) + 1
    return (torch.optim.AdamW if module.fits == 1 else torch.optim.SGD)(module.parameters(), lr=0.01)


def more(module: Any) -> Any:
    module.fits = getattr(module, "fits", 0) + 1
    weight, *others = module.parameters()
    first = torch.optim.Adam([weight, *others] if module.fits == 1 else others, lr=0.01)
    return first if module.fits == 1 else [first, torch.optim.Adam([weight], lr=0.01)]


def regrouped(module: Any) -> Any:
    module.fits = getattr(module, "fits", 0) + 1
    weight, *others = module.parameters()
    return torch.optim.Adam([weight, *others] if module.fits == 1 else [{"params": [weight]}, {"params": others}])


def one_cycle(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    total = int(module.trainer.estimated_stepping_batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def two_fits(module: Any, other: Any = None) -> tuple[lw.Trainer, list[str]]:
    """Fit one epoch, and another one; return what the second fit warned of."""
    trainer = quiet(max_epochs=1)
    trainer.fit(module, *data())
    trainer.fit_loop.max_epochs = 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(other or module, *data())
    return trainer, [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("configure", "said"),
    [
        (faster, "AdamW: lr=0.5 is configured now, and was 0.02"),
        (other_class, "SGD starts from scratch: it was AdamW"),
        (regrouped, "Adam starts from scratch: .*other parameter groups"),
        (one_cycle, r"schedule 0 \(OneCycleLR\) starts from scratch: it is configured differently"),
    ],
)
def test_what_is_configured_otherwise_holds_and_is_said_once(configure: Configure, said: str) -> None:
    trainer, messages = two_fits(Net(configure))
    assert len(messages) == 1
    assert re.search(f"continues at epoch 1, step 8, and {said}", messages[0])
    assert trainer.global_step == 16
    if configure is faster:
        [optimizer] = trainer.optimizers
        assert [group["lr"] for group in optimizer.param_groups] == [0.5]
        assert {float(one["step"]) for one in optimizer.state.values()} == {16}  # its averages go on


def test_another_number_of_optimizers_starts_all_anew() -> None:
    module = Net(more)
    module.automatic_optimization = False
    module.training_step = lambda batch, batch_idx: None
    _, [message] = two_fits(module)
    assert "returns 2 optimizers, and returned 1: all start from scratch" in message


def test_another_module_starts_anew_and_that_is_said() -> None:
    module = Net()
    trainer, [message] = two_fits(Net(), module)
    assert "Net is not the module of the last fit: its optimizers and schedules start from scratch" in message
    assert {float(one["step"]) for one in trainer.optimizers[0].state.values()} == {8}


def test_a_second_fit_from_a_checkpoint_takes_all_from_there(tmp_path: Path) -> None:
    lw.seed_everything(3, verbose=False)
    trainer, module = quiet(max_epochs=1), Net()
    trainer.fit(module, *data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, *data())
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.fit(module, *data(), ckpt_path=tmp_path / "one.ckpt")
    assert_same(module, expected)


class Reading(lw.Module):
    """Notes the first number of each batch, and makes loaders if it has any."""

    def __init__(self, own: Any = None) -> None:
        super().__init__()
        self.net, self.seen, self.own = torch.nn.Linear(1, 1), list[Any](), own

    def train_dataloader(self) -> Any:
        return self.own()

    def on_train_epoch_start(self) -> None:
        self.seen.append("epoch")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((batch_idx, int(batch[0])))
        self.log("mean", batch.mean(), on_step=False, on_epoch=True)
        return self.net(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Given(lw.DataModule):
    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def train_dataloader(self) -> Any:
        return read(self.data)


def numbers(start: int) -> Any:
    return torch.arange(start, start + 8, dtype=torch.float32)[:, None]


def read(data: Any, **options: Any) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=2, **options)


first, others = numbers(0), numbers(100)
sampled = read(first, sampler=range(8))
given = Given(first)
# What the first fit reads, what the second one does, and whether it continues.
SECOND: dict[str, tuple[Any, Any, bool]] = {
    "the same": (sampled, sampled, True),
    "one like it over the same data": (read(first), read(first), True),
    "a list of batches": ([*first.split(2)], [*others.split(2)], False),
    "of another kind": (read(first), [*others.split(2)], False),
    "other data": (read(first), read(others), False),
    "another sampler": (sampled, read(first, sampler=range(8)), False),
    "a collection": ([read(first)], [read(first)], True),
    "another collection": ([read(first)], [read(others)], False),
    "a data module": (given, given, True),
    "another data module": (given, Given(others), False),
    "a loader after a data module": (given, read(others), False),
    "the module's own": (None, None, True),
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("reload", [0, 1])
def test_another_loader_begins_at_its_beginning_after_a_stop_within_an_epoch(
    name: str, reload: int, caplog: pytest.LogCaptureFixture
) -> None:
    before, now, continues = SECOND[name]
    is_collection = "collection" in name
    module = Reading((lambda: read(first)) if before is None else None)
    if is_collection:
        module.training_step = lambda batch, batch_idx: Reading.training_step(module, batch[0], batch_idx)  # type: ignore[method-assign]
    trainer = quiet(max_steps=2, max_epochs=3, reload_dataloaders_every_n_epochs=reload)
    caplog.set_level("INFO")
    trainer.fit(module, before)
    trainer.fit_loop.max_steps = 6
    trainer.fit(module, now)
    start = 0 if name == "another sampler" else 100
    rest = (
        [(2, 4), (3, 6), "epoch", (0, 0), (1, 2)]
        if continues
        else ["epoch", *((index, start + 2 * index) for index in range(4))]
    )
    assert module.seen == ["epoch", (0, 0), (1, 2), *rest]
    assert caplog.text.count("the epoch begins again") == (not continues)
    assert trainer.global_step == 6
    assert trainer.current_epoch == 1
    if not continues:
        assert trainer.callback_metrics["mean"] == start + 3.5  # of the new data alone


def test_another_loader_after_a_whole_epoch_begins_at_its_beginning(tmp_path: Path) -> None:
    module, trainer = Reading(), quiet(max_epochs=1)
    trainer.fit(module, read(first))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, [*others.split(4)])
    assert module.seen[5:] == ["epoch", (0, 100), (1, 104)]


def test_a_checkpoint_that_is_given_says_where_the_data_are(tmp_path: Path) -> None:
    module, trainer = Reading(), quiet(max_steps=2)
    trainer.fit(module, read(first))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.fit_loop.max_steps = 3
    trainer.fit(module, read(others), ckpt_path=tmp_path / "a.ckpt")
    assert module.seen[-1] == (2, 104)
