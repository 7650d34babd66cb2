"""How the `step` of an optimizer uses its closure, by its source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD

from loopwright.precision.base import evaluates_again
from loopwright.precision.closures import reads_gradients_first

_ZERO = torch.zeros(1, requires_grad=True)


class AsExpression(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Call the closure, if there is one."""
        if not self.param_groups[0].get("is_training", True):
            raise RuntimeError
        loss = closure() if closure is not None else None
        super().step()
        return loss


class HandsOn(SGD):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


class UsesTheLoss(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            loss = closure()
        self.param_groups[0]["lr"] = float(loss)
        return super().step()


class MovesFirst(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.mul_(0.5)
        if closure is not None:
            closure()
        return super().step()


class ClimbsFirst(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.climb()
        closure()
        return super().step()

    def climb(self) -> None:
        """Move along the gradients."""


class HandsOnToOneThatClimbs(ClimbsFirst):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class ClimbsUnderAnotherName(ClimbsFirst):
    def step(this, closure: Any = None) -> Any:
        this.climb()
        closure()
        return SGD.step(this)


class HandsOnUnderAnotherName(SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inner = ClimbsFirst(*args, **kwargs)

    def step(opt, closure: Any = None) -> Any:  # type: ignore[override]
        return opt.inner.step(closure)


class HandsOnToAPlainOne(HandsOnUnderAnotherName):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inner = SGD(*args, **kwargs)  # type: ignore[assignment]


source = """
class FromText(SGD):
    def step(self, closure=None):
        return super().step()
"""
names: dict[str, Any] = {"SGD": SGD}
exec(source, names)  # a class without source


@pytest.mark.parametrize(
    ("kind", "evaluates", "reads"),
    [
        (SGD, False, False),
        (AsExpression, False, False),
        (HandsOn, False, False),
        (UsesTheLoss, True, False),
        (MovesFirst, True, False),
        (ClimbsFirst, True, True),
        (HandsOnToOneThatClimbs, True, True),
        (ClimbsUnderAnotherName, True, True),
        (HandsOnUnderAnotherName, True, True),
        (HandsOnToAPlainOne, False, False),
        (names["FromText"], True, True),  # right in any case
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_use_of_a_closure_is_read_from_the_step(kind: Any, evaluates: bool, reads: bool) -> None:
    optimizer = kind([_ZERO], lr=0.1)
    assert evaluates_again(optimizer) is evaluates
    assert reads_gradients_first(optimizer) is reads
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces step on the instance
    assert evaluates_again(optimizer) is evaluates
