"""Adaptive clipping (AGC): gradients are limited in relation to the weights that they change, unit by unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

GROUP_KEY = "agc"
"""Key of a parameter group; False leaves its gradients as they are."""

_EPS = 1e-3  # the least norm of a unit's weights that counts, so that weights of 0 can be trained


def clip_adaptively(optimizer: Optimizer, factor: float) -> None:
    """Scale gradients in place so that each unit's norm is at most `factor` times the norm of the unit's weights.

    A unit is an output: a row of a matrix, a filter of a convolution. A vector or a number is one unit. Norms of 16-bit
    tensors are computed in float32. Nothing is read on the host. Sharded tensors (DTensor) communicate, if a unit is
    spread over ranks.

    Args:
        optimizer: The optimizer; its gradients are reduced and unscaled. Groups with `agc=False` are left out.
        factor: Above 0; 0.01 is usual for large batches.

    Raises:
        ConfigError: A gradient is sparse.

    Source: Brock et al. 2021, eq. 3, with weights of at least 1e-3.
    """
    for group in optimizer.param_groups:
        if group.get(GROUP_KEY, True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _clip(parameter.detach(), parameter.grad.detach(), factor)


def refuse_engine(strategy: str, *, owns_optimizers: bool) -> None:
    """Refuse adaptive clipping where an engine holds the gradients, flattened.

    Args:
        strategy: Name of the strategy.
        owns_optimizers: See `Traits`.

    Raises:
        ConfigError: The engine owns the optimizers.
    """
    if owns_optimizers:
        raise ConfigError(
            f"gradient_clip_algorithm='agc' needs norms of each unit's weights and gradients, and {strategy} "
            "flattens both.",
            fix="clip by norm (gradient_clip_algorithm='norm'), or use strategy='ddp' or 'fsdp'.",
        )


def _clip(weights: Tensor, gradient: Tensor, factor: float) -> None:
    if gradient.layout is not torch.strided:
        raise ConfigError(
            f"Expected dense gradients for gradient_clip_algorithm='agc', got {gradient.layout} of shape "
            f"{tuple(gradient.shape)}.",
            fix="build the embedding with sparse=False, or put its parameters into a group with agc=False.",
        )
    limit = _norm_of_units(weights).clamp_(min=_EPS).mul_(factor)
    # Below the limit the factor is exactly 1; a gradient of 0 has the factor 1, not NaN.
    gradient.mul_((limit / _norm_of_units(gradient)).clamp_(max=1.0))


def _norm_of_units(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    dims = tuple(range(1, tensor.ndim)) or None
    norm = torch.linalg.vector_norm(tensor, dim=dims, keepdim=dims is not None, dtype=dtype)
    return _reduced(norm) if hasattr(norm, "device_mesh") else norm  # a DTensor


def _reduced(norm: DTensor) -> Tensor:
    """Return the norms of units that are spread over ranks, on each of these ranks."""
    from torch.distributed.tensor import Replicate

    return norm.redistribute(placements=[Replicate() if one.is_partial() else one for one in norm.placements])
