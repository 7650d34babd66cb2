"""Conversions of activations between the layouts that they have on the ranks of tensor parallelism.

Each has a conversion as its gradient: what is gathered forward is split backward, and so on. So gradients can be
differentiated again, as often as a step does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ....errors import ModuleError
from ....protocols import Args

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from ...autograd import AutogradContext

# Any in this file: contexts and arguments of autograd functions.

# Older versions of torch have them under another name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def convert(
    tensor: Tensor, mesh: DeviceMesh, have: Placement, want: Placement, *, gradient: Placement | None = None
) -> Tensor:
    """Return this rank's part of a tensor in another layout. On every rank of the mesh: it may communicate.

    Args:
        tensor: This rank's part, or a DTensor, whose own layout then counts instead of `have`.
        mesh: One axis.
        have: The layout of `tensor`.
        want: The layout of the result.
        gradient: The layout of the result's gradient; None: that of the result.
    """
    if have == want and gradient in (None, want) and not isinstance(tensor, DTensor):
        return tensor
    if not isinstance(tensor, DTensor) and not torch.compiler.is_compiling():
        result: Tensor = _Conversion.apply(tensor, mesh, have, want, gradient)  # type: ignore[no-untyped-call]
        return result
    whole = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [have], run_check=False)
    if whole.placements != (want,):
        whole = whole.redistribute(placements=[want])
    return once(whole.to_local(grad_placements=None if gradient is None else [gradient]))


def enter(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the same values for computation in parts: gradients are summed over ranks."""
    return convert(tensor, mesh, Replicate(), Replicate(), gradient=Partial())


def reduce(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over ranks, on each of them."""
    return convert(tensor, mesh, Partial(), Replicate())


def gather(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return the full tensor from parts along a dimension; all ranks compute the same with it."""
    return convert(tensor, mesh, Shard(dim % tensor.ndim), Replicate())


def split(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's part, along a dimension, of a tensor that all ranks have.

    Raises:
        ModuleError: The number of ranks does not divide it.
    """
    size = tensor.shape[dim]
    if size % mesh.size():
        raise ModuleError(
            f"Expected a size of dimension {dim} that tp={mesh.size()} divides, got shape {tuple(tensor.shape)}.",
            fix=f"pad it to a multiple of {mesh.size()}, or leave out sequence_parallel=True.",
        )
    return convert(tensor, mesh, Replicate(), Shard(dim % tensor.ndim))


def local_of(value: object, mesh: DeviceMesh) -> object:
    """Return the full tensor of a DTensor as a plain one that all ranks have, and any other value as it is."""
    return convert(value, mesh, Replicate(), Replicate()) if isinstance(value, DTensor) else value


def unviewed(tensor: Tensor, module: nn.Module) -> Tensor:
    """Return an output of a module, in separate memory where the module is a unit of `fully_shard`.

    Conversions return views. A change of one in place (`x += y`) loses the hook that gathers the unit's parameters
    before its backward pass; torch 2.13 warns of every view.
    """
    return tensor.clone() if tensor._base is not None and isinstance(module, FSDPModule) else tensor


class _Conversion(torch.autograd.Function):
    """A conversion of plain tensors, also within transforms of `torch.func`.

    The gradient of one rank's part of a sum is the sum's, and each rank uses it for its own part: a second derivative
    adds what they pass back.
    """

    @staticmethod
    def forward(
        tensor: Tensor, mesh: DeviceMesh, have: Placement, want: Placement, gradient: Placement | None
    ) -> Tensor:
        group, size = mesh.get_group(), mesh.size()
        if have == want:
            return tensor.view_as(tensor)
        if isinstance(have, Replicate):
            return tensor.chunk(size, _dim(want))[mesh.get_local_rank()].contiguous()
        if isinstance(want, Replicate) and isinstance(have, Partial):
            total = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=group)
            return total
        dim = _dim(have) if isinstance(have, Shard) else _dim(want)
        mine = tensor.movedim(dim, 0).contiguous()
        if isinstance(have, Shard):
            whole = mine.new_empty((size * mine.shape[0], *mine.shape[1:]))
            _all_gather(whole, mine, group=group)
        else:
            whole = mine.new_empty((mine.shape[0] // size, *mine.shape[1:]))
            _reduce_scatter(whole, mine, group=group)
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def setup_context(ctx: AutogradContext, inputs: Args, output: Tensor) -> None:
        ctx.arguments = inputs[1:]

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        mesh, have, want, gradient = ctx.arguments
        of_sum = isinstance(have, Partial)
        back = convert(
            gradients[0], mesh, gradient or want, Replicate() if of_sum else have, gradient=have if of_sum else None
        )
        return back, None, None, None, None


def _dim(placement: Placement) -> int:
    assert isinstance(placement, Shard), placement
    return placement.dim


def once(tensor: Tensor) -> Tensor:
    """Return the same values, whose gradient cannot be differentiated: what is beside them computes with DTensors.

    Torch (2.13) drops graphs of gradients that it converts, and takes those of sums for values that ranks use alike.
    """
    if not tensor.requires_grad or torch.compiler.is_compiling():  # torch refuses it for compiled code
        return tensor
    result: Tensor = _Once.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, is_gradient: bool = False) -> Tensor:
        ctx.is_gradient = is_gradient
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.is_gradient:
            raise ModuleError(
                "Expected first derivatives only through layers that compute with DTensors over tp, got a second one: "
                "a gradient that was computed with create_graph=True is differentiated.",
                fix="leave out loss_parallel=True, and name Loopwright's styles in the tensor plan; or train without "
                "tp.",
            )
        gradient = gradients[0]
        if torch.is_grad_enabled():  # also where torch has dropped its graph
            gradient = gradient.detach().requires_grad_()
        return _Once.apply(gradient, True), None  # type: ignore[no-untyped-call]
