"""Precisions in a fit: equal to a hand-written loop, and what a skipped step leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from toys import Net, Recorder, RecordingLogger, ValidatedNet, assert_near, assert_same, loader, momentum, net, quiet

import loopwright as lw
from loopwright.callbacks import EMA
from loopwright.errors import ConfigError
from loopwright.precision import MixedPrecision


def by_hand_mixed(
    dtype: torch.dtype, *, accumulate: int = 1, clip: float | None = None, epochs: int = 2, count: int = 8
) -> Net:
    module = net(Net, momentum)
    optimizer = momentum(module.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    batches = list(loader(count))
    for _ in range(epochs):
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            optimizer.zero_grad()
            for batch in window:
                with torch.autocast("cpu", dtype=dtype):
                    loss = module.loss(batch)
                scaler.scale(loss if len(window) == 1 else loss / len(window)).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
    return module


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, 0.05), (3, None), (3, 0.05)])
def test_mixed_precision_equals_the_hand_written_loop(
    precision: str, dtype: torch.dtype, accumulate: int, clip: float | None
) -> None:
    module = net(Net, momentum)
    quiet(max_epochs=2, precision=precision, accumulate_grad_batches=accumulate, gradient_clip_val=clip).fit(
        module, loader(8)
    )
    assert_same(module, by_hand_mixed(dtype, accumulate=accumulate, clip=clip))
    assert next(module.parameters()).dtype is torch.float32


@pytest.mark.parametrize(
    ("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16), ("16-true", torch.float16)]
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_true_precision_equals_the_hand_written_loop(precision: str, dtype: torch.dtype, accumulate: int) -> None:
    expected = net(Net, momentum).to(dtype)
    optimizer = momentum(expected.parameters())
    batches = [[tensor.to(dtype) for tensor in batch] for batch in loader(8)]
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        optimizer.zero_grad()
        for batch in window:
            loss = expected.loss(batch)
            (loss if len(window) == 1 else loss / len(window)).backward()
        optimizer.step()

    module = net(Net, momentum)
    quiet(max_epochs=1, precision=precision, accumulate_grad_batches=accumulate).fit(module, loader(8))
    assert next(module.parameters()).dtype is dtype
    assert_same(module, expected)


def small_scale(**kwargs: Any) -> Any:
    """Return a trainer in 16-mixed whose loss scale is small enough that nothing overflows by itself."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    return quiet(max_epochs=1, plugins=plugin, nonfinite_loss="ignore", limit_val_batches=0, **kwargs)


class Overflowing(ValidatedNet):
    """Has infinite gradients at the batches given."""

    def __init__(self, batches: tuple[int, ...]) -> None:
        super().__init__(momentum)
        self.batches = batches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx in self.batches else loss

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.9), "interval": "step"}]


def test_a_skipped_step_leaves_schedule_average_and_counts_alone() -> None:
    ema = EMA(decay=0.5)
    recorder = Recorder(
        lambda trainer: (trainer.global_step, trainer.lr_scheduler_configs[0].scheduler.last_epoch, ema.num_updates)
    )
    trainer = small_scale(callbacks=[ema, recorder])
    trainer.fit(net(Overflowing, (1, 2)), loader(10))
    assert recorder.notes == [(1, 1, 1), (1, 1, 1), (1, 1, 1), (2, 2, 2), (3, 3, 3)]
    assert trainer.progress.skipped_steps == 2


def test_an_overflow_in_one_micro_batch_skips_the_step_and_halves_the_scale_once() -> None:
    trainer = small_scale(accumulate_grad_batches=4)
    module = net(Overflowing, (1,))
    expected = net(Overflowing, (1,))
    (optimizer,), _ = expected.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)  # what the first window leaves
    for batch in list(loader(16))[4:]:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = expected.loss(batch)
        scaler.scale(loss / 4).backward()
    scaler.step(optimizer)

    trainer.fit(module, loader(16))

    assert trainer.global_step == 1
    assert trainer.precision_plugin.scale == 32.0
    assert_same(module, expected)


