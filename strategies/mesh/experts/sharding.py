"""Experts of a module, sharded over the ranks of the axis `ep`, or on another stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ....errors import ModuleError
from ...distributed.shards import is_sharded
from ..pipeline.remote_tensors import RemoteTensor
from .layer import Experts
from .weights import ExpertWeights

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_RESULTS = ("balance_loss", "tokens_per_expert")


def experts_in(module: nn.Module) -> dict[str, Experts]:
    """Return the layers of experts by their names."""
    return {name: one for name, one in module.named_modules() if isinstance(one, Experts)}


def check_layers(module: nn.Module, ep: int) -> None:
    """Refuse a module whose experts cannot be shared by `ep` ranks. Does not communicate.

    Raises:
        ModuleError: There are no experts, or their number is not divisible; names the layers.
    """
    layers = experts_in(module)
    if not layers:
        raise ModuleError(
            f"Expected a layer loopwright.Experts in {type(module).__name__} for ep={ep}, got none.",
            fix="leave ep out, or build the mixture of experts with loopwright.Experts.",
        )
    uneven = [f"{one.num_experts} in {name or 'it'}" for name, one in layers.items() if one.num_experts % ep]
    if uneven:
        raise ModuleError(
            f"Expected a number of experts that ep={ep} divides, got {', '.join(uneven)}.",
            fix="pass a divisor of the number of experts as ep, or change num_experts=.",
        )


def preparing(
    module: nn.Module, mesh: DeviceMesh, prepare: Callable[[list[nn.Module]], None] | None
) -> Callable[[list[nn.Module]], None]:
    """Return what shards the experts among given modules, and then calls `prepare` with these.

    Args:
        module: All that will be given.
        mesh: The axis over which experts are sharded.
        prepare: None: nothing else.

    Raises:
        ModuleError: See `check_layers`.
    """
    check_layers(module, mesh.size())

    def run(modules: list[nn.Module]) -> None:
        shard_experts(modules, mesh)
        if prepare is not None:
            prepare(modules)

    return run


def shard_experts(modules: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Replace the weights of experts by DTensors that are sharded over their first dimension, in place.

    Every rank keeps its part of the values that it has: nothing is sent.

    Args:
        modules: Those that are experts' weights are sharded, the others are left unchanged.
        mesh: The axis over which they are sharded.
    """
    for one in modules:
        if isinstance(one, ExpertWeights):
            for name, parameter in list(one.named_parameters(recurse=False)):
                if not is_sharded(parameter):
                    setattr(one, name, _sharded(parameter, mesh))


def _sharded(parameter: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    from torch.distributed.tensor import DTensor, Shard

    with torch.no_grad():
        # With memory of its own: a view would keep all experts.
        part = parameter.chunk(mesh.size())[mesh.get_local_rank()].clone()
    whole = DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def leave_results(module: nn.Module) -> None:
    """Let the results of layers on other stages be an error where a step reads them, and not None.

    Args:
        module: The user's module, split into stages.
    """
    for name, one in experts_in(module).items():
        there = one.router.__dict__.get("weight")
        if isinstance(there, RemoteTensor):
            for key in _RESULTS:
                setattr(one, key, RemoteTensor.of(torch.empty(()), f"{name}.{key}", there.stage, remedy=_ELSEWHERE))


_ELSEWHERE = (
    "train without pp to add balance losses to the loss: they are known on the stages that have the layers, and the "
    "loss on the last one; or leave them out."
)
