"""Validation inside fit: when it comes, what it leaves alone."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch import nn
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
    pairs,
    quiet,
    train_by_hand,
    weights,
)

import loopwright as lw
from loopwright.callbacks import EMA, Callback
from loopwright.errors import ConfigError, ModuleError


def validated_after(count: int = 8, val: Any = None, *, data: Any = None, **kwargs: Any) -> list[int]:
    """Return after how many training batches in all each validation came."""
    recorder = Recorder()
    settings = {"max_epochs": 1, "num_sanity_val_steps": 0, "callbacks": recorder, **kwargs}
    quiet(**settings).fit(
        net(ValidatedNet), data if data is not None else loader(count), val if val is not None else loader(2)
    )
    batches, found = 0, []
    for name in recorder.seen:
        batches += name.startswith("batch")
        if name == "validation":
            found.append(batches)
    return found


# --- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_epochs": 2}, [4, 8]),
        ({"max_epochs": 5, "check_val_every_n_epoch": 2}, [8, 16]),
        ({"val_check_interval": 2, "max_epochs": 2}, [2, 4, 6, 8]),
        ({"val_check_interval": 3, "max_epochs": 2}, [3, 7]),
        ({"val_check_interval": 0.5}, [2, 4]),
        ({"val_check_interval": 0.25}, [1, 2, 3, 4]),
        ({"val_check_interval": 0.1}, [1, 2, 3, 4]),
        ({"val_check_interval": 1}, [1, 2, 3, 4]),
        ({"val_check_interval": 1.0}, [4]),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 3}, [3, 6, 9, 12]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None, "max_epochs": 3}, [5, 10]),
        ({"val_check_interval": 2, "check_val_every_n_epoch": 2, "max_epochs": 4}, [6, 8, 14, 16]),
        ({"max_steps": 6}, [4]),
        ({"accumulate_grad_batches": 4, "val_check_interval": 2, "max_epochs": 2}, [4, 8]),
        ({"limit_train_batches": 3, "max_epochs": 2}, [3, 6]),
        ({"limit_train_batches": 0.5, "val_check_interval": 0.5}, [1, 2]),
    ],
)
def test_validation_comes_when_the_arguments_say(arguments: dict[str, Any], expected: list[int]) -> None:
    assert validated_after(8, **arguments) == expected


@pytest.mark.parametrize(("interval", "expected"), [(1.0, [4, 8]), (3, [3, 7])])
def test_validation_over_data_of_unknown_length(interval: Any, expected: list[int]) -> None:
    data = Unsized(list(loader()))
    assert validated_after(data=data, val_check_interval=interval, max_epochs=2) == expected


def test_a_fraction_of_unknown_length_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"val_check_interval=0.5 is a fraction"):
        validated_after(data=Unsized(list(loader())), val_check_interval=0.5)


def test_an_interval_beyond_the_epoch_is_an_error_that_says_how_to_count_across() -> None:
    with pytest.raises(
        ConfigError, match=r"val_check_interval=5 .* 4 training batches.*\n.*check_val_every_n_epoch=None"
    ):
        validated_after(8, val_check_interval=5)


def test_an_interval_in_time_validates_when_it_is_over() -> None:
    assert validated_after(8, val_check_interval={"microseconds": 1}) == [1, 2, 3, 4]
    assert validated_after(8, val_check_interval="01:00:00:00") == []


def test_validation_is_due_tells_what_comes_right_after() -> None:
    recorder = Recorder(lambda trainer: (trainer.at_step_boundary, trainer.validation_is_due))
    quiet(max_epochs=1, val_check_interval=2, accumulate_grad_batches=2, callbacks=recorder).fit(
        net(ValidatedNet), loader(10), loader(2)
    )
    assert recorder.notes == [(False, False), (True, True), (False, False), (True, True), (True, False)]


@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (0.5, 2), (1.0, 4), (None, 4), (100, 4)])
def test_limit_val_batches(limit: Any, batches: int) -> None:
    recorder = Recorder()
    trainer = quiet(max_epochs=1, limit_val_batches=limit, num_sanity_val_steps=0, callbacks=recorder)
    trainer.fit(net(ValidatedNet), loader(), loader(8))
    assert sum(name.startswith("val0") for name in recorder.seen) == batches
    assert trainer.num_val_batches == [batches]


def test_validation_runs_before_the_end_of_the_epoch() -> None:
    recorder = Recorder()
    quiet(max_epochs=1, num_sanity_val_steps=0, callbacks=recorder).fit(net(ValidatedNet), loader(4), loader(2))
    assert recorder.seen == [
        "train_start", "epoch_start", "batch0", "batch1", "validation", "val0.0", "epoch_end", "train_end",
    ]  # fmt: skip


# --- sanity check ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "batches"), [(None, 2), (1, 1), (-1, 4), (0, 0), (100, 4)])
def test_the_sanity_check_reads_so_many_batches(count: Any, batches: int) -> None:
    recorder = Recorder()
    trainer = quiet(max_steps=1, num_sanity_val_steps=count, callbacks=recorder)
    trainer.fit(net(ValidatedNet), loader(), loader(8))
    before = recorder.seen[: recorder.seen.index("train_start")]
    assert sum(name.startswith("val0") for name in before) == batches
    assert before[:1] == (["sanity_start"] if batches else [])


def test_the_sanity_check_leaves_no_trace() -> None:
    logger = RecordingLogger()
    ema = EMA(decay=0.5)
    seen: list[Any] = []

    class Looking(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append((dict(trainer.callback_metrics), dict(trainer.progress_bar_metrics), trainer.global_step))
            seen.append(ema.num_updates)

    class Both(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), prog_bar=True, on_step=True, on_epoch=True)

        def on_validation_epoch_end(self) -> None:
            self.log("end", 1.0, prog_bar=True)

    trainer = quiet(max_epochs=1, logger=logger, log_every_n_steps=1, callbacks=[ema, Looking()])
    trainer.fit(net(Both), loader(), loader(8))
    assert seen == [({}, {}, 0), 0]
    assert len(logger.values("val_loss_epoch")) == 1
    assert [step for step, _ in logger.values("val_loss_step")] == [0, 1, 2, 3]


def test_the_sanity_check_does_not_overwrite_what_an_earlier_fit_measured() -> None:
    class Counting(ValidatedNet):
        value = 0.0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.value += 1
            self.log("v", self.value)

    module = net(Counting)
    trainer = quiet(max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(module, loader(), loader(2))
    assert trainer.callback_metrics["v"] == 2
    trainer.fit_loop.max_epochs = 2
    trainer.check_val_every_n_epoch = 3
    trainer.fit(module, loader(), loader(2))
    assert trainer.callback_metrics["v"] == 2


# --- what validation leaves alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0])
@pytest.mark.parametrize("shuffle_val", [False, True])
def test_training_is_the_same_bits_with_and_without_validation(workers: int, shuffle_val: bool) -> None:
    class Random(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            torch.rand(3)
            super().validation_step(batch, batch_idx)

    expected = net(Net, momentum, dropout=0.5, norm=True)
    train_by_hand(expected, loader(8, shuffle=True), epochs=2)
    module = net(Random, momentum, dropout=0.5, norm=True)
    quiet(max_epochs=2, val_check_interval=1).fit(
        module, loader(8, shuffle=True), loader(6, shuffle=shuffle_val, num_workers=workers)
    )
    assert_same(module, expected)


def test_modes_are_given_back_per_module() -> None:
    modes: list[Any] = []

    class Frozen(ValidatedNet):
        def on_train_start(self) -> None:
            self.net[2].eval()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            modes.append([child.training for child in self.net])
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not any(child.training for child in self.modules())

    quiet(max_epochs=2).fit(net(Frozen, norm=True), loader(4), loader(4))
    assert modes == [[True, True, False, True]] * 4


def test_own_mode_hooks_replace_the_defaults() -> None:
    class Own(ValidatedNet):
        calls = 0

        def on_validation_model_eval(self) -> None:
            self.calls += 1

        def on_validation_model_train(self) -> None:
            self.calls += 10

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert self.training

    module = net(Own)
    quiet(max_epochs=1, num_sanity_val_steps=0).fit(module, loader(), loader())
    assert module.calls == 11


@pytest.mark.parametrize("inference_mode", [True, False])
def test_gradients_are_off_in_validation_and_on_again_after(inference_mode: bool) -> None:
    class Watched(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not torch.is_inference_mode_enabled()  # what it leaves in the module is trained with
            assert not torch.is_grad_enabled()

        def on_validation_end(self) -> None:
            assert not torch.is_inference_mode_enabled()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert torch.is_grad_enabled()
            return self.loss(batch)

    quiet(max_epochs=2, inference_mode=inference_mode).fit(net(Watched), loader(), loader())


def test_inference_tensors_do_not_leak_into_training() -> None:
    class Keeping(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", self.loss(batch))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if "v" in self.trainer.callback_metrics:
                loss = loss * self.trainer.callback_metrics["v"]
            return loss

    quiet(max_epochs=2).fit(net(Keeping), loader(), loader())


class Normalizing(ValidatedNet):
    """Sets a buffer in validations that training multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.scale = self.net(batch[0]).square().mean(0)

    test_step = predict_step = validation_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) * self.scale).mean()


