"""`RunsWindows.run_window`: a strategy takes over the inside of accumulation windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import LBFGS
from toys import MakeOptimizer, Net, adam, assert_same, loader, momentum, net, quiet

import loopwright as lw
from loopwright.strategies import SingleDeviceStrategy


class AllForwardThenBackward(SingleDeviceStrategy):
    """Runs all forward passes of a window, then all backward passes, as the simplest schedule of a pipeline does."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def run_window(
        self, batches: Sequence[Any], step: Callable[[Any, int], Any], share: Callable[[Any], Tensor]
    ) -> Sequence[Any]:
        self.sizes.append(len(batches))
        losses = [step(batch, number) for number, batch in enumerate(batches)]
        for tensor in [share(loss) for loss in losses if loss is not None]:
            self.backward(tensor)
        return losses


class Summed(Net):
    """Returns sums with weights, and no loss for each fifth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 5 == 4:
            return None
        return lw.Loss(loss * len(batch[0]), len(batch[0]))


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("kind", [Net, Summed])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_window_that_the_strategy_runs_gives_the_same_weights_bit_for_bit(
    kind: type[Net], make_optimizer: MakeOptimizer, accumulate: int
) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    expected = net(kind, make_optimizer)
    reference = quiet(**options)
    reference.fit(expected, loader(10, 2, shuffle=True))

    module, strategy = net(kind, make_optimizer), AllForwardThenBackward()
    trainer = quiet(strategy=strategy, **options)
    trainer.fit(module, loader(10, 2, shuffle=True))

    assert_same(module, expected)
    assert trainer.global_step == reference.global_step
    assert strategy.sizes == ([1] * 10 if accumulate == 1 else [3, 2] * 2)


def test_an_optimizer_with_a_closure_evaluates_the_window_through_the_strategy() -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return LBFGS(parameters, max_iter=3)

    expected, module = (net(Net, lbfgs) for _ in range(2))
    quiet(max_epochs=2, accumulate_grad_batches=2).fit(expected, loader(8, 2))

    strategy = AllForwardThenBackward()
    quiet(max_epochs=2, accumulate_grad_batches=2, strategy=strategy).fit(module, loader(8, 2))

    assert_same(module, expected)
    assert len(strategy.sizes) > 4


class Listing(lw.Callback):
    """Writes down the hooks of a window in their order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append("batch start")

    def on_before_backward(self, *_: Any) -> None:
        self.seen.append("before backward")

    def on_after_backward(self, *_: Any) -> None:
        self.seen.append("after backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.seen.append("before step")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        assert outputs["loss"].ndim == 0
        self.seen.append("batch end")


def test_hooks_around_a_window_that_the_strategy_runs_get_every_micro_batch() -> None:
    hooks = Listing()
    trainer = quiet(
        max_epochs=1, accumulate_grad_batches=2, strategy=AllForwardThenBackward(), callbacks=[hooks],
        limit_train_batches=2,
    )  # fmt: skip
    trainer.fit(net(Net, momentum), loader(8, 2))

    assert hooks.seen == [
        *["batch start"] * 2, *["before backward"] * 2, *["after backward"] * 2, "before step", *["batch end"] * 2,
    ]  # fmt: skip


def test_a_bad_step_is_skipped_in_a_window_that_the_strategy_runs() -> None:
    class Bad(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 1 else 1.0)

    trainer = quiet(
        max_epochs=1, accumulate_grad_batches=2, strategy=AllForwardThenBackward(), nonfinite_loss="skip"
    )  # fmt: skip
    with pytest.warns(UserWarning, match="is skipped: its loss is not finite"):
        trainer.fit(net(Bad, momentum), loader(8, 2))

    assert trainer.global_step == 1
    assert trainer.progress.nonfinite_steps == 1
