"""What `module.parameters()` yields in a step of a stage: those of other stages, too, which have no values.

A penalty such as the sum of all squares would otherwise count the parameters of one rank, and be a wrong loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from .block_calls import Position
from .remote_tensors import RemoteTensor

_REMEDY = (
    "a step has the values of this rank's stages only: let the optimizer do what concerns all parameters "
    "(weight_decay= in place of a penalty), look at gradients in on_before_optimizer_step, or train without pp."
)


@dataclass(eq=False)
class ParametersCall:
    """The place of a module's `named_parameters`, through which `parameters` goes, too.

    Attributes:
        module: The module.
        at: Where the present step is.
    """

    module: nn.Module
    at: Position

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parameters; in a step, those of other stages follow them."""
        yield from nn.Module.named_parameters(self.module, prefix, recurse, remove_duplicate)
        if self.at.stage is None and self.at.unsplit is None:
            return
        # Own ones come first: code that asks for the device or dtype takes the first one.
        members = self.module.named_modules(prefix=prefix) if recurse else [(prefix, self.module)]
        for path, one in members:
            for key, value in one.__dict__.items():
                if isinstance(value, RemoteTensor) and value.is_parameter:
                    yield f"{path}.{key}" if path else key, value.with_remedy(_REMEDY)


def list_all_parameters(module: nn.Module, at: Position) -> None:
    """Let a module, and those in it, list the parameters of other stages in a step, where they have any."""
    for one in module.modules():
        if any(_has_others(inner) for inner in one.modules()):
            one.__dict__["named_parameters"] = ParametersCall(one, at)


def _has_others(module: nn.Module) -> bool:
    return any(isinstance(value, RemoteTensor) and value.is_parameter for value in module.__dict__.values())