class Caching(ValidatedNet):
    """Makes a table when it is first needed, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def table(self, size: int) -> torch.Tensor:
        if size not in self.tables:
            self.tables[size] = torch.arange(float(size)).unsqueeze(1)
        return self.tables[size]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.table(len(batch[0]))

    test_step = predict_step = validation_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) * self.table(len(batch[0]))).mean()


class Counting(ValidatedNet):
    """Starts a count anew in each validation; training adds to it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count = torch.zeros(1)

    test_step = predict_step = validation_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return self.loss(batch)


@pytest.mark.parametrize("kind", [Normalizing, Caching, Counting])
@pytest.mark.parametrize("sanity", [0, 2])
def test_what_a_validation_in_fit_leaves_in_the_module_can_be_trained_with(
    kind: type[ValidatedNet], sanity: int
) -> None:
    trainer = quiet(max_epochs=2, num_sanity_val_steps=sanity)
    trainer.fit(net(kind), loader(), loader())
    assert trainer.global_step == 8


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
@pytest.mark.parametrize(("kind", "name"), [(Normalizing, "scale"), (Caching, "tables"), (Counting, "count")])
def test_what_an_evaluation_before_fit_leaves_in_the_module_is_named_in_the_error(
    verb: str, kind: type[ValidatedNet], name: str
) -> None:
    module = net(kind)
    getattr(quiet(), verb)(module, loader())
    with pytest.raises(RuntimeError, match="(?i)inference tensor") as raised:
        quiet(max_epochs=1, limit_val_batches=0).fit(module, loader())
    note = "\n".join(raised.value.__notes__)
    assert f"{kind.__name__} holds such tensors in {name}." in note
    assert "inference_mode=False" in note
    again = net(kind)
    getattr(quiet(inference_mode=False), verb)(again, loader())
    quiet(max_epochs=1, limit_val_batches=0).fit(again, loader())


