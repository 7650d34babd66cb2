"""What can be counted on the hot path: reads of the device, frames, calls of hooks nobody hears."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Net, Recorder, RecordingLogger, ValidatedNet, loader, momentum, net, quiet

import loopwright as lw
from loopwright.callbacks import EMA, Callback
from loopwright.trainer.metrics.current_values import CurrentValues


class CountReads(TorchDispatchMode):
    """Counts operations that bring a number to the host."""

    NAMES = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in self.NAMES:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


class Logging(Net):
    """Logs four values in every way, and counts host reads by the step at which they happen."""

    def __init__(self) -> None:
        super().__init__(momentum)  # Adam on the CPU reads its own count of steps

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"a": loss * 2, "b": 3.0})
        self.log("c", lw.Loss(loss.detach(), torch.ones(())), on_epoch=True)
        return loss


@pytest.mark.parametrize("form", ["mean", "loss"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_no_value_is_read_from_the_device_between_log_boundaries(
    form: str, accumulate: int, tmp_path: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On the CPU the bar reads values of the latest step, which waits for nothing; this run stands for one on a device.
    monkeypatch.setattr(CurrentValues, "read", lambda self: {})

    class Watched(Logging):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if form == "mean" else lw.Loss(loss * 2, torch.tensor(2.0))

    module = net(Watched)
    counter = CountReads()
    trainer = lw.Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=1000,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        callbacks=[EMA(0.9), lw.TQDMProgressBar(), Counting(counter)],
        logger=RecordingLogger(),
        default_root_dir=tmp_path,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader(100 * accumulate, 1))
    assert trainer.global_step == 100
    marks = next(callback.marks for callback in trainer.callbacks if isinstance(callback, Counting))
    assert marks == [0] * (100 * accumulate)


class Counting(Callback):
    """Turns the counter on for training, and notes the count after each batch; torch's own reads are left out."""

    def __init__(self, counter: CountReads) -> None:
        self.counter = counter
        self.marks: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.counter.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.marks.append(len(self.counter.reads))
        if trainer.is_last_batch:
            self.counter.__exit__(None, None, None)


def test_one_packed_copy_is_made_at_a_log_boundary() -> None:
    copies: list[int] = []
    module = net(Logging)
    trainer = quiet(max_epochs=1, log_every_n_steps=10, logger=RecordingLogger())
    original = trainer._lw_metrics._pack

    def pack(values: Any) -> Any:
        copies.append(trainer.global_step)
        return original(values)

    trainer._lw_metrics._pack = pack  # type: ignore[method-assign]
    trainer.fit(module, loader(40, 1))
    assert copies == [10, 20, 30, 40, 40]  # the last is the epoch's


