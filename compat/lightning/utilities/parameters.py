"""Lightning's helpers for modules: tied parameters, norms of gradients, hooks that are overridden, compiled modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ....callbacks import Callback
from ....data import DataModule
from ....strategies.construction.activation_checkpointing import apply_activation_checkpointing
from ....trainer.module import Module

__all__ = [
    "find_shared_parameters",
    "from_compiled",
    "grad_norm",
    "is_overridden",
    "is_param_in_hook_signature",
    "set_shared_parameters",
    "to_uncompiled",
]


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for path, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    return [shared for shared in names.values() if len(shared) > 1]


def set_shared_parameters(module: nn.Module, shared_params: list[list[str]]) -> nn.Module:
    """Tie parameters by name, each group to its first; returns the module."""
    for first, *others in shared_params:
        parameter = module.get_parameter(first)
        for other in others:
            path, _, name = other.rpartition(".")
            setattr(module.get_submodule(path), name, parameter)
    return module


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and of all of them, by name for the logs.

    Args:
        module: Its gradients are there.
        norm_type: Which norm: 2, or "inf".
        group_separator: Stands before a parameter's name.

    Raises:
        ValueError: `norm_type` is not above 0.
    """
    kind = float(norm_type)
    if not kind > 0:
        raise ValueError(f"norm_type={norm_type!r}, expected a number above 0 or 'inf'")
    norms = {
        f"grad_{kind}_norm{group_separator}{name}": torch.linalg.vector_norm(parameter.grad.detach(), kind)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{kind}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), kind)
    return norms


def is_overridden(method_name: str, instance: object | None = None, parent: type[object] | None = None) -> bool:
    """Return whether an object's class overrides a method of its base class.

    Args:
        method_name: The method.
        instance: The object; None is False.
        parent: The base class; by default Module, DataModule or Callback, which the object is one of.

    Raises:
        ValueError: It is none of them, or the base class has no such method.
    """
    if instance is None:
        return False
    if parent is None:
        parent = next((base for base in (Module, DataModule, Callback) if isinstance(instance, base)), None)
        if parent is None:
            raise ValueError(f"{type(instance).__name__} is not a module, data module or callback; pass parent=")
    if not hasattr(parent, method_name):
        raise ValueError(f"{parent.__name__} has no {method_name!r}")
    own = getattr(instance, method_name, None)
    own = getattr(own, "__wrapped__", own)  # one level, as Lightning does: of what tracers put around a hook
    own = own.func if isinstance(own, partial) else own
    if own is None:
        return False
    return getattr(own, "__func__", own) is not inspect.unwrap(getattr(parent, method_name))


def is_param_in_hook_signature(
    hook_fx: Callable[..., object], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return whether a hook takes an argument.

    Args:
        hook_fx: The hook.
        param: The argument's name.
        explicit: Whether `*args` does not count.
        min_args: A hook with this number of arguments takes it, too.
    """
    found = inspect.getfullargspec(inspect.unwrap(hook_fx))
    names = [name for name in found.args if name not in ("self", "cls")]
    return param in names or (not explicit and found.varargs is not None) or (min_args or len(names) + 1) <= len(names)


def from_compiled(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile was given.

    Raises:
        ValueError: It is not a compiled LightningModule.
    """
    original = getattr(model, "_orig_mod", None)
    if not isinstance(original, Module):
        raise ValueError(f"Expected a LightningModule that torch.compile returned, got {type(model).__name__}.")
    return original


def to_uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile was given; one that is not compiled as it is.

    Raises:
        ValueError: It is not a LightningModule.
    """
    original = getattr(model, "_orig_mod", model)
    if not isinstance(original, Module):
        raise ValueError(f"Expected a LightningModule, compiled or not, got {type(model).__name__}.")
    return original


def _materialize_meta_tensors(module: nn.Module, device: torch.device | str) -> None:
    """Give a module's own tensors memory and values, if they are on the meta device."""
    if any(tensor.is_meta for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]):
        module.to_empty(device=device, recurse=False)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()


def _setup_activation_checkpointing(module: nn.Module, activation_checkpointing_kwargs: dict[str, object]) -> None:
    """Let submodules compute their activations again in the backward pass, by the policy in the arguments."""
    policy = activation_checkpointing_kwargs.get("auto_wrap_policy", activation_checkpointing_kwargs.get("check_fn"))
    if activation_checkpointing_kwargs:
        apply_activation_checkpointing(module, policy)
