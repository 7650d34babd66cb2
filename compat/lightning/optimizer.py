"""The optimizer of modules that have none, and the functions that a `LightningOptimizer` calls around its step.

Lightning counts steps in them: a step with others in their place is not one of `global_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # Any: what a step takes and returns

import torch
from torch.optim import Optimizer

from ...protocols import StateDict
from ...trainer.loop.optimizers import ManagedOptimizer
from .patch import extend, patch

__all__ = ["do_nothing_closure"]


def do_nothing_closure() -> None:
    """Compute nothing."""


class _MockOptimizer(Optimizer):
    """An optimizer of nothing; its step calls the closure."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Leave it."""
        self.param_groups: list[dict[str, object]] = []

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Leave it."""

    def state_dict(self) -> StateDict:
        """Return an empty state."""
        return {}

    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]
        """Call the closure."""
        if closure is not None:
            closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return "No Optimizer"


def _count() -> None:
    """Stand where Lightning counts."""


def _around_step(name: str) -> property:
    """Return an attribute for a function that is called before or after each step."""

    def read(managed: ManagedOptimizer) -> Callable[[], object]:
        found: Callable[[], object] = managed.__dict__.get(name, _count)
        return found

    def assign(managed: ManagedOptimizer, function: Callable[[], object]) -> None:
        own = managed.__dict__
        own[name] = function
        if "step" not in own:  # from now on this optimizer calls them; others pay nothing
            patch(managed, "step", lambda closure=None, **kwargs: _step(managed, closure, **kwargs))

    return property(read, assign)


def _step(managed: Any, closure: Callable[[], object] | None, **kwargs: object) -> Any:
    before = managed.num_steps
    managed._on_before_step()
    result = ManagedOptimizer.step(managed, closure, **kwargs)
    managed._on_after_step()
    if managed._on_after_step is not _count:
        own = managed.__dict__
        own["_uncounted"] = own.get("_uncounted", 0) + managed.num_steps - before
    return result


def _shown(managed: ManagedOptimizer) -> str:
    return f"Lightning{managed.optimizer!r}"


patch(ManagedOptimizer, "__repr__", _shown)  # programs print it

for _name in ("_on_before_step", "_on_after_step"):
    extend(ManagedOptimizer, _name, _around_step(_name))
extend(ManagedOptimizer, "_optimizer", property(lambda managed: managed.optimizer))
