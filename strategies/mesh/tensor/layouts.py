"""Conversions of activations between the layouts that they have on the ranks of tensor parallelism.

Each is a conversion of a DTensor with its gradient: what is gathered forward is scattered backward, and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ....errors import ModuleError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["convert", "enter", "gather", "local_of", "reduce", "split", "unviewed"]


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
        return tensor  # as it would come back, without the way through a DTensor
    whole = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [have], run_check=False)
    if whole.placements != (want,):
        whole = whole.redistribute(placements=[want])
    return whole.to_local(grad_placements=None if gradient is None else [gradient])


def enter(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the same values for computation in parts: each rank's gradient is added to those of the others."""
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
    """Return an output of a module, in memory of its own where the module is a unit of `fully_shard`.

    Conversions return views. A change of one in place (`x += y`) loses the hook that gathers the unit's parameters
    before its backward pass; torch 2.13 warns of every view.
    """
    return tensor.clone() if tensor._base is not None and isinstance(module, FSDPModule) else tensor