def test_a_validation_makes_no_more_calls_than_in_inference_mode() -> None:
    def calls(trainer: lw.Trainer, verb: str) -> int:
        counts: list[int] = []

        class Counted(ValidatedNet):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                if batch_idx == 2:
                    counts.append(0)
                    sys.setprofile(lambda frame, event, arg: counts.__setitem__(0, counts[0] + (event == "call")))
                elif batch_idx == 12:
                    sys.setprofile(None)

        module = net(Counted)
        gc.disable()  # a finalizer is a call, too
        try:
            if verb == "fit":
                trainer.fit(module, loader(2), loader(32))
            else:
                trainer.validate(module, loader(32), verbose=False)
        finally:
            gc.enable()
            sys.setprofile(None)
        return counts[0]

    in_fit = calls(quiet(max_epochs=1, num_sanity_val_steps=0), "fit")
    assert in_fit <= calls(quiet(), "validate")


def test_the_position_in_the_training_data_is_untouched() -> None:
    seen: list[list[torch.Tensor]] = []

    class Watched(ValidatedNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen[-1].append(batch[0].clone())
            return self.loss(batch)

    for arguments in ({}, {"val_check_interval": 1}):
        seen.append([])
        quiet(max_epochs=2, **arguments).fit(net(Watched), loader(8, shuffle=True), loader(4, shuffle=True))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_an_average_is_evaluated_once_it_was_updated_and_training_goes_on_raw() -> None:
    losses: list[float] = []

    class Watched(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            losses.append(self.net[0].bias.sum().item())

    expected, module = net(Net), net(Watched)
    train_by_hand(expected, loader(4), epochs=2)
    ema = EMA(decay=0.9, update_starting_at_step=2)
    trainer = quiet(max_epochs=2, callbacks=ema, num_sanity_val_steps=0)
    trainer.fit(module, loader(4), loader(2))

    assert_same(module, expected)
    raw = net(Net)
    train_by_hand(raw, loader(4), epochs=1)
    assert losses[0] == raw.net[0].bias.sum().item()  # no update yet: the raw weights are evaluated
    assert losses[1] == pytest.approx(ema.shadow_state_dict()["net.0.bias"].sum().item())
    assert losses[1] != expected.net[0].bias.sum().item()


# --- several loaders -------------------------------------------------------------------------------------------------


class Several(ValidatedNet):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        self.log("size", float(len(batch[0])), reduce_fx="sum")


def test_several_loaders_are_read_in_turn_and_have_stable_names() -> None:
    recorder, logger = Recorder(), RecordingLogger()
    trainer = quiet(max_epochs=2, num_sanity_val_steps=0, callbacks=recorder, logger=logger)
    trainer.fit(net(Several), loader(2), [loader(4, 2), loader(3, 3)])
    assert [name for name in recorder.seen if name.startswith("val")] == [
        "validation",
        "val0.0",
        "val0.1",
        "val1.0",
    ] * 2
    assert logger.values("size/dataloader_idx_0") == [(0, 4.0), (1, 4.0)]
    assert logger.values("size/dataloader_idx_1") == [(0, 3.0), (1, 3.0)]


def test_the_number_of_a_loader_comes_last_in_keys_of_steps_and_epochs() -> None:
    class Both(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("size", float(len(batch[0])), on_step=True, on_epoch=True, batch_size=1)

    logger = RecordingLogger()
    trainer = quiet(max_epochs=1, logger=logger, log_every_n_steps=1)
    trainer.fit(net(Both), loader(2), [loader(4, 2), loader(3, 3)])
    keys = {f"size{suffix}/dataloader_idx_{index}" for suffix in ("_epoch", "") for index in (0, 1)}
    assert keys <= set(trainer.callback_metrics)
    assert logger.values("size_epoch/dataloader_idx_1") == [(0, 3.0)]
    assert logger.values("size_step/dataloader_idx_0") == [(0, 2.0), (1, 2.0)]
    assert [set(one) for one in trainer.validate(net(Both), [loader(4, 2), loader(3, 3)], verbose=False)] == [
        {"size_epoch/dataloader_idx_0"}, {"size_epoch/dataloader_idx_1"},
    ]  # fmt: skip


def test_an_empty_loader_among_several_gives_no_values() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(net(Several), loader(2), [loader(4), []])
    assert set(trainer.callback_metrics) == {"size/dataloader_idx_0"}


def test_a_step_without_dataloader_idx_refuses_several_loaders() -> None:
    with pytest.raises(ModuleError, match="validation_step is given several loaders"):
        quiet(max_epochs=1).fit(net(ValidatedNet), loader(), [loader(), loader()])


def test_a_combined_loader_may_give_the_batches_together() -> None:
    class Together(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("pairs", 1.0, reduce_fx="sum")
            assert set(batch) == {"a", "b"}

    combined = lw.CombinedLoader({"a": loader(8), "b": loader(4)}, "min_size")
    trainer = quiet(max_epochs=1)
    trainer.fit(net(Together), loader(), combined)
    assert trainer.callback_metrics["pairs"] == 2
    assert trainer.num_val_batches == [2]


# --- halves that are missing -----------------------------------------------------------------------------------------


def test_a_loader_without_a_step_and_a_step_without_a_loader_are_said() -> None:
    with pytest.warns(UserWarning, match="there is no validation_step"):
        quiet(max_epochs=1).fit(net(Net), loader(), loader())
    with pytest.warns(UserWarning, match="there is no loader to validate with"):
        quiet(max_epochs=1).fit(net(ValidatedNet), loader())


def test_eval_only_batch_norm_statistics_stay() -> None:
    module = net(ValidatedNet, norm=True)
    before = module.net[2].running_mean.clone()
    quiet().validate(module, loader(), verbose=False)
    assert torch.equal(module.net[2].running_mean, before)
    assert isinstance(module.net[2], nn.BatchNorm1d)


class SplitsAtRandom(ValidatedNet):
    """Makes its validation data with draws from the global generators, and notes when."""

    def val_dataloader(self) -> Any:
        self.asked = (self.trainer.sanity_checking, list(self.trainer.num_val_batches))
        return [torch.rand(1, 4).expand(2, 4) for _ in range(2)]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(3)


@pytest.mark.parametrize("steps", [0, 2])
def test_val_dataloader_belongs_to_the_sanity_check_and_draws_nothing_from_training(steps: int) -> None:
    def weights_of(kind: Any) -> tuple[Any, Any]:
        module = net(kind)
        torch.manual_seed(5)
        quiet(max_epochs=2, num_sanity_val_steps=steps).fit(module, loader(8, 2, shuffle=True))
        return module, weights(module)

    module, after = weights_of(SplitsAtRandom)
    assert module.asked == (steps > 0, [])
    assert_same(weights_of(Net)[1], after)


def test_hooks_of_the_sanity_check_surround_val_dataloader() -> None:
    order: list[str] = []

    class Noting(ValidatedNet):
        def val_dataloader(self) -> Any:
            order.append("loader")
            return loader()

    class Hooks(lw.Callback):
        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            order.append("start")

        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            order.append(f"end {trainer.num_sanity_val_batches}")

    quiet(max_epochs=1, num_sanity_val_steps=2, callbacks=[Hooks()]).fit(net(Noting), loader())
    assert order == ["start", "loader", "end [2]"]


def test_validation_samplers_hear_the_epoch() -> None:
    class Epochs(torch.utils.data.SequentialSampler):
        def __init__(self, data: Any) -> None:
            super().__init__(data)
            self.heard: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.heard.append(epoch)

    data = pairs(4)
    sampler = Epochs(data)
    validation = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    trainer = quiet(max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(net(ValidatedNet), loader(), validation)
    assert sampler.heard == [0, 0, 1]
    trainer.validate(net(ValidatedNet), validation, verbose=False)
    assert sampler.heard == [0, 0, 1, 2]
