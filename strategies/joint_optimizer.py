"""`JointOptimizer`: several optimizers of one loss, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..errors import ModuleError
from ..precision.base import take_step
from ..protocols import Closure, ParamGroup, StateDict

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle


class JointOptimizer(Optimizer):
    """Several optimizers that step after one backward pass, as one: with the parameters and the states of all.

    Strategies, precision and clipping get it in place of one optimizer, so that the norm, the loss scale and a skipped
    step are those of all parameters. It owns nothing: groups and states are those of its parts, which are saved.

    Args:
        parts: The optimizers, in the order of their steps. No parameter is in two of them.
    """

    evaluates_closure = False

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        self.defaults = {}
        self.__setstate__({})  # the hooks of torch's class; its constructor would demand parameters

    @property
    def param_groups(self) -> list[ParamGroup]:  # type: ignore[override]  # torch's is an attribute
        """The groups of all parts: their own dicts, in a new list."""
        return [group for one in self.parts for group in one.param_groups]

    @property
    def state(self) -> dict[Tensor, StateDict]:  # type: ignore[override]  # torch's is an attribute
        """The states of all parts: their own dicts, in a new one."""
        return {parameter: state for one in self.parts for parameter, state in one.state.items()}

    def step(self, closure: Closure | None = None) -> None:  # type: ignore[override]  # overloads
        """Step all of them; gradients are there, so that a closure would not be called."""
        for one in self.parts:
            take_step(one)

    step.hooked = True  # type: ignore[attr-defined]  # torch calls hooks around the steps of the parts, and not here

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all."""
        for one in self.parts:
            one.zero_grad(set_to_none)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:  # Any: as torch declares it
        """Call a function after the steps of all."""
        return self.parts[-1].register_step_post_hook(hook)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Refuse: one of the parts has to own the parameters."""
        raise self._not_own("add_param_group")

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Refuse: the parts have separate states."""
        raise self._not_own("load_state_dict")

    def _not_own(self, method: str) -> ModuleError:
        names = ", ".join(type(one).__name__ for one in self.parts)
        return ModuleError(
            f"{method} was called on {names} together.", fix="call it on one of those that self.optimizers() returns."
        )
