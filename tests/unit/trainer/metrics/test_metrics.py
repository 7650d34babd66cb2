"""self.log and self.log_dict: values against hand computation, every argument, every refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from toys import Net, RecordingLogger, Unsized, ValidatedNet, loader, net, quiet

import loopwright as lw
from loopwright.callbacks import Callback
from loopwright.errors import ConfigError, ModuleError


class Numbers(Net):
    """Logs what a function of (module, batch, index) says, in training and in validation."""

    def __init__(self, train: Any = None, val: Any = None) -> None:
        super().__init__(lambda parameters: SGD(parameters, lr=0.0))
        self.train_log, self.val_log = train, val

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.train_log is not None:
            self.train_log(self, batch, batch_idx)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.val_log is not None:
            self.val_log(self, batch, batch_idx)


def fit_logging(
    train: Any = None, data: Any = None, *, val: Any = None, val_data: Any = None, **kwargs: Any
) -> tuple[lw.Trainer, RecordingLogger]:
    logger = RecordingLogger()
    trainer = quiet(**{"max_epochs": 1, "logger": logger, "log_every_n_steps": 1, **kwargs})
    if val_data is None:
        kwargs = {}
        module: Net = net(TrainOnly, train)
        trainer.fit(module, data if data is not None else loader())
    else:
        trainer.fit(net(Numbers, train, val), data if data is not None else loader(), val_data)
    return trainer, logger


class TrainOnly(Net):
    def __init__(self, train: Any) -> None:
        super().__init__(lambda parameters: SGD(parameters, lr=0.0))
        self.train_log = train

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.train_log(self, batch, batch_idx)
        return self.loss(batch)


# --- values ----------------------------------------------------------------------------------------------------------


def test_a_training_value_is_logged_for_each_step_at_the_index_of_the_step() -> None:
    _, logger = fit_logging(lambda m, b, i: m.log("x", float(i)), max_epochs=2)
    assert logger.values("x") == [(step, float(step % 4)) for step in range(8)]
    assert [row["epoch"] for _, row in logger.rows] == [0] * 4 + [1] * 4


def test_step_values_are_logged_at_the_interval_only() -> None:
    _, logger = fit_logging(lambda m, b, i: m.log("x", float(i)), loader(20), log_every_n_steps=3)
    assert logger.values("x") == [(2, 2.0), (5, 5.0), (8, 8.0)]
    _, never = fit_logging(lambda m, b, i: m.log("x", float(i)), loader(20), log_every_n_steps=0)
    assert never.rows == []


def test_the_epoch_mean_is_weighted_by_the_size_of_each_batch() -> None:
    data = loader(9, 4)  # 4, 4 and 1 samples
    trainer, logger = fit_logging(lambda m, b, i: m.log("x", b[0].sum(), on_step=False, on_epoch=True), data)
    sums, sizes = zip(*[(batch[0].sum().item(), len(batch[0])) for batch in data], strict=True)
    expected = sum(s * n for s, n in zip(sums, sizes, strict=True)) / sum(sizes)
    assert trainer.callback_metrics["x"].item() == pytest.approx(expected, rel=1e-6)
    assert logger.values("x") == [(2, pytest.approx(expected, rel=1e-6))]


def test_batch_size_overrides_the_weight() -> None:
    trainer, _ = fit_logging(
        lambda m, b, i: m.log("x", float(i), on_step=False, on_epoch=True, batch_size=i), loader(8)
    )
    assert trainer.callback_metrics["x"].item() == pytest.approx((1 + 4 + 9) / 6)


def test_a_loss_object_brings_its_own_weight() -> None:
    weights = [1.0, 0.0, 5.0, 2.0]
    trainer, _ = fit_logging(
        lambda m, b, i: m.log("x", lw.Loss(torch.tensor(10.0 * i), weights[i]), on_step=False, on_epoch=True)
    )
    assert trainer.callback_metrics["x"].item() == pytest.approx((0 + 20 + 30) / 8)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        ("mean", 2.5), ("avg", 2.5), (torch.mean, 2.5),
        ("sum", 10.0), (torch.sum, 10.0), (sum, 10.0),
        ("min", 1.0), (torch.min, 1.0), (min, 1.0),
        ("max", 4.0), (torch.max, 4.0), (max, 4.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("on_device", [True, False])
def test_an_epoch_is_reduced_as_asked(reduce_fx: Any, expected: float, on_device: bool) -> None:
    values = [4.0, 1.0, 3.0, 2.0]

    def log(module: Any, batch: Any, index: int) -> None:
        value = torch.tensor(values[index]) if on_device else values[index]
        module.log("x", value, on_step=False, on_epoch=True, reduce_fx=reduce_fx)

    trainer, _ = fit_logging(log)
    assert trainer.callback_metrics["x"] == expected


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", 1.5), ("sum", 3.0), ("min", 1.0), ("max", 2.0)])
def test_a_step_of_several_micro_batches_is_reduced_over_them(reduce_fx: str, expected: float) -> None:
    _, logger = fit_logging(
        lambda m, b, i: m.log("x", float(i % 2 + 1), reduce_fx=reduce_fx), accumulate_grad_batches=2
    )
    assert logger.values("x") == [(0, expected), (1, expected)]


def test_a_step_of_unequal_micro_batches_is_weighted() -> None:
    _, logger = fit_logging(lambda m, b, i: m.log("x", float(i)), loader(3, 2), accumulate_grad_batches=2)
    assert logger.values("x") == [(0, pytest.approx(1 / 3))]


def test_both_step_and_epoch_fork_the_key_and_keep_the_bare_one_for_callbacks() -> None:
    trainer, logger = fit_logging(lambda m, b, i: m.log("x", float(i), on_step=True, on_epoch=True))
    assert logger.values("x_step") == [(i, float(i)) for i in range(4)]
    assert logger.values("x_epoch") == [(3, 1.5)]
    assert logger.values("x") == []
    metrics = trainer.callback_metrics
    assert (metrics["x_step"], metrics["x_epoch"], metrics["x"]) == (3.0, 1.5, 1.5)


def test_logging_one_key_twice_in_a_step_counts_both() -> None:
    def twice(module: Any, batch: Any, index: int) -> None:
        module.log("x", 1.0, on_step=True, on_epoch=True)
        module.log("x", 3.0, on_step=True, on_epoch=True)

    trainer, logger = fit_logging(twice)
    assert trainer.callback_metrics["x_epoch"] == 2.0
    assert logger.values("x_step")[0] == (0, 2.0)


def test_sums_are_kept_in_double_precision() -> None:
    count = 600  # more than a chunk, so that partial sums are folded
    trainer, _ = fit_logging(
        lambda m, b, i: m.log("x", torch.tensor(1e8 if i == 0 else 1.0), on_step=False, on_epoch=True, reduce_fx="sum"),
        loader(count, 1),
    )
    expected = torch.tensor(1e8 + count - 1, dtype=torch.float64).float()
    assert trainer.callback_metrics["x"] == expected


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", None), ("min", 0.0), ("max", 599.0)])
def test_an_epoch_of_several_chunks_is_reduced_over_all_of_them(reduce_fx: str, expected: Any) -> None:
    weights = [1 + index % 3 for index in range(600)]
    if reduce_fx == "mean":
        expected = sum(index * weight for index, weight in enumerate(weights)) / sum(weights)
    trainer, _ = fit_logging(
        lambda m, b, i: m.log(
            "x", torch.tensor(float(i)), on_step=False, on_epoch=True, reduce_fx=reduce_fx, batch_size=weights[i]
        ),
        loader(600, 1),
    )
    assert trainer.callback_metrics["x"].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("value", [True, 3, torch.tensor(3), torch.tensor([3.0]), torch.tensor(3, dtype=torch.int64)])
def test_numbers_of_any_kind_can_be_logged(value: Any) -> None:
    trainer, logger = fit_logging(lambda m, b, i: m.log("x", value, on_step=True, on_epoch=True))
    assert trainer.callback_metrics["x"] == float(value)
    assert trainer.callback_metrics["x"].shape == ()
    assert isinstance(logger.values("x_step")[0][1], float)


def test_values_are_detached_and_keep_no_graph() -> None:
    trainer, _ = fit_logging(lambda m, b, i: m.log("x", m.loss(b), on_step=True, on_epoch=True))
    assert not trainer.callback_metrics["x_step"].requires_grad
    assert not trainer.callback_metrics["x_epoch"].requires_grad


def test_a_nan_shows_as_nan() -> None:
    trainer, logger = fit_logging(lambda m, b, i: m.log("x", math.nan if i == 1 else 1.0, on_step=True, on_epoch=True))
    assert math.isnan(logger.values("x_step")[1][1])
    assert math.isnan(trainer.callback_metrics["x_epoch"])


def test_a_parameter_is_logged_as_it_was() -> None:
    class Learned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(self.scale.item())
            self.log("scale", self.scale, on_step=True, on_epoch=True)
            return self.loss(batch) * self.scale

    logger = RecordingLogger()
    module = net(Learned)
    trainer = quiet(max_epochs=1, logger=logger, log_every_n_steps=1)
    trainer.fit(module, loader())
    assert [value for _, value in logger.values("scale_step")] == module.seen
    assert trainer.callback_metrics["scale_epoch"].item() == pytest.approx(sum(module.seen) / 4)


@pytest.mark.parametrize("on_epoch", [True, False])
def test_a_tensor_that_is_changed_after_it_was_logged_is_found(on_epoch: bool) -> None:
    class Counting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=not on_epoch, on_epoch=on_epoch)
            loss += 1
            return loss

    with pytest.raises(ModuleError, match=r"'loss' was changed in place.*\n.*clone"):
        quiet(max_epochs=1, logger=RecordingLogger(), log_every_n_steps=1).fit(net(Counting), loader())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_of_inference_mode_counts_as_it_was_when_it_was_logged(shape: tuple[int, ...]) -> None:
    class Counting(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            value = torch.full(shape, batch_idx + 0.5)
            self.log("value", value)
            value += 100

    (result,) = quiet().validate(net(Counting), loader(), verbose=False)
    assert result["value"] == 2.0


def test_progress_bar_metrics_are_host_numbers_of_the_last_boundary() -> None:
    trainer, _ = fit_logging(
        lambda m, b, i: m.log_dict({"a": torch.tensor(float(i)), "b": 2.0}, prog_bar=True),
        loader(20),
        log_every_n_steps=4,
    )
    assert trainer.progress_bar_metrics == {"a": 9.0, "b": 2.0}  # the epoch's end is the last of them
    assert all(type(value) is float for value in trainer.progress_bar_metrics.values())


def test_logger_false_keeps_a_value_from_the_loggers() -> None:
    trainer, logger = fit_logging(lambda m, b, i: m.log("x", 1.0, logger=False, on_step=True, on_epoch=True))
    assert logger.rows == []
    assert trainer.callback_metrics["x"] == 1.0


def test_a_key_named_step_sets_the_x_axis() -> None:
    _, logger = fit_logging(lambda m, b, i: m.log_dict({"x": 1.0, "step": 100.0 * i}))
    assert logger.values("x") == [(0, 1.0), (100, 1.0), (200, 1.0), (300, 1.0)]


def test_an_epoch_hook_logs_one_value_per_epoch() -> None:
    class AtEnds(Net):
        def on_train_epoch_start(self) -> None:
            self.log("start", float(self.current_epoch))

        def on_train_epoch_end(self) -> None:
            self.log("end", 10.0 + self.current_epoch)

    logger = RecordingLogger()
    trainer = quiet(max_epochs=2, logger=logger)
    trainer.fit(net(AtEnds), loader())
    assert logger.values("start") == [(3, 0.0), (7, 1.0)]
    assert logger.values("end") == [(3, 10.0), (7, 11.0)]


def test_callbacks_log_by_the_same_rules() -> None:
    class Logging(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("from_callback", outputs["loss"])  # type: ignore[attr-defined]

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.log_dict({"val_x": 7.0})  # type: ignore[attr-defined]

    logger = RecordingLogger()
    trainer = quiet(max_epochs=1, logger=logger, log_every_n_steps=1, callbacks=Logging(), num_sanity_val_steps=0)
    trainer.fit(net(ValidatedNet), loader(), loader(4))
    assert len(logger.values("from_callback")) == 4
    assert logger.values("val_x") == [(3, 7.0)]
    assert trainer.callback_metrics["val_x"] == 7.0


def test_metric_step_says_when_a_value_was_computed() -> None:
    notes: list[Any] = []

    class Looking(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            notes.append((trainer.metric_step("x"), trainer.metric_step("val_loss")))

    class Both(ValidatedNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0)
            return self.loss(batch)

    quiet(max_epochs=1, val_check_interval=2, callbacks=Looking()).fit(net(Both), loader(), loader(4))
    assert notes == [(1, None), (2, None), (3, 2), (4, 2)]


def test_a_key_of_some_batches_only_is_the_mean_over_those() -> None:
    def log(module: Any, batch: Any, index: int) -> None:
        if index in (1, 2):
            module.log("x", float(index), on_step=True, on_epoch=True)

    trainer, logger = fit_logging(log)
    assert logger.values("x_step") == [(1, 1.0), (2, 2.0)]
    assert trainer.callback_metrics["x_epoch"] == 1.5


def test_training_and_validation_may_log_one_name() -> None:
    trainer, logger = fit_logging(
        lambda m, b, i: m.log("x", 1.0, on_step=False, on_epoch=True),
        val=lambda m, b, i: m.log("x", 2.0),
        val_data=loader(4),
    )
    assert logger.values("x") == [(3, 2.0), (3, 1.0)]
    assert trainer.callback_metrics["x"] == 1.0


def test_a_child_module_logs_too() -> None:
    class Child(lw.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.log("inner", x.sum(), on_step=False, on_epoch=True)
            return x

    class Parent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.child(batch[0])
            return self.loss(batch)

    trainer = quiet(max_epochs=1)
    trainer.fit(net(Parent), loader())
    assert "inner" in trainer.callback_metrics


def test_the_graph_is_kept_on_request() -> None:
    seen: list[bool] = []

    class Keeping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("kept", loss, enable_graph=True)
            self.log("cut", loss)
            metrics = self.trainer.callback_metrics
            seen.append((metrics["kept"].requires_grad, metrics["cut"].requires_grad))
            return loss

    quiet(max_epochs=1).fit(net(Keeping), loader(2))
    assert seen == [(True, False)]


def test_other_arguments_are_accepted_in_one_process() -> None:
    trainer, _ = fit_logging(
        lambda m, b, i: m.log(
            "x", 1.0, sync_dist=True, sync_dist_group=None, rank_zero_only=True, metric_attribute="nothing"
        )
    )
    assert trainer.callback_metrics["x"] == 1.0


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_a_validation_value_is_the_weighted_mean_of_its_epoch() -> None:
    data = loader(7, 3, seed=4)
    trainer = quiet()
    (result,) = trainer.validate(module := net(ValidatedNet), data, verbose=False)
    with torch.no_grad():
        expected = nn.functional.mse_loss(module(data.dataset.tensors[0]), data.dataset.tensors[1])  # type: ignore[attr-defined]
    assert result["val_loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_step_values_of_a_validation_have_their_own_x_axis() -> None:
    _, logger = fit_logging(
        val=lambda m, b, i: m.log("v", float(i), on_step=True, on_epoch=True),
        val_data=loader(6),
        max_epochs=2,
        num_sanity_val_steps=0,
    )
    assert logger.values("v_step") == [(i, float(i % 3)) for i in range(6)]
    assert logger.values("v_epoch") == [(3, 1.0), (7, 1.0)]


def test_steps_never_go_backwards_for_any_key() -> None:
    def log(module: Any, batch: Any, index: int) -> None:
        module.log("x", 1.0, on_step=True, on_epoch=True)

    def validate(module: Any, batch: Any, index: int) -> None:
        module.log("v", 1.0, on_step=True, on_epoch=True)

    _, logger = fit_logging(log, val=validate, val_data=loader(4), max_epochs=3, val_check_interval=2)
    for key in ("x_step", "x_epoch", "v_step", "v_epoch"):
        steps = [step for step, _ in logger.values(key)]
        assert steps == sorted(steps)
        assert len(steps) == len(set(steps))


def test_several_loaders_get_a_suffix_each() -> None:
    module = net(Numbers, val=lambda m, b, i: m.log("v", float(len(b[0]))))
    results = quiet().validate(module, [loader(4, 2), loader(6, 3)], verbose=False)
    assert results == [{"v/dataloader_idx_0": 2.0}, {"v/dataloader_idx_1": 3.0}]


def test_without_the_suffix_all_loaders_count_into_one_value() -> None:
    module = net(Numbers, val=lambda m, b, i: m.log("v", float(len(b[0])), add_dataloader_idx=False))
    results = quiet().validate(module, [loader(4, 2), loader(3, 3)], verbose=False)
    assert [result["v"] for result in results] == [pytest.approx((2 * 4 + 3 * 3) / 7)] * 2


def test_a_constant_is_that_constant_over_uneven_batches() -> None:
    module = net(Numbers, val=lambda m, b, i: m.log("one", 1.0))
    assert quiet().validate(module, loader(7, 3), verbose=False) == [{"one": 1.0}]


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max"])
def test_a_long_validation_can_be_trained_on(reduce_fx: str) -> None:
    class Long(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", batch[0].sum().double() * 0 + 1, reduce_fx=reduce_fx)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * self.trainer.callback_metrics.get("v", 1.0)

    # 256 batches are a whole chunk, which is folded inside inference mode.
    quiet(max_epochs=2, num_sanity_val_steps=0).fit(net(Long), loader(2), loader(256, 1))


def test_a_value_of_inference_mode_can_be_logged_in_a_training_hook() -> None:
    class Scored(ValidatedNet):
        def on_train_epoch_end(self) -> None:
            with torch.inference_mode():
                value = torch.ones(4).mean()
            self.log("score", value)

    trainer = quiet(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(net(Scored), loader(2), loader(2))
    assert trainer.callback_metrics["score"] == 1.0


def test_a_sum_is_not_multiplied_by_the_batch_size() -> None:
    module = net(Numbers, val=lambda m, b, i: m.log("count", float(len(b[0])), reduce_fx="sum"))
    assert quiet().validate(module, loader(7, 3), verbose=False) == [{"count": 7.0}]


# --- the weight is never guessed -------------------------------------------------------------------------------------


@dataclass
class Sentence:
    words: Tensor
    table: Tensor


def test_a_batch_that_does_not_tell_its_size_weighs_the_same_while_batches_look_alike() -> None:
    batches = [{"table": torch.ones(7, 3), "x": torch.full((2, 1), float(i))} for i in range(3)]
    module = net(Numbers, val=lambda m, b, i: m.log("v", b["x"].mean()))
    assert quiet().validate(module, DataLoader(batches, batch_size=None), verbose=False) == [{"v": 1.0}]


def test_unknown_and_uneven_sizes_are_an_error_that_names_the_key() -> None:
    batches = [{"table": torch.ones(7, 3), "x": torch.ones(n, 1)} for n in (2, 2, 1)]
    module = net(Numbers, val=lambda m, b, i: m.log("v", b["x"].mean()))
    with pytest.raises(ModuleError, match=r"log\('v'\).*\n.*batch_size=n"):
        quiet().validate(module, DataLoader(batches, batch_size=None), verbose=False)


def test_the_batch_size_is_never_that_of_the_wrong_tensor() -> None:
    # The first tensor is no batch: a guess by its first dimension would weigh each batch 7.
    batches = [Sentence(words=torch.ones(n, 1), table=torch.ones(7, 3)) for n in (2, 2, 1)]
    log = lambda m, b, i: m.log("v", float(i), batch_size=len(b.words))  # noqa: E731
    module = net(Numbers, val=log)
    (result,) = quiet().validate(module, Unsized(batches), verbose=False)
    assert result["v"] == pytest.approx((0 * 2 + 1 * 2 + 2 * 1) / 5)


@pytest.mark.parametrize("how", [{"reduce_fx": "sum"}, {"reduce_fx": "max"}])
def test_other_reductions_need_no_size(how: Any) -> None:
    batches = [{"table": torch.ones(7, 3), "x": torch.ones(n, 1)} for n in (2, 2, 1)]
    module = net(Numbers, val=lambda m, b, i: m.log("v", 1.0, **how))
    quiet().validate(module, DataLoader(batches, batch_size=None), verbose=False)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.log("x", torch.ones(2)), ModuleError, r"shape \(2,\), expected one element"),
        (lambda m: m.log("x", {"a": 1}), ModuleError, "use self.log_dict"),
        (lambda m: m.log("x", "1"), ModuleError, "got str, expected a number"),
        (lambda m: m.log("x", None), ModuleError, "got NoneType"),
        (lambda m: m.log(3, 1.0), ModuleError, "got the name 3"),
        (lambda m: m.log("x/dataloader_idx_0", 1.0), ModuleError, "added by the trainer"),
        (lambda m: m.log("x", 1.0, reduce_fx="median"), ConfigError, "reduce_fx='median'"),
        (lambda m: m.log("x", 1.0, reduce_fx=len), ConfigError, "reduce_fx="),
        (lambda m: m.log_dict({"a": 1.0, "b": "x"}), ModuleError, r"log\('b'\) got str"),
        (lambda m: (m.log("x", 1.0), m.log("x", 1.0, prog_bar=True)), ModuleError, "prog_bar=False and True"),
    ],
)
def test_a_wrong_log_call_says_what_is_wrong(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit_logging(lambda m, b, i: call(m))


@pytest.mark.parametrize(
    "hook",
    [
        "on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "on_validation_model_eval",
        "configure_optimizers", "setup", "teardown", "on_save_checkpoint",
    ],
)  # fmt: skip
def test_where_nothing_can_be_logged_log_says_so(hook: str, tmp_path: Any) -> None:
    class Misplaced(ValidatedNet):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    def misplaced(self: Any, *args: Any) -> Any:
        self.log("x", 1.0)
        return None

    setattr(Misplaced, hook, misplaced)
    trainer = quiet(max_epochs=1)
    with pytest.raises(ModuleError, match=r"log\('x'\) was called"):
        trainer.fit(net(Misplaced), loader(), loader())


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"])
@pytest.mark.parametrize("how", [{"on_step": True}, {"on_epoch": False}])
def test_an_epoch_hook_has_no_steps(hook: str, how: dict[str, bool]) -> None:
    class Misplaced(Net):
        pass

    setattr(Misplaced, hook, lambda self: self.log("x", 1.0, **how))
    with pytest.raises(ModuleError, match=rf"{hook}"):
        quiet(max_epochs=1).fit(net(Misplaced), loader())


def test_a_module_outside_of_a_run_drops_what_it_logs_and_says_so_once(monkeypatch: Any) -> None:
    from loopwright.trainer import module as source

    monkeypatch.setattr(source, "_has_warned_detached", False)
    module = net(Net)
    with pytest.warns(UserWarning, match="not in a run"):
        module.log("x", 1.0)
    module.log_dict({"x": 1.0})


# --- torchmetrics ----------------------------------------------------------------------------------------------------


class Measured(Net):
    """Measures a mean absolute error with torchmetrics."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        torchmetrics = pytest.importorskip("torchmetrics")
        self.train_error = torchmetrics.MeanAbsoluteError()
        self.val_error = torchmetrics.MeanAbsoluteError()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.train_error(self(batch[0]), batch[1])
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_error.update(self(batch[0]), batch[1])
        self.log("val_error", self.val_error, **self.how)


