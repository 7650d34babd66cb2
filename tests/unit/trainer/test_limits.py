"""How long fit trains, on how much data, and the modes that change both."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
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
from loopwright.callbacks import Callback, Timer
from loopwright.errors import ConfigError, DataError


def fit(
    data: Any = None, val: Any = None, *, module: Net | None = None, extra: Callback | None = None, **kwargs: Any
) -> tuple[lw.Trainer, Recorder]:
    recorder = Recorder(lambda trainer: trainer.global_step)
    callbacks = [recorder, *([extra] if extra is not None else [])]
    trainer = quiet(callbacks=callbacks, **kwargs)
    trainer.fit(module or net(Net if val is None else ValidatedNet), data if data is not None else loader(), val)
    return trainer, recorder


class Stopper(Callback):
    """Asks to stop once after so many batches of training."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        if self.seen == self.after:
            trainer.should_stop = True


# --- epochs, steps, time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "epochs", "steps"),
    [
        ({"max_epochs": 2}, 2, 8),
        ({"max_steps": 3}, 0, 3),
        ({"max_steps": 4}, 1, 4),
        ({"max_steps": 6}, 1, 6),
        ({"max_epochs": 2, "max_steps": 5}, 1, 5),
        ({"max_epochs": 1, "max_steps": 50}, 1, 4),
        ({"max_epochs": 0}, 0, 0),
        ({"max_steps": 0}, 0, 0),
        ({"max_epochs": -1, "max_steps": 9}, 2, 9),
    ],
)
def test_whichever_limit_comes_first_ends_the_training(limits: dict[str, int], epochs: int, steps: int) -> None:
    trainer, recorder = fit(**limits)
    assert (trainer.current_epoch, trainer.global_step) == (epochs, steps)
    assert recorder.notes == list(range(1, steps + 1))


def test_max_steps_counts_optimizer_steps() -> None:
    trainer, recorder = fit(loader(20), max_steps=3, accumulate_grad_batches=2)
    assert trainer.global_step == 3
    assert recorder.notes == [0, 1, 1, 2, 2, 3]


def test_no_limit_at_all_is_a_thousand_epochs() -> None:
    trainer = quiet()
    assert trainer.max_epochs is None
    assert trainer.fit_loop.epoch_limit == 1000
    assert quiet(max_steps=5).fit_loop.epoch_limit == -1


@pytest.mark.parametrize(
    ("minima", "steps"),
    [
        ({}, 2),
        ({"min_epochs": 2}, 8),
        ({"min_steps": 6}, 6),
        ({"min_steps": 2}, 4),
        ({"min_epochs": 1, "min_steps": 11}, 11),
        ({"min_epochs": 20}, 12),
    ],
)
def test_a_request_to_stop_waits_for_the_minima_but_not_beyond_the_maximum(minima: dict[str, int], steps: int) -> None:
    trainer, _ = fit(extra=Stopper(2), max_epochs=3, **minima)
    assert trainer.global_step == steps


def test_a_request_to_stop_ends_one_fit_and_not_the_next() -> None:
    module, data = net(), loader()
    trainer, _ = fit(data, module=module, extra=Stopper(2), max_epochs=2)
    assert (trainer.should_stop, trainer.global_step) == (True, 2)
    trainer.fit(module, data)
    assert (trainer.should_stop, trainer.global_step, trainer.current_epoch) == (False, 8, 2)


def test_a_request_to_stop_in_the_middle_of_a_window_ends_after_it() -> None:
    trainer, recorder = fit(extra=Stopper(2), max_epochs=1, accumulate_grad_batches=3, data=loader(18))
    assert trainer.global_step == 1
    assert recorder.notes == [0, 0, 1]


@pytest.mark.parametrize("max_time", ["00:00:00:00", timedelta(0), {"seconds": 0}])
def test_max_time_stops_at_a_step_boundary(max_time: Any) -> None:
    trainer, recorder = fit(loader(40), max_time=max_time, accumulate_grad_batches=2, max_epochs=3)
    assert trainer.global_step <= 1
    assert trainer.at_step_boundary
    assert len(recorder.notes) in (0, 2)


def test_max_time_gives_way_to_a_timer_that_is_passed() -> None:
    timer = Timer(duration="01:00:00:00")
    trainer = quiet(max_time="00:00:00:00", callbacks=timer)
    assert [c for c in trainer.callbacks if isinstance(c, Timer)] == [timer]


def test_an_epoch_that_a_limit_ends_early_is_not_counted_and_fires_its_end() -> None:
    trainer, recorder = fit(max_steps=6)
    assert recorder.seen[-4:] == ["batch0", "batch1", "epoch_end", "train_end"]
    assert trainer.current_epoch == 1


