"""Bad modules, callbacks, loaders and losses; exceptions, interrupts and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import (
    Net,
    Recorder,
    RecordingLogger,
    Unsized,
    ValidatedNet,
    assert_same,
    loader,
    momentum,
    net,
    quiet,
    train_by_hand,
    weights,
)

import loopwright as lw
from loopwright.callbacks import Callback
from loopwright.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModuleError,
    NonFiniteError,
    StopBySignal,
)

# --- hook names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("on_train_epoch_finished", "on_train_epoch_end"),
        ("on_training_start", "on_train_start"),
        ("on_validation_batch_ends", "on_validation_batch_end"),
        ("on_batch_end", "on_train_batch_end"),
        ("validation_steps", "validation_step"),
        ("configure_optimizer", "configure_optimizers"),
        ("train_dataloaders", "train_dataloader"),
    ],
)
def test_a_misspelt_hook_of_a_module_names_the_nearest(wrong: str, right: str) -> None:
    class Misspelt(Net):
        pass

    setattr(Misspelt, wrong, lambda self, *args: None)
    if wrong == "configure_optimizer":
        Misspelt.configure_optimizers = lw.Module.configure_optimizers  # type: ignore[method-assign]
    with pytest.raises((ModuleError), match=rf"{wrong}|{right}") as caught:
        quiet(max_epochs=1).fit(net(Misspelt), loader())
    if wrong.startswith("on_"):
        assert wrong in str(caught.value)
    if wrong != "on_batch_end":
        assert right in str(caught.value)


@pytest.mark.parametrize("wrong", ["on_train_epoch_finish", "on_epoch_end", "onn_train_start", "on_train_batch_start_"])
def test_a_misspelt_hook_of_a_callback_is_found_in_the_constructor(wrong: str) -> None:
    callback = type("Misspelt", (Callback,), {wrong: lambda self, *args: None})()
    with pytest.raises(ModuleError, match=f"Misspelt has methods that look like hooks.*{wrong}"):
        quiet(callbacks=callback)


def test_a_misspelt_hook_of_a_data_module_is_found() -> None:
    class Data(lw.DataModule):
        def train_dataloaders(self) -> Any:
            return loader()

    with pytest.raises(ModuleError, match="train_dataloader"):
        quiet(max_epochs=1).fit(net(Net), Data())


def test_helpers_with_other_names_are_fine() -> None:
    class Helping(Net):
        def on_gpu_memory(self) -> int:  # looks like a hook
            return 0

    with pytest.raises(ModuleError, match="leading underscore"):
        quiet(max_epochs=1).fit(net(Helping), loader())

    class Fine(Net):
        def _on_gpu_memory(self) -> int:
            return 0

        def compute(self) -> int:
            return 0

    quiet(max_epochs=1).fit(net(Fine), loader())


def test_hooks_that_are_set_on_an_instance_are_called() -> None:
    callback = Callback()
    seen: list[int] = []
    callback.on_train_start = lambda trainer, pl_module: seen.append(1)  # type: ignore[method-assign]
    quiet(max_epochs=1, callbacks=callback).fit(net(Net), loader())
    assert seen == [1]


# --- modules and loaders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [3, Net, "net", lambda x: x])
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(ModuleError, match=r"Expected lw.Module"):
        quiet(max_epochs=1).fit(model, loader())


@pytest.mark.parametrize("missing", ["training_step", "configure_optimizers"])
def test_a_module_without_what_fit_needs_is_refused(missing: str) -> None:
    class Plain(nn.Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any: ...

        def configure_optimizers(self) -> Any: ...

    delattr(Plain, missing)
    with pytest.raises(ModuleError, match=f"needs Plain.{missing}"):
        quiet(max_epochs=1).fit(Plain(), loader())


def test_fit_without_data_is_refused() -> None:
    with pytest.raises(ModuleError, match="no data: no loader was passed"):
        quiet(max_epochs=1).fit(net(Net))


def test_loaders_and_a_data_module_together_are_refused() -> None:
    class Data(lw.DataModule):
        def train_dataloader(self) -> Any:
            return loader()

    for arguments in ({"train_dataloaders": loader()}, {"val_dataloaders": loader()}):
        with pytest.raises(ConfigError, match="train_dataloaders or val_dataloaders and datamodule"):
            quiet(max_epochs=1).fit(net(Net), datamodule=Data(), **arguments)
    with pytest.raises(ModuleError, match="datamodule is list"):
        quiet(max_epochs=1).fit(net(Net), datamodule=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [3, "text", object()])
def test_training_data_that_cannot_be_iterated_is_refused(data: Any) -> None:
    with pytest.raises((ModuleError, DataError), match="cannot be iterated"):
        quiet(max_epochs=1).fit(net(Net), data)


def test_a_loader_hook_that_returns_none_is_refused() -> None:
    class Forgot(Net):
        def train_dataloader(self) -> Any:
            loader()

    with pytest.raises(ModuleError, match=r"train_dataloader.* returned None"):
        quiet(max_epochs=1).fit(net(Forgot))


@pytest.mark.parametrize(
    "step",
    [
        lambda self: None,
        lambda self, batch, batch_idx, more: None,
        lambda self, dataloader_iter: None,
    ],
)
def test_a_training_step_with_other_arguments_is_refused(step: Any) -> None:
    class Wrong(Net):
        pass

    Wrong.training_step = step  # type: ignore[method-assign]
    with pytest.raises(ModuleError, match=r"training_step.*take"):
        quiet(max_epochs=1).fit(net(Wrong), loader())


def test_a_training_step_may_take_the_batch_alone_or_anything() -> None:
    class Short(Net):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return self.loss(batch)

    class Any_(Net):
        def training_step(self, *args: Any) -> Any:
            batch, index = args
            assert isinstance(index, int)
            return self.loss(batch)

    for kind in (Short, Any_):
        expected, module = net(Net), net(kind)
        train_by_hand(expected, loader())
        quiet(max_epochs=1).fit(module, loader())
        assert_same(module, expected)


def test_a_run_within_a_run_is_refused() -> None:
    class Nested(Net):
        def on_train_epoch_end(self) -> None:
            self.trainer.validate(self, loader())

    with pytest.raises(ConfigError, match=r"trainer.validate was called while trainer.fit is running"):
        quiet(max_epochs=1).fit(net(Nested), loader())


def test_two_callbacks_with_one_state_key_are_refused() -> None:
    class Stateful(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    with pytest.raises(ConfigError, match=r"state key 'test_two_callbacks.*Stateful'"):
        quiet(callbacks=[Stateful(), Stateful()])


def test_two_callbacks_of_a_class_keep_states_of_their_own() -> None:
    first, second = lw.ModelCheckpoint(monitor="a"), lw.ModelCheckpoint(monitor="b")
    trainer = quiet(enable_checkpointing=True, callbacks=[first, second])
    assert first.state_key != second.state_key
    assert trainer.checkpoint_callbacks == [first, second]


def test_the_order_of_callbacks_does_not_change_the_result() -> None:
    class Noise(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    results = []
    for callbacks in ([Recorder(), Noise(), lw.EMA(0.9)], [lw.EMA(0.9), Noise(), Recorder()]):
        module = net(Net, momentum)
        quiet(max_epochs=1, callbacks=callbacks).fit(module, loader())
        results.append(weights(module))
    assert_same(*results)


def test_the_callers_list_of_callbacks_is_not_changed(tmp_path: Any) -> None:
    mine: list[Callback] = [Recorder()]
    trainer = lw.Trainer(accelerator="cpu", callbacks=mine, logger=False, default_root_dir=tmp_path)
    assert len(mine) == 1
    assert len(trainer.callbacks) > 1


def test_checkpoint_callbacks_come_last() -> None:
    checkpoint, recorder = lw.ModelCheckpoint(), Recorder()
    trainer = quiet(enable_checkpointing=True, callbacks=[checkpoint, recorder])
    assert trainer.callbacks == [recorder, checkpoint]


def test_the_modules_callbacks_replace_those_of_their_class() -> None:
    class Special(Recorder):
        pass

    class WithOwn(Net):
        def configure_callbacks(self) -> Any:
            return [Special()]

    theirs = Recorder()
    trainer = quiet(max_epochs=1, callbacks=theirs)
    trainer.fit(net(WithOwn), loader())
    assert theirs.seen == []
    assert [type(c) for c in trainer.callbacks] == [Special]

    class Wrong(Net):
        def configure_callbacks(self) -> Any:
            return [3]

    with pytest.raises(ModuleError, match="configure_callbacks returned int"):
        quiet(max_epochs=1).fit(net(Wrong), loader())


def test_a_checkpoint_in_the_middle_of_a_window_is_refused(tmp_path: Any) -> None:
    class Saving(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    with pytest.raises(CheckpointError, match="between two micro-batches"):
        quiet(max_epochs=1, accumulate_grad_batches=2).fit(net(Saving), loader())
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_before_anything_was_attached_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ModuleError, match="before a module was attached"):
        quiet().save_checkpoint(tmp_path / "a.ckpt")


def test_a_wrong_attribute_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'global_step'"):
        quiet().global_stp  # noqa: B018
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        net(Net).trainer  # noqa: B018


# --- exceptions ------------------------------------------------------------------------------------------------------


class Told(Callback):
    """Notes the exception and what the trainer looks like then."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.state: list[str] = []
        self.torn_down = False

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.errors.append(exception)
        self.state.append(trainer.state.status)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.torn_down = True


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("training_step", "in training_step.*epoch 0, step 1, batch 1"),
        ("on_train_batch_start", "in on_train_batch_start.*epoch 0, step 1, batch 1"),
        ("on_train_batch_end", "in on_train_batch_end.*epoch 0, step 2"),
        ("on_before_optimizer_step", "in on_before_optimizer_step.*step 1, batch 1"),
        ("validation_step", "in validation_step.*stage validate"),
    ],
)
def test_an_exception_is_raised_as_it_is_with_a_note_on_the_place(hook: str, place: str) -> None:
    class Broken(ValidatedNet):
        calls = 0

    original = getattr(Broken, hook)
    boom = ValueError("boom")

    def broken(self: Any, *args: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise boom
        return original(self, *args)

    setattr(Broken, hook, broken)
    told, logger = Told(), RecordingLogger()
    trainer = quiet(max_epochs=1, callbacks=told, logger=logger, num_sanity_val_steps=0)
    with pytest.raises(ValueError, match="boom") as caught:
        trainer.fit(net(Broken), loader(), loader())

    assert caught.value is boom
    assert len(boom.__notes__) == (2 if hook in ("training_step", "validation_step") else 1)
    import re

    assert re.search(place, boom.__notes__[0])
    assert told.errors == [boom]
    assert told.state == ["interrupted"]
    assert not told.torn_down
    assert logger.statuses == ["failed"]
    assert trainer.interrupted
    assert trainer.state.status == "interrupted"


def test_the_data_module_is_notified_too() -> None:
    seen: list[BaseException] = []

    class Data(lw.DataModule):
        def train_dataloader(self) -> Any:
            return [1]

        def on_exception(self, exception: BaseException) -> None:
            seen.append(exception)

    with pytest.raises(TypeError):
        quiet(max_epochs=1).fit(net(Net), Data())
    assert len(seen) == 1


def test_an_on_exception_that_fails_does_not_hide_the_first_error() -> None:
    class Broken(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            raise RuntimeError("second")

    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("first")

    with pytest.raises(ValueError, match="first") as caught:
        quiet(max_epochs=1, callbacks=Broken()).fit(net(Failing), loader())
    assert "then on_exception failed: RuntimeError: second" in caught.value.__notes__


def test_a_teardown_that_fails_after_an_error_does_not_hide_it() -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("first")

        def teardown(self, stage: str) -> None:
            raise RuntimeError("second")

    with pytest.raises(ValueError, match="first"):
        quiet(max_epochs=1).fit(net(Failing), loader())


def test_a_teardown_that_fails_after_a_good_run_is_raised() -> None:
    class Failing(Net):
        def teardown(self, stage: str) -> None:
            raise ValueError("in teardown")

    with pytest.raises(ValueError, match="in teardown"):
        quiet(max_epochs=1).fit(net(Failing), loader())


def test_after_a_failure_the_trainer_and_the_module_can_be_used_again() -> None:
    class Sometimes(ValidatedNet):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and batch_idx == 1:
                raise ValueError("once")
            return self.loss(batch)

    module = net(Sometimes)
    trainer = quiet(max_epochs=1)
    with pytest.raises(ValueError, match="once"):
        trainer.fit(module, loader(), loader())
    module.fails = False
    assert set(trainer.validate(module, loader(), verbose=False)[0]) == {"val_loss"}
    fresh = quiet(max_epochs=1)
    fresh.fit(module, loader(), loader())
    assert fresh.global_step == 4


# --- interrupts ------------------------------------------------------------------------------------------------------


class Signalling(Net):
    """Sends itself a signal in the first micro-batch of the second window."""

    number = signal.SIGINT

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            os.kill(os.getpid(), self.number)
        return self.loss(batch)


def test_ctrl_c_ends_the_run_after_the_window_under_way() -> None:
    told = Told()
    trainer = quiet(max_epochs=3, accumulate_grad_batches=2, callbacks=told)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(net(Signalling), loader())
    assert trainer.global_step == 2
    assert trainer.at_step_boundary
    assert isinstance(told.errors[0], KeyboardInterrupt)
    assert trainer.interrupted
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_ends_the_run_after_the_window_under_way_with_143() -> None:
    class Terminated(Signalling):
        number = signal.SIGTERM

    trainer = quiet(max_epochs=3, accumulate_grad_batches=2)
    with pytest.raises(StopBySignal) as caught:
        trainer.fit(net(Terminated), loader())
    assert caught.value.code == 143
    assert trainer.global_step == 2
    assert trainer.received_sigterm


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    class Twice(Signalling):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return self.loss(batch)

    trainer = quiet(max_epochs=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(net(Twice), loader())
    assert trainer.global_step == 1


def test_a_handler_of_the_users_own_is_called_and_the_run_ends() -> None:
    received: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:

        class Terminated(Signalling):
            number = signal.SIGTERM

        trainer = quiet(max_epochs=1)
        with pytest.raises(StopBySignal):
            trainer.fit(net(Terminated), loader())
        assert received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)  # the program's own again
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert received == [signal.SIGTERM] * 2
    assert trainer.global_step < 4


def test_an_interrupt_ends_a_validation_too() -> None:
    class Slow(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert batch_idx < 2
            if batch_idx == 1:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        quiet().validate(net(Slow), loader(20), verbose=False)


# --- losses that are not finite --------------------------------------------------------------------------------------


class Bad(Net):
    """Has a NaN loss at batch 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * float("nan") if batch_idx == 1 else loss


def test_a_nan_loss_is_warned_about_once_with_its_batch() -> None:
    with pytest.warns(UserWarning, match="loss was nan at batch 1") as caught:
        quiet(max_epochs=3).fit(net(Bad), loader())
    assert len(caught) == 1


def test_a_nan_loss_raises_at_the_next_boundary_if_asked() -> None:
    trainer = quiet(max_epochs=1, nonfinite_loss="raise", log_every_n_steps=3, logger=RecordingLogger())
    with pytest.raises(NonFiniteError, match="loss was nan at batch 1"):
        trainer.fit(net(Bad), loader())
    assert trainer.global_step == 3


def test_a_nan_loss_is_never_saved_if_it_is_to_raise(tmp_path: Any) -> None:
    class Saving(Bad):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    with pytest.raises(NonFiniteError):
        quiet(max_epochs=1, nonfinite_loss="raise").fit(net(Saving), loader())
    assert [path.name for path in tmp_path.iterdir()] == ["0.ckpt"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_with_a_nan_loss_is_skipped_if_asked(accumulate: int) -> None:
    batches = list(loader())
    good = [batches[0], *batches[2:]] if accumulate == 1 else batches[2:]
    expected, module = net(Net, momentum), net(Bad, momentum)
    train_by_hand(expected, good, accumulate=accumulate)
    trainer = quiet(max_epochs=1, nonfinite_loss="skip", accumulate_grad_batches=accumulate)
    with pytest.warns(UserWarning, match="is skipped: its loss is not finite"):
        trainer.fit(module, loader())
    assert_same(module, expected)
    assert (trainer.global_step, trainer.progress.skipped_steps) == (4 // accumulate - 1, 1)


def test_a_nan_loss_is_ignored_if_asked_and_shows_in_the_logs() -> None:
    class Logging(Bad):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    logger = RecordingLogger()
    quiet(max_epochs=1, nonfinite_loss="ignore", logger=logger, log_every_n_steps=1).fit(net(Logging), loader())
    values = [value for _, value in logger.values("loss")]
    assert [value != value for value in values] == [False, True, True, True]


# --- loggers ---------------------------------------------------------------------------------------------------------


def test_a_logger_that_fails_is_said_once_and_training_goes_on_the_same(tmp_path: Path) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

    expected, module = net(Net), net(Logging)
    train_by_hand(expected, loader())
    broken, fine = RecordingLogger(fails=True), RecordingLogger()
    trainer = quiet(max_epochs=1, logger=[broken, fine], log_every_n_steps=1, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="RecordingLogger") as caught:
        trainer.fit(module, loader())
    failed, kept = (str(one.message) for one in caught)
    assert re.search("RecordingLogger failed.*OSError", failed)
    assert "did not accept 4 rows: they are in" in kept
    rows = (tmp_path / "unwritten_rows_RecordingLogger.jsonl").read_text().splitlines()
    assert [json.loads(row)["loss"] for row in rows] == [row["loss"] for _, row in fine.rows]
    assert_same(module, expected)


def test_the_bar_does_not_change_the_weights(tmp_path: Any, capsys: Any) -> None:
    expected, module = net(Net, momentum, dropout=0.3), None
    train_by_hand(expected, loader(shuffle=True), epochs=2)
    module = net(Net, momentum, dropout=0.3)
    trainer = lw.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=tmp_path)
    trainer.fit(module, loader(shuffle=True))
    assert_same(module, expected)


def test_hyperparameters_reach_the_loggers_once() -> None:
    class Configured(Net):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    logger = RecordingLogger()
    quiet(max_epochs=1, logger=logger).fit(net(Configured), loader())
    assert [dict(params) for params in logger.hparams] == [{"width": 3}]
    silent = RecordingLogger()
    quiet(max_epochs=1, logger=silent, enable_autolog_hparams=False).fit(net(Configured), loader())
    assert silent.hparams == []


def test_an_iterable_that_raises_is_passed_on() -> None:
    class Raising(Unsized):
        def __iter__(self) -> Any:
            yield from self.batches
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        quiet(max_epochs=1).fit(net(Net), Raising(list(loader())))
    assert not torch.is_inference_mode_enabled()


# --- nothing that could be trained ----------------------------------------------------------------------------------


class Detached(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).detach()


class Nothing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class OfNoParameters(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.ndim > 5], lr=0.1)


def test_a_model_of_a_library_is_to_be_held_by_a_module() -> None:
    with pytest.raises(ModuleError, match=r"needs Linear.training_step(.|\n)*in its class, or in an lw.Module that"):
        quiet().fit(nn.Linear(4, 1), loader(8))
    with pytest.raises(ModuleError, match=r"training_step(.|\n)*define training_step in your module"):
        quiet().fit(type("Empty", (lw.Module,), {})(), loader(8))


def test_a_loss_without_a_graph_is_explained() -> None:
    with pytest.raises(RuntimeError) as caught:
        quiet().fit(net(Detached), loader(8))
    assert "the loss of training_step has no graph" in caught.value.__notes__[-1]


def test_a_batch_that_forward_does_not_take_is_explained() -> None:
    pairs = DataLoader(TensorDataset(torch.zeros(4, 4), torch.zeros(4)), batch_size=2)
    with pytest.raises(TypeError) as caught:
        quiet().predict(net(Net), pairs)
    assert "the module has no predict_step, so its forward gets the whole batch" in caught.value.__notes__[-1]
    with pytest.raises(RuntimeError) as caught_of_own:
        quiet().predict(net(Net), DataLoader(torch.zeros(4, 3), batch_size=2))
    assert "has no predict_step" not in "".join(caught_of_own.value.__notes__)


def test_frozen_parameters_are_named_as_the_cause() -> None:
    module = net().requires_grad_(False)
    with pytest.raises(RuntimeError) as caught:
        quiet().fit(module, loader(8))
    count = len(list(module.parameters()))
    assert f"all {count} parameters of Net are frozen" in caught.value.__notes__[-1]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (lambda: net(OfNoParameters), "of them require gradients"),
        (lambda: net(OfNoParameters).requires_grad_(False), "unfreeze what is to be trained"),
    ],
)
def test_an_optimizer_without_parameters_is_explained(module: Any, text: str) -> None:
    with pytest.raises(ModuleError, match="an optimizer of no parameters") as caught:
        quiet().fit(module(), loader(8))
    assert text in str(caught.value)


def test_other_errors_of_configure_optimizers_are_left_alone() -> None:
    class Wrong(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=-1)

    with pytest.raises(ValueError, match="Invalid learning rate"):
        quiet().fit(net(Wrong), loader(8))


@pytest.mark.parametrize("batches", [4, 60])
def test_a_run_that_trained_nothing_says_so(batches: int, caplog: pytest.LogCaptureFixture) -> None:
    quiet(max_epochs=1).fit(net(Nothing), loader(2 * batches))
    said = [one.getMessage() for one in caplog.records if one.getMessage().startswith("Nothing was trained")]
    assert [re.findall(r"in all (\d+) steps", text) for text in said] == ([["4"]] if batches == 4 else [["50"], ["60"]])
    first = next(one for one in caplog.records if one.name.endswith("non_finite"))
    assert first.levelname == "WARNING"
    assert first.getMessage().startswith("training_step returned no loss, or one of weight 0, for the first batch")
    assert "`return loss`" in first.getMessage()


# --- what a newcomer writes ------------------------------------------------------------------------------------------


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("boom")


def test_an_error_of_a_step_names_shapes_and_dtypes_of_the_batch() -> None:
    batches = [{"x": torch.zeros(2, 3), "y": [torch.zeros(2, dtype=torch.int32), "a"]}]
    with pytest.raises(ValueError, match="boom") as caught:
        quiet().fit(net(Failing), batches)
    expected = "Loopwright: the batch is {'x': Tensor (2, 3) float32, 'y': [Tensor (2,) int32, str]}"
    assert expected in caught.value.__notes__


def test_an_error_elsewhere_names_no_batch() -> None:
    class Late(Net):
        def on_train_epoch_end(self) -> None:
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        quiet(max_epochs=1).fit(net(Late), loader(8))
    assert not any("the batch is" in note for note in caught.value.__notes__)


def test_an_optimizer_of_frozen_parameters_is_warned_of() -> None:
    class Half(Net):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(2, 2).requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.frozen.parameters(), lr=0.1)

    with pytest.warns(UserWarning, match="SGD trains nothing: none of its 2 parameters requires a gradient"):
        quiet(max_epochs=1).fit(net(Half), loader(8))


@pytest.mark.parametrize("keyword", ["train_dataloaders", "datamodule"])
def test_a_class_where_its_instance_is_expected_is_named(keyword: str) -> None:
    class Digits(lw.DataModule):
        def train_dataloader(self) -> Any:
            return loader(8)

    with pytest.raises(ModuleError, match=r"got the class Digits.\n  To fix it: pass an instance: Digits\(...\)"):
        quiet().fit(net(), **{keyword: Digits})


def test_a_class_as_callback_is_named() -> None:
    with pytest.raises(ConfigError, match=r"got the class Recorder.\n  To fix it: pass Recorder\(...\)"):
        quiet(callbacks=[Recorder])


@pytest.mark.parametrize("data", [torch.utils.data.TensorDataset(torch.ones(4, 3)), torch.ones(4, 3)])
def test_samples_where_batches_are_expected_are_warned_of(data: Any) -> None:
    class Anything(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(one.sum() for one in self.parameters())

    with pytest.warns(UserWarning, match=f"The training data is a {type(data).__name__}: each of its items is read"):
        quiet(max_epochs=1).fit(net(Anything), data)


def test_an_error_of_an_iterable_that_does_not_begin_is_the_one_that_is_raised() -> None:
    class Broken:
        def __iter__(self) -> Any:
            raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        quiet().fit(net(), Broken())


def test_a_list_of_no_optimizers_is_warned_of() -> None:
    class Untrained(Net):
        def configure_optimizers(self) -> Any:
            return []

    with pytest.warns(UserWarning, match=r"configure_optimizers returned \[\]: nothing is trained"):
        quiet(max_epochs=1).fit(net(Untrained), loader(8))


def test_the_class_of_an_optimizer_is_named() -> None:
    class Uncalled(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam

    with pytest.raises(ModuleError, match=r"got the class Adam.\n  To fix it: return Adam\(self.parameters\(\)"):
        quiet().fit(net(Uncalled), loader(8))


def test_a_module_that_was_not_initialized_is_named() -> None:
    class Forgetful(Net):
        def __init__(self) -> None:
            self.rate = 3

    with pytest.raises(ModuleError, match=r"did not call super\(\).__init__\(\)\."):
        quiet().fit(Forgetful(), loader(8))


def test_arguments_in_another_order_are_named() -> None:
    with pytest.raises(ModuleError, match=r"got DataLoader.\n  To fix it: pass the module first"):
        quiet().fit(loader(8), net())  # type: ignore[arg-type]


def test_hooks_that_take_other_arguments_are_named_before_the_run() -> None:
    class Short(Callback):
        def on_train_epoch_end(self, trainer: Any) -> None: ...  # type: ignore[override]

        def on_fit_start(self, *anything: Any) -> None: ...

        def on_validation_batch_end(  # type: ignore[override]
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None: ...

    with pytest.raises(ModuleError, match=r"on_train_epoch_end\(trainer\) is called as .*\(trainer, pl_module\)\."):
        quiet(callbacks=[Short()])


def test_optimizers_that_need_arguments_are_named_before_the_run() -> None:
    class Parametric(Net):
        def configure_optimizers(self, rate: float) -> Any:  # type: ignore[override]
            return torch.optim.SGD(self.parameters(), lr=rate)

    with pytest.raises(ModuleError, match=r"is called as configure_optimizers\(\)"):
        quiet().fit(net(Parametric), loader(8))


def test_hooks_of_a_data_module_that_take_other_arguments_are_named_before_the_run() -> None:
    class Data(lw.DataModule):
        def setup(self) -> None: ...  # type: ignore[override]

        def teardown(self, stage: str, more: int) -> None: ...  # type: ignore[override]

        def train_dataloader(self) -> Any:
            return loader(8)

    named = r"setup\(\) is called as setup\(stage\); teardown\(stage, more\) is called as teardown\(stage\)"
    with pytest.raises(ModuleError, match=named):
        quiet().fit(net(), Data())


def test_layers_in_a_plain_list_are_named() -> None:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [torch.nn.Linear(2, 2)]
            self.heads = {"a": torch.nn.Linear(2, 2, bias=False)}
            self.teacher = [torch.nn.Linear(2, 2).requires_grad_(False)]
            self.same = [torch.nn.Identity(), *self.children()]

    with pytest.warns(UserWarning, match="holds layers") as told:
        quiet().fit(net(Listed), loader(8))
    told_of = [str(one.message).split(": ")[0] for one in told if "holds layers" in str(one.message)]
    assert told_of == ["self.blocks is a list that holds layers", "self.heads is a dict that holds layers"]


def test_a_former_hook_of_an_epochs_outputs_is_named() -> None:
    class Former(Net):
        def training_epoch_end(self, outputs: Any) -> None: ...

    with pytest.raises(ModuleError, match=r"training_epoch_end \(did you mean 'on_train_epoch_end'"):
        quiet().fit(net(Former), loader(8))


def test_a_second_backward_is_explained() -> None:
    class Twice(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            loss.backward()
            return loss

    with pytest.raises(RuntimeError) as caught:
        quiet().fit(net(Twice), loader(8))
    assert "leave out backward() and step() in training_step" in caught.value.__notes__[-1]


def test_a_backward_in_validation_is_explained() -> None:
    class Evaluating(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0]).sum().backward()

    with pytest.raises(RuntimeError) as caught:
        quiet().fit(net(Evaluating), loader(8), loader(8))
    assert "validation_step runs without gradients" in caught.value.__notes__[-1]


def test_a_folder_of_logs_that_cannot_be_made_is_named_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="TensorBoardLogger: logs cannot be written to .*: .*file is a file, not"):
        quiet(default_root_dir=tmp_path / "file", logger=True, enable_checkpointing=True).fit(net(), loader(8))