def test_a_metric_object_computes_its_epoch_and_is_reset() -> None:
    module = net(Measured)
    data = loader(7, 3, seed=4)
    for _ in range(2):
        (result,) = quiet().validate(module, data, verbose=False)
        with torch.no_grad():
            x, y = data.dataset.tensors  # type: ignore[attr-defined]
            expected = (module(x) - y).abs().mean().item()
        assert result["val_error"] == pytest.approx(expected, rel=1e-6)
    assert module.val_error.update_count == 0


def test_a_metric_object_gives_the_value_of_each_step() -> None:
    logger = RecordingLogger()
    module = net(Measured)
    trainer = quiet(max_epochs=2, logger=logger, log_every_n_steps=1, num_sanity_val_steps=1)
    trainer.fit(module, loader(), loader(4))
    assert len(logger.values("train_error_step")) == 8
    assert len(logger.values("train_error_epoch")) == 2
    assert len(logger.values("val_error")) == 2
    assert logger.values("train_error_step")[0][1] != logger.values("train_error_step")[1][1]


def test_the_step_value_of_a_metric_object_is_of_the_entire_window() -> None:
    values = []
    for batch_size, accumulate in ((6, 1), (2, 3), (4, 2)):  # windows of 6 samples, of which one has parts of 4 and 2
        logger = RecordingLogger()
        module = net(Measured)
        trainer = quiet(max_epochs=1, logger=logger, log_every_n_steps=1, accumulate_grad_batches=accumulate)
        trainer.fit(module, loader(6, batch_size), loader(2))
        values += [value for _, value in logger.values("train_error_step")]
    assert values == pytest.approx(values[:1] * 3, rel=1e-6)


