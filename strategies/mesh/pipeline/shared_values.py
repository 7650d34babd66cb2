"""What blocks of several stages share beside the hidden state: values that go over a split with it.

A block may take values that are computed once before the blocks (the condition of a diffusion transformer, or the
states of an encoder), or that blocks return beside their hidden state (the position bias of T5, the state of an LSTM).
Later stages have NaN in their place: what the stage before has sent takes that place, and gradients go the same way
back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ....errors import ModuleError
from ....protocols import AnyOutput, Args, Kwargs, Tree
from ...tree import leaves, map_leaves
from .remote_tensors import RemoteTensor

if TYPE_CHECKING:
    from ...autograd import AutogradContext

# Any in this file: arguments and results of the user's modules.

_MOST_DIMS = 8


def further_tensors(args: Args, kwargs: Kwargs, hidden: Tensor) -> list[Tensor]:
    """Return the tensors in a block's arguments after its hidden state, which is the first of them."""
    found = [one for _, one in leaves((args, kwargs)) if isinstance(one, Tensor)]
    first = next((number for number, one in enumerate(found) if one is hidden), 0)
    del found[first]
    return [one for one in found if type(one) in (Tensor, nn.Parameter, RemoteTensor) and one.ndim <= _MOST_DIMS]


def choose(own: list[Tensor], received: tuple[Tensor, ...], name: str) -> tuple[int, ...]:
    """Return which of a block's further tensors this stage does not have: those that differ from what was sent.

    Args:
        own: Those of this stage.
        received: Those of the stage before.
        name: The block's, for errors.

    Raises:
        ModuleError: One of integers differs, or there are others than were sent.
    """
    if len(own) != len(received):
        raise ModuleError(
            f"Expected {name} to get {len(received)} tensors beside its hidden state, as on the stage before, got "
            f"{len(own)}.",
            fix="pass the same arguments to all blocks; or name a submodule whose blocks get them from the batch in "
            "Pipeline(module=...): what is outside of it runs on every stage.",
        )
    chosen = []
    for number, (one, other) in enumerate(zip(own, received, strict=True)):
        if isinstance(one, RemoteTensor) or _is_same(one, other):
            continue
        if not (other.is_floating_point() and one.is_floating_point()):
            raise ModuleError(
                f"Expected tensor {number + 1} after the hidden state of {name} to be floating-point, got "
                f"{other.dtype} with other values than on the stage before: floating-point values go over a split.",
                fix="compute it from the batch; or name a smaller part of the model in Pipeline(module=...): what is "
                "outside of it runs on every stage.",
            )
        chosen.append(number)
    return tuple(chosen)


def absent(own: list[Tensor]) -> tuple[int, ...]:
    """Return which of a block's further tensors have NaN: those of other stages, where there is nothing to compare."""
    floats = (number for number, one in enumerate(own) if type(one) is Tensor and one.is_floating_point())
    return tuple(number for number in floats if bool(own[number].isnan().any()))


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def fill(own: Tensor, received: Tensor, name: str) -> None:
    """Let a tensor of this stage be what was received, wherever the step holds it: also after the blocks."""
    try:
        torch.utils.swap_tensors(own, received)
    except RuntimeError as error:
        raise ModuleError(
            f"what {name} shares with blocks of earlier stages cannot be put in its place: {error}",
            fix="pass it to the blocks as it was computed; or name a smaller part of the model in "
            "Pipeline(module=...): what is outside of it runs on every stage.",
        ) from error


class _Join(torch.autograd.Function):
    """The same tensors, whose gradients are 0 where a stage uses one and not another: each is sent back."""

    @staticmethod
    def forward(ctx: AutogradContext, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.view_as(one) for one in tensors)

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.contiguous() for one in gradients)  # gloo sends no others


def join(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return tensors that were received, so that each of them has a gradient if one of them has."""
    joined: tuple[Tensor, ...] = _Join.apply(*tensors)  # type: ignore[no-untyped-call]
    return tuple(map(no_copy, joined))


def no_copy(tensor: Tensor) -> Tensor:
    """Return the same values in the same memory as a tensor, which autograd does not take for a view."""
    alias: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return alias


# -- outputs of other stages' blocks -----------------------------------------------------------------------------------


class _FromInput:
    """Stands for a value that a block returns as it got it.

    Attributes:
        number: Among all values in its arguments.
    """

    def __init__(self, number: int) -> None:
        self.number = number


class _Missing:
    """Stands for a tensor that another stage has."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def described_output(output: AnyOutput, args: Args, kwargs: Kwargs, name: str) -> AnyOutput:
    """Return an output of a block with what stands for its values, for stages that do not run it.

    Raises:
        ModuleError: It holds something that is neither a tensor nor a plain value, nor an argument.
    """
    inputs = {id(one): number for number, (_, one) in enumerate(leaves((args, kwargs)))}

    def describe(value: Tree) -> Tree:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if id(value) in inputs:
            return _FromInput(inputs[id(value)])
        if isinstance(value, Tensor):
            return _Missing(value)
        raise ModuleError(
            f"Expected {name} to return tensors, got {type(value).__name__} among them.",
            fix="let the blocks return tensors, or name another list of blocks in Pipeline(module=...).",
        )

    return map_leaves(output, describe)


def absent_output(described: Tree, args: Args, kwargs: Kwargs, hidden: Tensor) -> AnyOutput:
    """Return NaN in the shapes of what a block of another stage returns, on the device of the hidden state."""
    inputs = [one for _, one in leaves((args, kwargs))]

    def make(value: Tree) -> Tree:
        if isinstance(value, _FromInput):
            return inputs[value.number]
        if isinstance(value, _Missing):
            empty = torch.nan if value.dtype.is_floating_point or value.dtype.is_complex else 0
            return torch.full(value.shape, empty, dtype=value.dtype, device=hidden.device)
        return value

    return map_leaves(described, make)
