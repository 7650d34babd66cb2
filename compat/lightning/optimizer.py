"""The optimizer of modules that have none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from ...protocols import StateDict

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
