"""Keys of which one would take the place of another are refused, and the error names both lines."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from toys import Net, ValidatedNet, loader, net, quiet

import loopwright as lw
from loopwright.errors import ModuleError

BOTH = {"on_step": True, "on_epoch": True}
EPOCH = {"on_step": False, "on_epoch": True}
STEP = {"on_step": True, "on_epoch": False}


class Logging(ValidatedNet):
    """Logs what its table says, hook by hook."""

    def __init__(self, **calls: list[tuple[str, dict[str, Any]]]) -> None:
        super().__init__()
        self.calls = calls

    def say(self, hook: str) -> None:
        for name, options in self.calls.get(hook, ()):
            self.log(name, 1.0, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.say("training_step")
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.say("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.say("on_train_epoch_end")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.say("validation_step")

    def on_validation_epoch_end(self) -> None:
        self.say("on_validation_epoch_end")


COLLISIONS: dict[str, tuple[dict[str, list[tuple[str, dict[str, Any]]]], str]] = {
    "an epoch's": ({"training_step": [("a", BOTH), ("a_epoch", EPOCH)]}, "a_epoch"),
    "an epoch's, the other way round": ({"training_step": [("a_epoch", EPOCH), ("a", BOTH)]}, "a_epoch"),
    "a step's": ({"training_step": [("a", BOTH), ("a_step", STEP)]}, "a_step"),
    "in another hook": ({"training_step": [("a", BOTH)], "on_train_epoch_end": [("a_epoch", {})]}, "a_epoch"),
    "in a validation": ({"training_step": [("a", BOTH)], "validation_step": [("a_epoch", {})]}, "a_epoch"),
    "two that are doubled": ({"training_step": [("a", BOTH), ("a_step", BOTH)]}, "a_step"),
}


@pytest.mark.parametrize("name", COLLISIONS)
def test_two_names_that_give_one_key_are_an_error_with_both_lines(name: str) -> None:
    calls, key = COLLISIONS[name]
    line = re.escape(__file__) + r":\d+"
    with pytest.raises(ModuleError, match=rf"\({line}\) and log\(.*\({line}\) both give '{key}'"):
        quiet(max_epochs=2, num_sanity_val_steps=0).fit(net(Logging, **calls), loader(), loader())


def test_the_lines_are_those_of_the_calls() -> None:
    class Twice(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("a", 1.0, **BOTH)
            self.log_dict({"b": 2.0, "a_epoch": 2.0})
            return self.loss(batch)

    first = Twice.training_step.__code__.co_firstlineno + 1
    with pytest.raises(ModuleError) as raised:
        quiet(max_epochs=1).fit(net(Twice), loader())
    assert [int(number) for number in re.findall(rf"{re.escape(__file__)}:(\d+)", str(raised.value))] == [
        first,
        first + 1,
    ]


def test_one_name_of_steps_from_two_hooks_is_an_error() -> None:
    calls = {"training_step": [("a", STEP)], "on_train_batch_end": [("a", STEP)]}
    with pytest.raises(ModuleError, match=r"was called in training_step \(.*\) and in on_train_batch_end \("):
        quiet(max_epochs=1, limit_val_batches=0).fit(net(Logging, **calls), loader())


def test_other_arguments_for_one_name_are_an_error_with_both_lines() -> None:
    calls = {"training_step": [("a", STEP), ("a", EPOCH)]}
    line = re.escape(__file__) + r":\d+"
    with pytest.raises(ModuleError, match=rf"training_step \({line}\) with other arguments than before \({line}\)"):
        quiet(max_epochs=1, limit_val_batches=0).fit(net(Logging, **calls), loader())


def test_a_key_with_the_number_of_a_loader_meets_one_that_is_written_so() -> None:
    calls: Any = {"validation_step": [("a", {}), ("a/dataloader_idx_1", {"add_dataloader_idx": False})]}
    with pytest.raises(ModuleError, match="was called in|both give"):
        quiet().validate(net(Logging, **calls), [loader(4), loader(4)], verbose=False)


def test_a_metric_object_meets_a_number() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class WithMetric(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(torch.ones(1))
            self.log("a", self.mean, **BOTH)
            self.log("a_epoch", 1.0, **EPOCH)
            return self.loss(batch)

    with pytest.raises(ModuleError, match="both give 'a_epoch'"):
        quiet(max_epochs=1).fit(net(WithMetric), loader())


def test_a_callback_meets_the_module() -> None:
    class Logs(lw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            module.log("a_step", 1.0)

    calls = {"training_step": [("a", BOTH)]}
    with pytest.raises(ModuleError, match="both give 'a_step'"):
        quiet(max_epochs=1, limit_val_batches=0, callbacks=[Logs()]).fit(net(Logging, **calls), loader())


@pytest.mark.filterwarnings("ignore:trainer.fit continues after epoch")  # with another module
def test_keys_that_only_look_alike_are_fine_and_a_name_may_be_in_training_and_validation() -> None:
    calls: Any = {
        "training_step": [("a", STEP), ("a_epoch", EPOCH), ("b", BOTH)],
        "validation_step": [("a", {}), ("c_step", {})],
    }
    trainer = quiet(max_epochs=3)
    trainer.fit(net(Logging, **calls), loader(), loader())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(net(Logging, on_train_epoch_end=[("b", {})]), loader(), loader())  # another module, other hooks
    assert {"a", "a_epoch", "b_step", "b_epoch", "c_step"} <= trainer.callback_metrics.keys()