# --- a second fit ----------------------------------------------------------------------------------------------------


def test_a_second_fit_with_more_epochs_continues_as_one_fit_would() -> None:
    expected = net(Net, momentum)
    once = quiet(max_epochs=4)
    once.fit(expected, loader())

    class Kept(Net):
        def configure_optimizers(self) -> Any:
            if not hasattr(self, "kept"):
                self.__dict__["kept"] = momentum(self.parameters())
            return self.__dict__["kept"]

    module = net(Kept)
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader())
    assert (trainer.current_epoch, trainer.global_step) == (4, 16)
    assert_same(module, expected)


def test_a_second_fit_with_nothing_to_do_says_so() -> None:
    trainer, recorder = fit(max_epochs=2)
    seen = len(recorder.seen)
    with pytest.warns(UserWarning, match="nothing to do: 2 epochs and 8 steps are done"):
        trainer.fit(net(Net), loader())
    assert trainer.global_step == 8
    assert [name for name in recorder.seen[seen:] if "batch" in name] == []


def test_a_second_fit_continues_within_the_epoch_that_max_steps_ended() -> None:
    batches: list[float] = []

    class Watched(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batches.append(batch_idx)
            return self.loss(batch)

    module = net(Watched)
    trainer, data = quiet(max_steps=2), loader()
    trainer.fit(module, data)
    trainer.fit_loop.max_steps = 6
    trainer.fit(module, data)
    assert batches == [0, 1, 2, 3, 0, 1]
    assert (trainer.current_epoch, trainer.global_step) == (1, 6)


# --- how much data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "batches"), [(3, 3), (100, 8), (0.5, 4), (0.3, 2), (1.0, 8), (1, 1), (None, 8), (2.0, 2)]
)
def test_limit_train_batches_is_a_number_or_a_fraction(limit: Any, batches: int) -> None:
    trainer, recorder = fit(loader(16), max_epochs=1, limit_train_batches=limit)
    assert len(recorder.notes) == batches
    assert trainer.num_training_batches == batches


def test_a_limited_epoch_has_a_short_last_window() -> None:
    batches = list(loader(16))[:5]
    expected, module = net(Net, momentum), net(Net, momentum)
    train_by_hand(expected, batches, epochs=2, accumulate=3)
    fit(loader(16), module=module, max_epochs=2, limit_train_batches=5, accumulate_grad_batches=3)
    assert_same(module, expected)


@pytest.mark.parametrize("limit", [0, 0.0])
def test_limit_zero_trains_nothing_and_ends(limit: Any) -> None:
    trainer, recorder = fit(limit_train_batches=limit, max_epochs=-1, max_steps=5)
    assert trainer.global_step == 0
    assert "epoch_start" not in recorder.seen


def test_limit_zero_validates_nothing() -> None:
    _, recorder = fit(val=loader(4), limit_val_batches=0, max_epochs=1)
    assert "validation" not in recorder.seen


