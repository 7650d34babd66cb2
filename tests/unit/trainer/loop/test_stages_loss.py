"""The loss of a window over pipeline stages: the stages without losses scale as one process does."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright as lw
from loopwright.errors import ModuleError
from loopwright.strategies import SingleDeviceStrategy
from loopwright.trainer.loop.loss import WindowLoss
from loopwright.trainer.loop.stages_loss import StagesWindowLoss

# Any in this file: losses of either form.


class Stage(SingleDeviceStrategy):
    """One of two stages: what the last one broadcasts lies in `wire`. `others` are losses of another data rank."""

    def __init__(self, wire: list[Tensor], *, is_last: bool, others: Tensor | None = None) -> None:
        super().__init__()
        self.wire = wire
        self.has_last_stage = is_last
        self.others = others

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        if self.has_last_stage:
            self.wire.append(tensor.clone())
            return tensor
        assert tensor.shape == self.wire[-1].shape
        return self.wire.pop()

    def of_stages(self, module: nn.Module, facts: dict[str, Any]) -> dict[str, Any]:
        return facts

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Tensor:
        rows = [tensor, tensor if self.others is None else self.others]
        return torch.stack(rows)

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor


def pair() -> tuple[StagesWindowLoss, StagesWindowLoss]:
    wire: list[Tensor] = []
    last, first = Stage(wire, is_last=True), Stage(wire, is_last=False)
    return tuple(StagesWindowLoss(torch.device("cpu"), one, counts=True) for one in (last, first))


def window(last: StagesWindowLoss, first: StagesWindowLoss, losses: list[Any], planned: int) -> Tensor:
    """Run a window; return the gradient that the last stage would have before it is scaled, which is of weight 1."""
    for one in (last, first):
        one.begin(planned)
    total = torch.zeros((), dtype=torch.float64)
    for loss in losses:
        if last.form is None:
            last.synchronize_form(loss)
        total += last.share(loss).detach()
    last.reduce()
    last.join_stages()
    first.join_stages()
    return total


def number(factor: Any) -> float:
    return 1.0 if factor is None else float(factor)


def value(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64, requires_grad=True)


SUMS = [lw.Loss(value(6.0), 3), lw.Loss(value(5.0), torch.tensor(2)), lw.Loss(value(0.0), 0)]


@pytest.mark.parametrize(
    ("losses", "planned"),
    [([value(1.0), value(3.0)], 2), ([value(1.0), value(3.0)], 3), (SUMS, 3), (SUMS[:2], 3), (SUMS[:1], 1)],
    ids=["means", "short window", "sums", "short window of sums", "one sum"],
)
def test_stages_scale_by_the_factor_of_one_process(losses: list[Any], planned: int) -> None:
    alone = WindowLoss(torch.device("cpu"))
    alone.begin(planned)
    expected = sum(alone.share(loss).detach() for loss in losses) * number(alone.gradient_factor())

    last, first = pair()
    total = window(last, first, losses, planned)

    assert first.form == last.form == ("sum" if isinstance(losses[0], lw.Loss) else "mean")
    assert number(first.gradient_factor()) == number(last.gradient_factor())
    assert total * number(first.gradient_factor()) == pytest.approx(float(expected), rel=1e-15)
    assert not first.is_empty
    assert not last.is_empty


def test_the_parts_of_a_batch_count_as_one_batch() -> None:
    half, quarter = Fraction(1, 2), Fraction(1, 4)
    losses = [(value(1.0), half), (value(2.0), quarter), (value(5.0), quarter), (value(7.0), Fraction(1))]
    last, first = pair()
    for one in (last, first):
        one.begin(2)
    last.synchronize_form(losses[0][0])
    total = sum(last.share(loss, part).detach() for loss, part in losses)
    last.reduce()
    last.join_stages()
    first.join_stages()
    assert total * number(first.gradient_factor()) == ((1 / 2 + 2 / 4 + 5 / 4) + 7) / 2


def test_a_window_without_losses_is_empty_on_all_stages() -> None:
    last, first = pair()
    window(last, first, [value(1.0)], 1)
    window(last, first, [], 1)
    assert first.is_empty
    assert last.is_empty


def test_a_loss_that_is_not_finite_is_skipped_on_all_stages() -> None:
    last, first = pair()
    for one in (last, first):
        one.begin(1)
    last.synchronize_form(value(1.0))
    last.share(value(float("nan")))
    last.is_finite = False
    last.reduce()
    last.join_stages()
    first.join_stages()
    assert first.is_to_be_skipped()
    assert last.is_to_be_skipped()


def test_data_ranks_with_different_forms_are_refused() -> None:
    other = torch.tensor([2.0, 8.0], dtype=torch.float64)  # a sum of weight 8
    stage = StagesWindowLoss(torch.device("cpu"), Stage([], is_last=True, others=other), counts=True)
    stage.begin(1)
    with pytest.raises(ModuleError, match=r"a mean on ranks \[0\] and a sum with a weight on ranks \[1\]"):
        stage.synchronize_form(value(1.0))


def test_means_of_equally_many_batches_are_not_sent_once_their_form_is_known() -> None:
    wire: list[Tensor] = []
    stages = [Stage(wire, is_last=is_last) for is_last in (True, False)]
    last, first = (StagesWindowLoss(torch.device("cpu"), one, counts=False) for one in stages)
    window(last, first, [value(1.0), value(2.0)], 2)
    assert first.form == last.form == "mean"
    for one in stages:
        one.from_last_stage = refuse  # type: ignore[method-assign]
        one.start_sum = refuse  # type: ignore[method-assign]
    total = window(last, first, [value(1.0), value(4.0)], 2)
    assert (float(total), first.gradient_factor(), last.gradient_factor()) == (2.5, None, None)
    assert not first.is_empty
    assert not last.is_empty


def refuse(tensor: Tensor) -> Any:
    raise AssertionError("it communicates")
