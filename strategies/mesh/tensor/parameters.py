"""Parameters as DTensors: how they get their placement, and how a forward pass reads them as plain tensors.

Every parameter of a module under tensor parallelism is a DTensor, because optimizers and clipping take no mixture. A
module's code meets plain tensors: while it runs, this rank's part replaces the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .layouts import enter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

PARTIAL = "_loopwright_partial"
"""Attribute of a module: names of its replicated parameters whose gradients are to be summed over ranks, because each
rank uses them with another part of the activations."""

Swapped = list[tuple[nn.Module, str, Tensor, Tensor | None]]
"""Parameters that were replaced for a forward pass: owner, name, the parameter, and its replacement."""


def distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return a parameter as a DTensor; this rank keeps its part, in separate memory. Does not communicate.

    Args:
        parameter: Full, with the same values on all ranks of the mesh; a DTensor is returned as it is.
        mesh: One axis.
        placement: Replicate, or Shard of a dimension that the number of ranks divides.
    """
    if isinstance(parameter, DTensor):
        return parameter
    full = parameter.detach()
    local = full.contiguous()
    if isinstance(placement, Shard):
        part = full.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
        local = part.clone(memory_format=torch.contiguous_format)  # a view would keep the full one alive
    stride = torch.empty(full.shape, device="meta").stride()
    shards = DTensor.from_local(local, mesh, [placement], run_check=False, shape=full.shape, stride=stride)
    new = nn.Parameter(shards, requires_grad=parameter.requires_grad)
    new.__dict__.update({name: one for name, one in parameter.__dict__.items() if not name.startswith("_loopwright")})
    return new


def swap_in(owners: Iterable[tuple[nn.Module, str]], mesh: DeviceMesh) -> Swapped:
    """Put this rank's parts instead of parameters, and return what `put_back` needs.

    Those that are sharded over other axes too, or plain, are left: their unit has not gathered them.

    Args:
        owners: Modules and names of their own parameters.
        mesh: One axis.
    """
    swapped: Swapped = []
    for owner, name in owners:
        parameter = owner._parameters.get(name)
        if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
            continue
        local: Tensor = parameter.to_local()
        if name in owner.__dict__.get(PARTIAL, ()):
            local = enter(local, mesh)
        replace_parameter(owner, name, local)
        swapped.append((owner, name, parameter, local))
    return swapped


def put_back(swapped: Swapped) -> None:
    """Put the parameters back that `swap_in` replaced, unless something else has replaced them."""
    for owner, name, parameter, local in reversed(swapped):
        if owner._parameters.get(name) is local:
            replace_parameter(owner, name, parameter)
    swapped.clear()


def replace_parameter(owner: nn.Module, name: str, value: Tensor | None) -> None:
    """Put any tensor, or None, instead of a module's own parameter, past the checks of `nn.Module`."""
    owner._parameters[name] = value  # type: ignore[assignment]
    if isinstance(owner, nn.RNNBase):  # it has a list of its parameters beside
        owner._flat_weights = [getattr(owner, one) for one in owner._flat_weights_names]