@pytest.mark.parametrize(
    ("limit", "data", "message"),
    [
        (0.1, loader(8), r"limit_train_batches=0.1 of 4 batches is less than one.*\n.*0\.25"),
        (0.5, Unsized([1]), "limit_train_batches=0.5 is a fraction.*no __len__"),
    ],
)
def test_a_limit_that_cannot_be_counted_is_an_error(limit: float, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(data, max_epochs=1, limit_train_batches=limit)


def test_an_iterable_of_unknown_length_is_read_to_its_end_each_epoch() -> None:
    batches = list(loader())
    expected, module = net(Net, momentum), net(Net, momentum)
    train_by_hand(expected, batches, epochs=3)
    trainer, _ = fit(Unsized(batches), module=module, max_epochs=3)
    assert_same(module, expected)
    assert trainer.current_epoch == 3
    assert trainer.num_training_batches == float("inf")


def test_a_plain_list_of_batches_is_a_loader() -> None:
    batches = list(loader())
    expected, module = net(Net), net(Net)
    train_by_hand(expected, batches)
    fit(batches, module=module, max_epochs=1)
    assert_same(module, expected)


def test_an_iterable_data_set_in_a_loader() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(loader().dataset)  # type: ignore[call-overload]

    expected, module = net(Net), net(Net)
    train_by_hand(expected, loader())
    trainer, _ = fit(torch.utils.data.DataLoader(Stream(), batch_size=2), module=module, max_epochs=1)
    assert_same(module, expected)
    assert trainer.global_step == 4


def test_epochs_of_an_iterator_that_is_spent_are_skipped_with_a_warning() -> None:
    class Once:
        def __init__(self) -> None:
            self.iterator = iter(list(loader()))

        def __iter__(self) -> Any:
            return self.iterator

    with pytest.warns(UserWarning, match="no batches in epoch 1.*starts from its beginning"):
        trainer, _ = fit(Once(), max_epochs=2)
    assert (trainer.current_epoch, trainer.global_step) == (2, 4)


def test_an_empty_loader_is_an_error() -> None:
    with pytest.raises(DataError, match="no batches in epoch 0"):
        fit([], max_epochs=1)
    with pytest.raises(DataError, match="drop_last=False"):
        fit(loader(1, 2, drop_last=True), max_epochs=1)


# --- several training loaders ----------------------------------------------------------------------------------------


class Joined(Net):
    """Trains on a dict of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.__dict__.setdefault("seen", []).append({key: None if b is None else len(b[0]) for key, b in batch.items()})
        return self.loss(batch["a"])


def test_a_dict_of_loaders_gives_dicts_until_the_longest_ends() -> None:
    module = net(Joined)
    fit({"a": loader(4, 2), "b": loader(9, 3)}, module=module, max_epochs=1)
    assert module.__dict__["seen"] == [{"a": 2, "b": 3}] * 3


def test_a_combined_loader_says_its_mode() -> None:
    module = net(Joined)
    combined = lw.CombinedLoader({"a": loader(8, 2), "b": loader(6, 3)}, "min_size")
    trainer, _ = fit(combined, module=module, max_epochs=2)
    assert module.__dict__["seen"] == [{"a": 2, "b": 3}] * 4
    assert trainer.global_step == 4
    longest = net(Joined)
    fit(lw.CombinedLoader({"a": loader(8, 2), "b": loader(6, 3)}, "max_size"), module=longest, max_epochs=1)
    assert longest.__dict__["seen"] == [{"a": 2, "b": 3}] * 2 + [{"a": 2, "b": None}] * 2


# --- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "batches"), [(True, 1), (1, 1), (3, 3)])
def test_fast_dev_run_touches_so_many_batches_of_everything_and_keeps_nothing(
    value: Any, batches: int, tmp_path: Any
) -> None:
    recorder = Recorder()
    logger = RecordingLogger()
    trainer = lw.Trainer(
        accelerator="cpu",
        fast_dev_run=value,
        callbacks=recorder,
        logger=logger,
        default_root_dir=tmp_path,
        max_epochs=50,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=7,
    )
    module = net(ValidatedNet)
    trainer.fit(module, loader(), loader())
    assert recorder.seen == [
        "train_start", "epoch_start", *[f"batch{i}" for i in range(batches)], "validation",
        *[f"val0.{i}" for i in range(batches)], "epoch_end", "train_end",
    ]  # fmt: skip
    assert trainer.global_step == batches
    assert list(tmp_path.iterdir()) == []
    assert logger.rows == []
    assert len(trainer.predict(module, loader())) == batches  # type: ignore[arg-type]


def test_fast_dev_run_has_a_logger_that_takes_everything() -> None:
    class Drawing(ValidatedNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.experiment.add_histogram("x", batch[0], global_step=0)
            self.logger.log_image(key="x", images=[])
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

    trainer = lw.Trainer(accelerator="cpu", fast_dev_run=True, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(net(Drawing), loader(), loader())
    assert isinstance(trainer.logger, lw.DummyLogger)
    assert "loss" in trainer.logged_metrics
    assert lw.Trainer(accelerator="cpu", fast_dev_run=True, logger=False).logger is None


def test_there_is_always_a_profiler() -> None:
    class Measured(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with self.trainer.profiler.profile("loss"):
                return self.loss(batch)

    trainer = quiet(max_epochs=1)
    trainer.fit(net(Measured), loader())
    assert type(trainer.profiler).__name__ == "PassThroughProfiler"


def test_barebones_turns_off_everything_that_costs() -> None:
    class Logging(ValidatedNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0)
            return self.loss(batch)

    expected, module = net(Net), net(Logging)
    train_by_hand(expected, loader())
    trainer = lw.Trainer(accelerator="cpu", barebones=True, max_epochs=1)
    trainer.fit(module, loader(), loader())
    assert_same(module, expected)
    assert (trainer.callbacks, trainer.loggers, trainer.callback_metrics) == ([], [], {})
    assert trainer.num_sanity_val_batches in ([], [0])


@pytest.mark.parametrize(
    "conflict",
    [
        {"enable_checkpointing": True}, {"logger": True}, {"enable_progress_bar": True},
        {"enable_model_summary": True}, {"num_sanity_val_steps": 1}, {"fast_dev_run": True},
        {"detect_anomaly": True}, {"profiler": "simple"}, {"log_every_n_steps": 5},
    ],
)  # fmt: skip
def test_barebones_refuses_its_opposites(conflict: dict[str, Any]) -> None:
    (name,) = conflict
    with pytest.raises(ConfigError, match=f"barebones=True.*{name}="):
        lw.Trainer(accelerator="cpu", barebones=True, **conflict)


@pytest.mark.parametrize(("value", "batches"), [(2, 2), (0.5, 4)])
def test_overfit_batches_trains_and_validates_on_the_same_few_in_order(value: Any, batches: int) -> None:
    seen: list[Any] = []

    class Watched(ValidatedNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0].clone())
            return self.loss(batch)

    recorder = Recorder()
    trainer = quiet(max_epochs=3, overfit_batches=value, callbacks=recorder, num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match="loader shuffles; it is read in order instead") as warned:
        trainer.fit(net(Watched), loader(16, shuffle=True), loader(16, shuffle=True))
    assert ["training" in str(one.message) for one in warned] == [True, False]
    assert isinstance(trainer.val_dataloaders.sampler, SequentialSampler)
    ordered = [batch[0] for batch in loader(16)][:batches]
    assert len(seen) == 3 * batches
    assert all(torch.equal(a, b) for a, b in zip(seen, ordered * 3, strict=True))
    assert recorder.seen.count("val0.0") == 3
    assert f"val0.{batches - 1}" in recorder.seen
    assert f"val0.{batches}" not in recorder.seen


def test_reload_dataloaders_asks_again_every_n_epochs() -> None:
    asked: list[tuple[str, int]] = []

    class Reloading(ValidatedNet):
        def train_dataloader(self) -> Any:
            asked.append(("train", self.current_epoch))
            return loader(4 + 2 * self.current_epoch)

        def val_dataloader(self) -> Any:
            asked.append(("val", self.current_epoch))
            return loader(2)

    trainer = quiet(max_epochs=5, reload_dataloaders_every_n_epochs=2)
    trainer.fit(net(Reloading))
    assert [epoch for which, epoch in asked if which == "train"] == [0, 2, 4]
    assert [epoch for which, epoch in asked if which == "val"] == [0, 2, 4]
    assert trainer.global_step == 2 + 2 + 4 + 4 + 6


def test_loaders_are_asked_for_once_by_default() -> None:
    class Counting(ValidatedNet):
        asked = 0

        def train_dataloader(self) -> Any:
            self.asked += 1
            return loader()

    module = net(Counting)
    quiet(max_epochs=3).fit(module, val_dataloaders=loader())
    assert module.asked == 1


def test_detect_anomaly_names_the_operation_and_ends_with_the_run() -> None:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert torch.is_anomaly_enabled()
            return (self.loss(batch) * 0 - 1).sqrt()

    with pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError, match="returned nan values"):
        quiet(max_epochs=1, detect_anomaly=True).fit(net(Broken), loader())
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(("value", "warn_only"), [(True, False), ("warn", True)])
def test_deterministic_holds_during_the_run_only(value: Any, warn_only: bool, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    class Watched(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
            assert not torch.backends.cudnn.benchmark
            return self.loss(batch)

    quiet(max_epochs=1, deterministic=value).fit(net(Watched), loader())
    assert not torch.are_deterministic_algorithms_enabled()


def test_benchmark_holds_during_the_run_only() -> None:
    class Watched(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert torch.backends.cudnn.benchmark
            return self.loss(batch)

    before = torch.backends.cudnn.benchmark
    quiet(max_epochs=1, benchmark=True).fit(net(Watched), loader())
    assert torch.backends.cudnn.benchmark == before


def test_the_same_seed_gives_the_same_weights() -> None:
    def trained() -> Any:
        lw.seed_everything(5, verbose=False)
        module = Net(momentum, dropout=0.3)
        quiet(max_epochs=2, deterministic=True).fit(module, loader(shuffle=True))
        return weights(module)

    assert_same(trained(), trained())


def test_validation_loaders_are_asked_for_again_only_where_they_validate() -> None:
    asked: list[int] = []

    class Reloading(ValidatedNet):
        def val_dataloader(self) -> Any:
            asked.append(self.current_epoch)
            return loader(2)

    trainer = quiet(max_epochs=9, reload_dataloaders_every_n_epochs=3, check_val_every_n_epoch=2)
    trainer.fit(net(Reloading), loader())
    assert asked == [0, 1, 5]  # asked for at the beginning, and counted from the first validation
