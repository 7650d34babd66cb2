"""One torchmetrics object in two places: an error that names both, unless the program keeps the places apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toys import ValidatedNet, loader, net, quiet

import loopwright as lw
from loopwright.errors import ModuleError

torchmetrics = pytest.importorskip("torchmetrics")

Act = Callable[..., None]


class Shared(ValidatedNet):
    """Calls a function in each hook that it is given; training values are 10, those of validation loaders 1 and 2."""

    def __init__(self, **acts: Act) -> None:
        super().__init__()
        self.metric, self.other = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.acts = acts

    def act(self, hook: str, *args: float) -> None:
        if hook in self.acts:
            self.acts[hook](self, *args)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.act("training_step", 10.0)
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.act("on_train_epoch_end")

    def on_validation_epoch_start(self) -> None:
        self.act("on_validation_epoch_start")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.act("validation_step", 1.0 + dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self.act("on_validation_epoch_end")


def update(module: Any, value: float) -> None:
    module.metric.update(value)


def log(name: str, **how: Any) -> Act:
    def act(module: Any, value: float) -> None:
        module.metric(value)
        module.log(name, module.metric, **how)

    return act


def log_only(name: str) -> Act:
    return lambda module: module.log(name, module.metric)


EPOCH = {"on_step": False, "on_epoch": True}
POOLED: dict[str, tuple[dict[str, Act], str]] = {
    "epochs of both": (
        {"training_step": log("t", **EPOCH), "validation_step": log("v")},
        r"logged as 't' in training_step \(.*:\d+\) and as 'v' in validation_step \(.*:\d+\)",
    ),
    "steps of training": ({"training_step": log("t"), "validation_step": log("v")}, "as 't' in .* as 'v' in"),
    "logged at the end": (
        {"training_step": log("t"), "validation_step": update, "on_validation_epoch_end": log_only("v")},
        "as 't' in training_step .* as 'v' in on_validation_epoch_end",
    ),
    "updated only": (
        {"training_step": log("t", **EPOCH), "validation_step": update},
        "as 't' in training_step .* and updated in validation",
    ),
}


@pytest.mark.parametrize("name", POOLED)
def test_an_object_of_training_and_validation_is_an_error_with_both_places(name: str) -> None:
    acts, message = POOLED[name]
    with pytest.raises(ModuleError, match=message):
        quiet(max_epochs=2).fit(net(Shared, **acts), loader(4), loader(4))


@pytest.mark.parametrize("is_fit", [False, True])
def test_an_object_of_two_loaders_is_an_error_unless_one_name_is_logged(is_fit: bool) -> None:
    def run(**how: Any) -> lw.Trainer:
        trainer, module = quiet(max_epochs=1), net(Shared, validation_step=log("v", **how))
        if is_fit:
            trainer.fit(module, loader(4), [loader(4), loader(4)])
        else:
            trainer.validate(module, [loader(4), loader(4)], verbose=False)
        return trainer

    places = re.escape("logged as 'v/dataloader_idx_0' in validation_step") + ".*" + re.escape("'v/dataloader_idx_1'")
    with pytest.raises(ModuleError, match=places):
        run()
    assert run(add_dataloader_idx=False).callback_metrics["v"] == 1.5


def log_other(module: Any, value: float) -> None:
    module.other(value)
    module.log("v", module.other)


APART: dict[str, tuple[dict[str, Act], dict[str, float]]] = {
    "reset in the program": (
        {
            "training_step": log("t"),
            "on_validation_epoch_start": lambda module: module.metric.reset(),
            "validation_step": log("v"),
        },
        {"t": 10.0, "v": 1.0},
    ),
    "reset, and logged at the end": (
        {
            "training_step": log("t"),
            "on_validation_epoch_start": lambda module: module.metric.reset(),
            "validation_step": update,
            "on_validation_epoch_end": log_only("v"),
        },
        {"t": 10.0, "v": 1.0},
    ),
    "training's, logged by the validation": (
        {"training_step": update, "on_validation_epoch_end": log_only("t")}, {"t": 10.0},
    ),
    "an object each": ({"training_step": log("t", **EPOCH), "validation_step": log_other}, {"t": 10.0, "v": 1.0}),
    "two hooks of training": (
        {"training_step": log("t"), "on_train_epoch_end": log_only("e")}, {"t": 10.0, "e": 10.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_places_that_a_program_keeps_apart_have_their_own_values(name: str) -> None:
    acts, expected = APART[name]
    trainer = quiet(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(net(Shared, **acts), loader(4), loader(4))
    assert {key: float(trainer.callback_metrics[key]) for key in expected} == expected


@pytest.mark.filterwarnings("ignore:validation is skipped")
def test_a_validation_after_the_fit_does_not_count_what_training_steps_have_left() -> None:
    module, trainer = net(Shared, training_step=log("t"), validation_step=log("v")), quiet(max_epochs=1)
    trainer.fit(module, loader(4))
    with pytest.raises(ModuleError, match="as 't' in training_step .* as 'v' in validation_step"):
        trainer.validate(module, loader(4), verbose=False)
    module.metric.reset()
    assert trainer.validate(module, loader(4), verbose=False) == [{"v": 1.0}]


def test_of_names_of_one_place_all_have_the_value() -> None:
    def both(module: Any, value: float) -> None:
        module.metric(torch.tensor(value))
        module.log_dict({"a": module.metric, "b": module.metric})

    trainer = quiet(max_epochs=1)
    trainer.fit(net(Shared, validation_step=both), loader(4), loader(4))
    assert (trainer.callback_metrics["a"], trainer.callback_metrics["b"]) == (1.0, 1.0)
