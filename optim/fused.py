"""Optimizers of torch with `fused=True` where it works, and the rule for where that is.

A fused step reads and writes each weight and its state once, in one kernel; the others take a pass for each operation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

# Any in this file: arguments of torch's optimizers, and what their groups hold.

_Kind = TypeVar("_Kind", bound=Optimizer)
_FUSED = (Adam, AdamW, SGD)
_IMPLEMENTATIONS = ("fused", "foreach", "differentiable")


def adamw(params: Iterable[Any], lr: float | Tensor = 1e-3, **options: Any) -> AdamW:
    """Return a `torch.optim.AdamW`, fused if `can_fuse` says so for its parameters.

    Args:
        params: Parameters, or groups of them, as for torch's class.
        lr: Learning rate.
        options: Further arguments of the class. If `fused`, `foreach` or `differentiable` is among them, it decides.
    """
    return _make(AdamW, params, lr, options)


def adam(params: Iterable[Any], lr: float | Tensor = 1e-3, **options: Any) -> Adam:
    """Return a `torch.optim.Adam`, fused if `can_fuse` says so for its parameters.

    Args:
        params: See `adamw`.
        lr: Learning rate.
        options: See `adamw`.
    """
    return _make(Adam, params, lr, options)


def sgd(params: Iterable[Any], lr: float | Tensor = 1e-3, **options: Any) -> SGD:
    """Return a `torch.optim.SGD`, fused if `can_fuse` says so for its parameters.

    Args:
        params: See `adamw`. Gradients must not be sparse: with `nn.Embedding(sparse=True)` pass `fused=False`.
        lr: Learning rate.
        options: See `adamw`.
    """
    return _make(SGD, params, lr, options)


def can_fuse(parameters: Iterable[Tensor]) -> bool:
    """Return whether torch's fused optimizers can step these parameters.

    They can if there is at least one parameter, and all have floating-point dtypes, are on devices that this version of
    torch names for fused kernels (torch 2.13: cpu, cuda, mps, xpu, hpu, mtia), and are either all plain or all sharded
    (DTensor). Other subclasses of tensors, such as quantized ones, and parameters without a shape yet are not fused.

    Args:
        parameters: The parameters that one optimizer steps.
    """
    devices = _get_fused_kernels_supported_devices()
    kinds = set()
    for one in parameters:
        is_sharded = hasattr(one, "device_mesh")
        if not is_sharded and type(one) not in (Tensor, torch.nn.Parameter):
            return False
        if one.device.type not in devices or not one.is_floating_point():
            return False
        kinds.add(is_sharded)
    return len(kinds) == 1


def is_fusable(optimizer: Optimizer) -> bool:
    """Return whether `fuse` would change this optimizer: its steps are not fused, and can be.

    Args:
        optimizer: Only `torch.optim.AdamW`, `Adam` and `SGD` themselves can be; subclasses may step otherwise.
    """
    groups = optimizer.param_groups
    return (
        type(optimizer) in _FUSED
        and not all(group.get("fused") for group in groups)
        and not any(group.get("differentiable") for group in groups)
        and can_fuse(_members(optimizer))
    )


def fuse(optimizer: Optimizer) -> bool:
    """Let an optimizer that has not stepped yet take fused steps, if it can; return whether it was changed."""
    if optimizer.state or not is_fusable(optimizer):
        return False
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group.update(fused=True, foreach=False)
    match_implementation(optimizer)
    return True


def match_implementation(optimizer: Optimizer) -> None:
    """Let an optimizer fit its groups, whose `fused` may have come from a checkpoint.

    torch decides how a loss scale is applied when it makes the optimizer, and not again when a state is loaded. A
    checkpoint of fused steps is continued without them on a device that has none.
    """
    if type(optimizer) in _FUSED:
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        if is_fused and not can_fuse(_members(optimizer)):
            is_fused = False
            for group in optimizer.param_groups:
                group["fused"] = False
        own: Any = optimizer
        own._step_supports_amp_scaling = own._need_device_dtype_check_for_fused = is_fused


def _make(kind: type[_Kind], params: Iterable[Any], lr: float | Tensor, options: Mapping[str, Any]) -> _Kind:
    params = list(params)
    made: Any = kind
    is_fused = not any(options.get(name) is not None for name in _IMPLEMENTATIONS) and can_fuse(_flat(params))
    optimizer: _Kind = made(params, lr=lr, **({**options, "fused": True} if is_fused else options))
    return optimizer


def _flat(params: list[Any]) -> Iterable[Tensor]:
    """Yield the parameters of what an optimizer takes: tensors, pairs of names and tensors, or groups of either."""
    for one in params:
        if isinstance(one, Mapping):
            members = one["params"]
            yield from _flat([members] if isinstance(members, Tensor) else list(members))
        else:
            yield one[1] if isinstance(one, tuple) else one


def _members(optimizer: Optimizer) -> Iterable[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


for _function, _kind in ((adamw, AdamW), (adam, Adam), (sgd, SGD)):
    vars(_function)["__signature__"] = inspect.signature(_kind)  # what editors and the command line show