def test_a_metric_that_was_only_updated_has_no_step_value() -> None:
    with pytest.raises(ModuleError, match="only update"):
        quiet().validate(net(Measured, on_step=True), loader(), verbose=False)


def test_a_collection_of_metrics_is_logged_by_log_dict() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Collected(Net):
        def __init__(self) -> None:
            super().__init__()
            self.errors = torchmetrics.MetricCollection(
                [torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()]
            )

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.errors.update(self(batch[0]), batch[1])
            self.log_dict(self.errors)

    module = net(Collected)
    data = loader(7, 3)
    (result,) = quiet().validate(module, data, verbose=False)
    with torch.no_grad():
        x, y = data.dataset.tensors  # type: ignore[attr-defined]
        difference = module(x) - y
    assert result["MeanAbsoluteError"] == pytest.approx(difference.abs().mean().item(), rel=1e-6)
    assert result["MeanSquaredError"] == pytest.approx(difference.square().mean().item(), rel=1e-6)


def test_the_bar_has_every_key_at_the_end_of_a_short_epoch() -> None:
    class Shown(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            shown.append(dict(trainer.progress_bar_metrics))

    def log(module: Any, batch: Any, batch_idx: int) -> None:
        module.log("each", float(batch_idx), prog_bar=True)
        module.log("both", float(batch_idx), prog_bar=True, on_step=True, on_epoch=True)
        module.log("hidden", 1.0)

    shown: list[dict[str, float]] = []
    fit_logging(log, log_every_n_steps=50, callbacks=[Shown()])
    assert shown == [{"each": 3.0, "both_step": 3.0, "both_epoch": 1.5, "both": 1.5}]