def test_the_step_is_at_most_six_frames_below_fit() -> None:
    depths: list[int] = []

    class Deep(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            frame, names = sys._getframe(), []
            while frame.f_code.co_name != "fit":
                names.append(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]
            depths.append(len(names) + 1)
            return self.loss(batch)

    quiet(max_epochs=1).fit(net(Deep), loader())
    assert max(depths) <= 6


def test_a_callback_that_hears_nothing_is_never_called() -> None:
    calls: list[str] = []

    class Deaf(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_train_batch"):
                calls.append(name)
            return super().__getattribute__(name)

    quiet(max_epochs=2, callbacks=[Deaf() for _ in range(3)]).fit(net(Net), loader())
    first = len(calls)
    calls.clear()
    quiet(max_epochs=20, callbacks=[Deaf() for _ in range(3)]).fit(net(Net), loader())
    assert len(calls) == first  # looked at once per run, whatever the number of steps


def python_calls(action: Any) -> int:
    """Return how many Python functions are called while the action runs."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()  # what earlier tests left is not finalized among these calls
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_a_step_takes_thirty_python_calls_fewer_than_the_hand_written_loop() -> None:
    def trained(count: int) -> int:
        module, data = net(Net), loader(count, 1)
        trainer = quiet(max_epochs=1)
        return python_calls(lambda: trainer.fit(module, data))

    def by_hand(count: int) -> int:
        module, data = net(Net), loader(count, 1)
        optimizer = module.configure_optimizers()

        def run() -> None:
            for batch in data:
                optimizer.zero_grad()
                module.training_step(batch, 0).backward()
                optimizer.step()

        return python_calls(run)

    trained(1)  # imports what a first fit needs, which is no part of a step
    ours = (trained(60) - trained(20)) / 40
    theirs = (by_hand(60) - by_hand(20)) / 40
    assert ours - theirs <= -30


def test_an_evaluation_takes_one_python_call_per_batch_and_two_per_logged_value() -> None:
    class Batches:  # a list is looked through once at the beginning, for loaders
        def __init__(self, count: int) -> None:
            self.items = list(loader(count, 1))

        def __iter__(self) -> Any:
            return iter(self.items)

    class Silent(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    class Logging(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.loss(batch), batch_size=1)

    def evaluated(kind: type[Net], count: int) -> int:
        module, data = net(kind), Batches(count)
        trainer = quiet()
        return python_calls(lambda: trainer.validate(module, data, verbose=False))

    def by_hand(count: int) -> int:
        module, data = net(Silent), Batches(count)

        def run() -> None:
            with torch.inference_mode():
                for index, batch in enumerate(data):
                    module.validation_step(batch, index)

        return python_calls(run)

    def per_batch(calls: Any) -> float:
        calls(1)
        return float(calls(60) - calls(20)) / 40

    theirs = per_batch(by_hand)
    # One sees whether the batch is on the device, two take a value; every 50 batches rows of values are due.
    assert per_batch(lambda count: evaluated(Silent, count)) - theirs == pytest.approx(1, abs=0.1)
    assert per_batch(lambda count: evaluated(Logging, count)) - theirs == pytest.approx(3, abs=0.1)


def test_a_loss_that_is_logged_three_times_is_detached_once() -> None:
    detached: list[int] = []

    class Threefold(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            for name in "abc":
                self.log(name, loss)
            return loss

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") == "detach":
            detached.append(1)

    def trained(steps: int) -> int:
        module, data = net(Threefold), loader(steps, 1)
        trainer = quiet(max_epochs=1, log_every_n_steps=1000)
        detached.clear()
        sys.setprofile(count)
        try:
            trainer.fit(module, data)
        finally:
            sys.setprofile(None)
        return len(detached)

    assert trained(60) - trained(20) == 40


def test_the_graph_of_a_logged_loss_is_not_kept() -> None:
    alive: list[weakref.ref[Any]] = []
    kept: list[bool] = []

    class Watched(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            other = self.loss(batch)
            self.log("other", other)
            alive.append(weakref.ref(other))
            del other
            kept.append(alive[-1]() is not None)
            return self.loss(batch)

    quiet(max_epochs=1).fit(net(Watched), loader(4, 1))
    assert kept == [False] * 4


def test_logging_in_inference_mode_raises_nothing_inside() -> None:
    raised: list[str] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if event == "exception":
            raised.append(argument[0].__name__)
        return trace

    class Logged(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            sys.settrace(trace)
            self.log("x", self.loss(batch))
            sys.settrace(None)

    trainer = quiet()
    trainer.validate(net(Logged), loader(8, 1), verbose=False)
    assert "x" in trainer.callback_metrics
    assert raised == []


def test_the_first_time_that_values_are_logged_costs_as_much_for_each() -> None:
    def lines(count: int) -> int:
        class Wordy(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.log_dict({f"value{number}": 1.0 for number in range(count)})
                return self.loss(batch)

        compared = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal compared
            compared += event == "line"
            return trace if "metrics" in frame.f_code.co_filename else None

        trainer = quiet(max_epochs=1)
        sys.settrace(trace)
        try:
            trainer.fit(net(Wordy), loader(1, 1))
        finally:
            sys.settrace(None)
        return compared

    few, some, many = lines(0), lines(20), lines(60)
    assert (many - few) <= 3.3 * (some - few)


def test_ten_thousand_log_calls_keep_a_bounded_number_of_values() -> None:
    sizes: list[int] = []

    class Long(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for _ in range(100):
                self.log("x", 1.0, on_step=False, on_epoch=True)
            slot = self.trainer._lw_metrics.table_of("training_step").accumulators["x"]
            sizes.append(len(slot.values))
            return self.loss(batch)

    trainer = quiet(max_epochs=1)
    trainer.fit(net(Long), loader(100, 1))
    assert max(sizes) < 600
    assert trainer.callback_metrics["x"] == 1.0


def test_a_module_without_a_listener_logs_nothing_and_pays_nothing() -> None:
    recorder = Recorder()
    trainer = quiet(max_epochs=1, callbacks=recorder)
    trainer.fit(net(ValidatedNet), loader(), loader())
    assert trainer.logged_metrics == {} or set(trainer.logged_metrics) <= {"val_loss", "epoch"}
    assert torch.is_tensor(trainer.callback_metrics["val_loss"])
