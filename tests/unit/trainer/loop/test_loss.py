"""The loss contract: a sum and a weight, independent of how a batch is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from toys import Net, assert_near, loader, net, quiet

import loopwright as lw
from loopwright.errors import ModuleError
from loopwright.trainer.loop.loss import WindowLoss, read_loss


class Weighted(lw.Module):
    """Linear regression in float64 whose loss is a sum over its samples, in the form asked for.

    A sample may have weight 0 (as a padded token has).
    """

    def __init__(self, form: str = "loss") -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.form = form

    def sums(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, weight = batch
        return ((self.net(x) - y).square().mean(1) * weight).sum(), weight.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        total, weight = self.sums(batch)
        if self.form == "host":
            return lw.Loss(total, float(weight))
        if self.form == "dict":
            return {"loss_sum": total, "weight": weight}
        if self.form == "nested":
            return {"loss": lw.Loss(total, weight), "extra": 1}
        return lw.Loss(total, weight)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def cut(samples: tuple[Tensor, ...], sizes: list[int]) -> list[tuple[Tensor, ...]]:
    parts = [tensor.split(sizes) for tensor in samples]
    return [tuple(part[index] for part in parts) for index in range(len(sizes))]


def samples(count: int, weights: list[int] | None = None, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    weight = torch.ones(count, dtype=torch.float64) if weights is None else torch.tensor(weights, dtype=torch.float64)
    return x, y, weight


def trained(batches: list[Any], accumulate: int, form: str = "loss") -> Weighted:
    torch.manual_seed(3)
    module = Weighted(form)
    quiet(max_epochs=1, accumulate_grad_batches=accumulate, precision="64-true").fit(module, batches)
    return module


def by_hand(windows: list[tuple[Tensor, ...]]) -> Weighted:
    torch.manual_seed(3)
    module = Weighted().double()
    optimizer = module.configure_optimizers()
    for window in windows:
        total, weight = module.sums(window)
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
    return module


@st.composite
def cuts(draw: Any) -> tuple[list[int], list[list[int]], list[int]]:
    """Draw, for up to three windows, how each is cut, and which samples weigh nothing."""
    accumulate = draw(st.integers(2, 4))
    num_windows = draw(st.integers(1, 3))
    windows = [draw(st.lists(st.integers(1, 4), min_size=accumulate, max_size=accumulate)) for _ in range(num_windows)]
    short = draw(st.integers(1, accumulate))
    windows[-1] = windows[-1][:short]
    weights = [draw(st.lists(st.integers(0, 3), min_size=sum(w), max_size=sum(w))) for w in windows]
    for weight in weights:
        weight[0] = max(weight[0], 1)  # a window that weighs nothing has no gradient: see below
    return [accumulate], windows, [w for window in weights for w in window]


@settings(max_examples=25, deadline=None)
@given(cuts(), st.sampled_from(["loss", "host", "dict", "nested"]))
def test_weights_do_not_depend_on_how_a_batch_is_split(drawn: Any, form: str) -> None:
    (accumulate,), windows, weights = drawn
    data = samples(len(weights), weights)
    batches = cut(data, [size for window in windows for size in window])
    whole = cut(data, [sum(window) for window in windows])

    assert_near(trained(batches, accumulate, form), by_hand(whole), rtol=1e-12)


@pytest.mark.parametrize("form", ["loss", "host", "dict"])
def test_four_times_one_equals_one_times_four_when_weights_are_tokens(form: str) -> None:
    data = samples(4, [7, 1, 3, 2])
    assert_near(trained(cut(data, [1] * 4), 4, form), trained(cut(data, [4]), 1, form), rtol=1e-12)


@pytest.mark.parametrize("form", ["loss", "host"])
def test_a_micro_batch_of_no_weight_contributes_nothing_and_is_no_nan(form: str) -> None:
    data = samples(3, [0, 2, 0])
    module = trained(cut(data, [1, 1, 1]), 3, form)
    assert_near(module, by_hand([samples_at(data, [1])]), rtol=1e-12)


def samples_at(data: tuple[Tensor, ...], rows: list[int]) -> tuple[Tensor, ...]:
    return tuple(tensor[rows] for tensor in data)


@pytest.mark.parametrize("form", ["loss", "host"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_window_that_weighs_nothing_is_a_step_with_a_gradient_of_zero(form: str, accumulate: int) -> None:
    gradients: list[Tensor] = []

    class Watched(Weighted):
        def sums(self, batch: Any) -> Any:
            total, weight = super().sums(batch)
            return total + self.net.weight.sum(), weight  # a sum over nothing, and yet not 0

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients.append(self.net.weight.grad.clone())

    torch.manual_seed(3)
    trainer = quiet(max_epochs=1, precision="64-true", accumulate_grad_batches=accumulate)
    trainer.fit(Watched(form), cut(samples(4, [0, 0, 1, 2]), [1] * 4))
    assert (trainer.global_step, trainer.progress.skipped_steps) == (4 // accumulate, 0)
    is_zero = [bool((gradient == 0).all()) for gradient in gradients]
    assert is_zero == [True] * (2 // accumulate) + [False] * (2 // accumulate)


def test_the_reported_loss_does_not_depend_on_the_split() -> None:
    class Reporting(Weighted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = lw.Loss(*self.sums(batch))
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    def reported(sizes: list[int], accumulate: int) -> tuple[float, float]:
        torch.manual_seed(3)
        trainer = quiet(max_epochs=1, accumulate_grad_batches=accumulate, precision="64-true")
        trainer.fit(Reporting(), cut(samples(12, [1, 2, 0, 4, 1, 1, 3, 0, 2, 5, 1, 1]), sizes))
        return float(trainer.callback_metrics["loss_step"]), float(trainer.callback_metrics["loss_epoch"])

    whole = reported([6, 6], 1)
    assert reported([1, 2, 3, 2, 2, 2], 3) == pytest.approx(whole, rel=1e-12)
    assert reported([3, 3, 3, 3], 2) == pytest.approx(whole, rel=1e-12)


def test_outputs_give_the_mean_of_a_sum() -> None:
    seen: list[Any] = []

    class Watched(Weighted):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    torch.manual_seed(3)
    module = Watched("nested")
    data = samples(2, [1, 3])
    quiet(max_epochs=1, precision="64-true", max_steps=1).fit(module, [data])
    expected = Weighted().double()
    torch.manual_seed(3)
    expected = Weighted().double()
    total, weight = expected.sums(data)
    assert seen[0]["loss"].item() == pytest.approx((total / weight).item())
    assert seen[0]["extra"] == 1


def test_means_count_as_one_micro_batch_each() -> None:
    # Three batches of unequal size: a mean says nothing about its size, so each weighs the same.
    data = cut(tuple(loader(6).dataset.tensors), [1, 2, 3])  # type: ignore[attr-defined]
    module, expected = net(Net), net(Net)
    quiet(max_epochs=1, accumulate_grad_batches=3).fit(module, data)
    optimizer = expected.configure_optimizers()
    for batch in data:
        (expected.loss(batch) / 3).backward()
    optimizer.step()
    assert_near(module, expected, rtol=0)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_mean_and_a_sum_in_one_window_are_refused() -> None:
    class Mixed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return loss if batch_idx % 2 else lw.Loss(loss * 2, 2)

    with pytest.raises(ModuleError, match="a mean for one micro-batch and a sum"):
        quiet(max_epochs=1, accumulate_grad_batches=2).fit(net(Mixed), loader())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "training_step returned float"),
        ("loss", "training_step returned str"),
        ({"los": 1}, r"a dict with the keys \['los'\]"),
        ({"loss": 1.0}, "'loss' is float"),
        ([1], "training_step returned list"),
    ],
)
def test_a_wrong_return_value_says_what_came_and_what_is_expected(returned: Any, message: str) -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return returned

    with pytest.raises(ModuleError, match=message):
        quiet(max_epochs=1).fit(net(Wrong), loader())


def test_a_loss_that_is_no_scalar_says_its_shape() -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

    with pytest.raises(ModuleError, match=r"a loss of shape \(2, 1\), expected a scalar"):
        quiet(max_epochs=1).fit(net(Wrong), loader())


def test_a_sum_that_is_no_scalar_says_its_shape() -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return lw.Loss(self(batch[0]), 2)

    with pytest.raises(ModuleError, match=r"shape \(2, 1\)"):
        quiet(max_epochs=1).fit(net(Wrong), loader())


@pytest.mark.parametrize("weight", [None, "4", [4]])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return lw.Loss(self.loss(batch), weight)

    with pytest.raises(ModuleError, match="weight"):
        quiet(max_epochs=1).fit(net(Wrong), loader())


def test_a_negative_weight_is_refused() -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return lw.Loss(self.loss(batch), -1)

    with pytest.raises(ModuleError, match="weight of a loss is -1"):
        quiet(max_epochs=1).fit(net(Wrong), loader())


# --- the objects by themselves ---------------------------------------------------------------------------------------


def test_a_loss_of_no_weight_has_the_mean_zero() -> None:
    total = torch.tensor(3.0)
    assert lw.Loss(total, 0).mean() == 0
    assert lw.Loss(total, torch.tensor(0)).mean() == 0
    assert lw.Loss(total, 2).mean() == 1.5
    assert lw.Loss(total, torch.tensor(2)).mean() == 1.5


def test_none_and_tensors_are_read_as_they_are() -> None:
    loss = torch.tensor(1.0)
    assert read_loss(None) is None
    assert read_loss(loss) is loss
    assert read_loss({"loss": loss, "other": 2}) is loss


def test_a_window_of_one_mean_is_the_very_loss() -> None:
    window = WindowLoss(torch.device("cpu"))
    loss = torch.tensor(2.0)
    assert window.share(loss) is loss
    assert window.gradient_factor() is None