def test_a_step_that_the_scale_refused_is_logged_where_it_would_have_been() -> None:
    class Logging(Overflowing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("batch", float(batch_idx))
            return super().training_step(batch, batch_idx)

    logger = RecordingLogger()
    trainer = small_scale(logger=logger, log_every_n_steps=1)
    trainer.fit(net(Logging, (1,)), loader())
    assert logger.values("batch") == [(0, 0.0), (1, 1.0), (1, 2.0), (2, 3.0)]


def test_an_overflow_in_manual_optimization_is_no_step() -> None:
    class Manual(Overflowing):
        def __init__(self, batches: tuple[int, ...]) -> None:
            super().__init__(batches)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    trainer = small_scale()
    trainer.fit(net(Manual, (1,)), loader())
    assert trainer.global_step == 3


def test_gradients_that_hooks_see_are_unscaled() -> None:
    seen: list[torch.Tensor] = []

    class Watched(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(self.net[0].weight.grad.clone())

    module = net(Watched)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = module.loss(next(iter(loader())))
    loss.backward()
    expected = module.net[0].weight.grad.clone()
    quiet(max_steps=1, precision="16-mixed").fit(module, loader())
    torch.testing.assert_close(seen[0], expected, rtol=1e-2, atol=1e-4)  # float16 rounds the scaled gradient


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_evaluation_runs_in_the_same_precision(precision: str) -> None:
    class Looking(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert torch.is_autocast_enabled("cpu")
            assert self.net(batch[0]).dtype is not torch.float32

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    trainer, module = quiet(precision=precision), net(Looking)
    trainer.validate(module, loader(), verbose=False)
    trainer.test(module, loader(), verbose=False)
    (prediction, *_) = trainer.predict(module, loader())  # type: ignore[misc]
    assert prediction.dtype is not torch.float32


def test_clipping_with_a_fused_optimizer_under_autocast_really_clips() -> None:
    def fused(parameters: Any) -> Any:
        return Adam(parameters, lr=0.1, fused=True)

    expected = net(Net, fused)
    optimizer = fused(expected.parameters())
    for batch in loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = expected.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 1e-3)
        optimizer.step()
    module = net(Net, fused)
    quiet(max_epochs=1, precision="bf16-mixed", gradient_clip_val=1e-3).fit(module, loader())
    assert_same(module, expected)


def test_clipping_with_a_fused_optimizer_and_a_loss_scale_really_clips() -> None:
    def fused(parameters: Any) -> Any:
        return Adam(parameters, lr=0.1, fused=True)

    expected = net(Net, fused)
    optimizer = fused(expected.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for batch in loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = expected.loss(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(expected.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
    module = net(Net, fused)
    small_scale(gradient_clip_val=1e-3).fit(module, loader())
    assert_same(module, expected)


@pytest.mark.parametrize("weight", [2, torch.tensor(2.0)])
def test_a_sum_with_a_weight_is_scaled_like_a_mean(weight: Any) -> None:
    class Sums(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return lw.Loss(self.loss(batch) * 2, weight)

    expected, module = net(Net, momentum), net(Sums, momentum)
    small_scale(accumulate_grad_batches=3).fit(expected, loader(10))
    small_scale(accumulate_grad_batches=3).fit(module, loader(10))
    assert_near(module, expected, rtol=1e-3)  # float16 rounds a sum where it does not round a mean


def test_lbfgs_with_a_loss_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS"):
        quiet(max_epochs=1, precision="16-mixed").fit(net(Net, lambda p: torch.optim.LBFGS(p)), loader())


def test_an_infinite_norm_does_not_hide_in_the_clipping() -> None:
    class Infinite(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step == 1:
                self.net[0].weight.grad[0, 0] = float("inf")

    module = net(Infinite)
    trainer = quiet(max_epochs=1, gradient_clip_val=1.0, nonfinite_loss="raise")
    with pytest.raises(ArithmeticError, match="nan"):
        trainer.fit(module, loader(8))


def test_a_double_module_gets_double_batches() -> None:
    class Looking(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch[0].dtype is torch.float64
            assert torch.zeros(1).dtype is torch.float64
            return self.loss(batch)

    quiet(max_epochs=1, precision="64-true").fit(net(Looking), loader())
    assert torch.zeros(1).dtype is torch.float32
