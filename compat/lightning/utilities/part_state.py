"""`PartState`: what this layer stores about a strategy or a precision, in one attribute of that object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ....precision import Precision
from ....strategies import Strategy

if TYPE_CHECKING:
    from ....protocols import StepFunction
    from ....trainer.trainer import Trainer

__all__ = ["PartState", "state_of"]

_ATTRIBUTE = "_lw_part_state"


@dataclass(slots=True)
class PartState:
    """What this layer stores about a strategy or a precision.

    Attributes:
        has_stepped: Whether the core's `optimizer_step` made a step, while one of the program runs; None before that.
        trainer: The trainer of a strategy; None in Fabric.
        optimizers: Those that the program assigned to a strategy that has no trainer.
        bound_steps: Steps of the module as the core binds them, where the program's strategy has a step of this name.
        precision: A precision of the program that a strategy's backward pass goes through.
        stepping_precision: A precision of the program by which a strategy steps.
        run_backward: The strategy's backward pass, while that of a program's precision runs.
        run_clipping: The strategy's clipping to a limit, while that of a program's precision runs.
        norm: What that clipping returned.
    """

    has_stepped: bool | None = None
    trainer: Trainer | None = None
    optimizers: list[Optimizer] | None = None
    bound_steps: dict[str, StepFunction] = field(default_factory=dict)
    precision: Any = None  # Any: methods of the program
    stepping_precision: Any = None  # Any: the same
    run_backward: Callable[..., None] | None = None
    run_clipping: Callable[[Optimizer, float], Tensor] | None = None
    norm: Tensor | None = None


def state_of(part: Strategy | Precision) -> PartState:
    """Return the state of a strategy or precision, which is made when it is first needed.

    Args:
        part: One of the core, of this layer, or of the program.
    """
    own = vars(part)  # not an attribute: those of strategies are looked for in their trainer
    found: PartState | None = own.get(_ATTRIBUTE)
    if found is None:
        found = own[_ATTRIBUTE] = PartState()
    return found
