"""Keys: the latest value of a name is what is seen; two names that give one key are refused, with both lines."""

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


def test_other_arguments_for_one_name_are_an_error_with_both_lines() -> None:
    calls = {"training_step": [("a", STEP), ("a", EPOCH)]}
    line = re.escape(__file__) + r":\d+"
    with pytest.raises(ModuleError, match=rf"training_step \({line}\) with other arguments than before \({line}\)"):
        quiet(max_epochs=1, limit_val_batches=0).fit(net(Logging, **calls), loader())


def test_a_key_with_the_number_of_a_loader_meets_one_that_is_written_so() -> None:
    calls: Any = {"validation_step": [("a", {}), ("a/dataloader_idx_1", {"add_dataloader_idx": False})]}
    with pytest.raises(ModuleError, match="for one data loader"):
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


@pytest.mark.filterwarnings("ignore:trainer.fit continues at epoch")  # with another module
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


# --- the latest value ------------------------------------------------------------------------------------------------


class Timed(ValidatedNet):
    """Logs "x": 101, 102, ... in training; 5.5, 4.5, ... is the mean of a validation."""

    def __init__(self, train: Any = None, val: Any = None, late: float | None = None) -> None:
        super().__init__()
        self.train_how, self.val_how, self.late, self.value = train or {}, val or {}, late, 100.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.value += 1
        self.log("x", self.value, prog_bar=True, **self.train_how)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("x", 5.0 - self.trainer.current_epoch + batch_idx, prog_bar=True, **self.val_how)

    def on_train_epoch_end(self) -> None:
        if self.late is not None:
            self.log("x", self.late, prog_bar=True)


class Watch(lw.Callback):
    """Notes "x" of `callback_metrics`, and of the bar, after batches, validations and epochs."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []
        self.shown: list[float] = []

    def note(self, event: str, trainer: lw.Trainer) -> None:
        if not trainer.sanity_checking and "x" in trainer.callback_metrics:
            self.seen.append((event, float(trainer.callback_metrics["x"])))
            self.shown.append(trainer.progress_bar_metrics["x"])

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("start", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.note("batch", trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("validation", trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("end", trainer)


# What Lightning 2.6.6 has at the same events.
IN_TIME: dict[str, tuple[dict[str, Any], list[float]]] = {
    "steps": ({}, [101, 102, 5.5, 5.5, 5.5, 103, 104, 4.5, 4.5]),
    "steps and epochs": ({"train": BOTH}, [101, 102, 5.5, 101.5, 101.5, 103, 104, 4.5, 103.5]),
    "epochs": ({"train": EPOCH}, [5.5, 101.5, 101.5, 101.5, 101.5, 4.5, 103.5]),
    "the validation's, too": ({"train": BOTH, "val": BOTH}, [101, 102, 5.5, 101.5, 101.5, 103, 104, 4.5, 103.5]),
    "and at the epoch's end": ({"late": 7.0}, [101, 102, 5.5, 5.5, 7, 103, 104, 4.5, 4.5]),
    "twice for the epoch": ({"train": EPOCH, "late": 7.0}, [5.5, 101.5, 7, 7, 7, 4.5, 103.5]),
}


@pytest.mark.parametrize("name", IN_TIME)
def test_the_latest_write_of_a_name_is_what_callbacks_and_bars_see(name: str) -> None:
    how, expected = IN_TIME[name]
    watch = Watch()
    trainer = quiet(max_epochs=2, callbacks=[watch], log_every_n_steps=1)
    trainer.fit(net(Timed, **how), loader(4), loader(4))
    assert [value for _, value in watch.seen] == expected
    assert watch.shown == expected
    assert trainer.callback_metrics["x"] == how.get("late", expected[-1])


def test_a_resume_within_an_epoch_knows_which_value_is_the_latest(tmp_path: Any) -> None:
    def fit(**arguments: Any) -> list[tuple[str, float]]:
        watch, module = Watch(), net(Timed)
        module.value += arguments.pop("trained", 0)
        trainer = quiet(max_epochs=2, val_check_interval=2, callbacks=[watch], num_sanity_val_steps=0)
        trainer.fit(module, loader(8), loader(4), **arguments)
        return watch.seen

    class Save(lw.Callback):
        runs_last = True

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"batch-{trainer.global_step}.ckpt")

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"validation-{trainer.global_step}.ckpt")

    quiet(max_epochs=2, val_check_interval=2, callbacks=[Save()], num_sanity_val_steps=0).fit(
        net(Timed), loader(8), loader(4)
    )
    whole = fit()
    for name, trained, rest in (("batch-3", 3, 4), ("validation-2", 2, 3), ("validation-6", 6, 11), ("batch-6", 6, 10)):
        found = fit(trained=trained, ckpt_path=tmp_path / f"{name}.ckpt")
        assert found == whole[rest:], name


def test_callbacks_and_schedules_judge_the_validation_of_a_name_that_training_logs_too(tmp_path: Any) -> None:
    class WithPlateau(Timed):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "x"}}

    for at_epoch_end in (None, True, False):
        stopping = lw.EarlyStopping("x", patience=1, check_on_train_epoch_end=at_epoch_end)
        saving = lw.ModelCheckpoint(tmp_path / str(at_epoch_end), monitor="x", save_top_k=-1)
        trainer = quiet(max_epochs=4, callbacks=[stopping, saving], enable_checkpointing=True)
        trainer.fit(net(WithPlateau), loader(4), loader(4))
        assert trainer.current_epoch == 4
        assert sorted(map(float, saving.best_k_models.values())) == [2.5, 3.5, 4.5, 5.5]
        assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0


def test_several_loaders_have_a_latest_value_each() -> None:
    watch = Watch()
    trainer = quiet(max_epochs=1, callbacks=[watch])
    trainer.fit(net(Timed, val={"add_dataloader_idx": False}), loader(4), [loader(4), loader(2)])
    assert watch.seen[-1] == ("end", 16 / 3)  # of three batches: 5, 6 and 5
    trainer = quiet(max_epochs=1, callbacks=[watch])
    trainer.fit(net(Timed), loader(4), [loader(4), loader(2)])
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("x")}
    assert found == {"x": 102.0, "x/dataloader_idx_0": 5.5, "x/dataloader_idx_1": 5.0}


def test_of_two_hooks_of_a_batch_or_of_a_validation_the_later_one_counts() -> None:
    calls: Any = {
        "training_step": [("a", STEP)], "on_train_batch_end": [("a", STEP)],
        "validation_step": [("b", {}), ("c", {})], "on_validation_epoch_end": [("b", {})],
    }  # fmt: skip

    class Counting(Logging):
        def say(self, hook: str) -> None:
            for name, options in self.calls.get(hook, ()):
                self.log(name, 2.0 if hook.startswith("on_") else 1.0, **options)

    trainer = quiet(max_epochs=1, log_every_n_steps=1)
    trainer.fit(net(Counting, **calls), loader(4), loader(4))
    assert {name: float(value) for name, value in trainer.callback_metrics.items() if name in "abc"} == {
        "a": 2.0, "b": 2.0, "c": 1.0,
    }  # fmt: skip
    assert {"a": 2.0, "b": 2.0, "c": 1.0}.items() <= trainer.logged_metrics.items()
