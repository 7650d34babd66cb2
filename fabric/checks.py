"""Checks of the objects given to `Fabric.setup`, and the callbacks of installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError, ModuleError
from .wrappers import is_wrapped

_CALLBACK_FACTORIES = ("loopwright.fabric.callbacks_factory", "lightning.fabric.callbacks_factory")


def refuse_wrapped(verb: str, objects: Sequence[object]) -> None:
    """Raise a ConfigError that lists objects that are already set up."""
    wrapped = [type(obj).__name__ for obj in objects if is_wrapped(obj)]
    if wrapped:
        raise ConfigError(
            f"Expected objects that are not set up yet for Fabric.{verb}, got {', '.join(wrapped)}.",
            fix="set up each object once, and use the object that setup returns.",
        )


def check_module(module: nn.Module) -> None:
    """Raise an error if this is not a module, or is already set up."""
    refuse_wrapped("setup", [module])
    if not isinstance(module, nn.Module):
        raise ModuleError(
            f"Expected a torch.nn.Module as the first argument of Fabric.setup, got {type(module).__name__}.",
            fix="pass the module first, then its optimizers.",
        )


def check_optimizers(verb: str, optimizers: Sequence[Optimizer]) -> None:
    """Raise an error if one is not an optimizer, is already set up, or has parameters without values."""
    refuse_wrapped(verb, optimizers)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ModuleError(
                f"Expected torch optimizers for Fabric.{verb}, got {type(optimizer).__name__}.",
                fix="pass torch optimizers; pass a schedule in scheduler=.",
            )
        if any(parameter.is_meta for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"Expected parameters with values in the {type(optimizer).__name__} for Fabric.{verb}, got parameters "
                "on the meta device.",
                fix="set the module up first, then create the optimizer from the parameters of the returned module.",
            )


def check_optimizers_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise an error if none of an optimizer's parameters belongs to the module."""
    if not optimizers:
        return
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in own for parameter in parameters):
            raise ConfigError(
                f"Expected parameters of the {type(module).__name__} in the {type(optimizer).__name__}, got only "
                "parameters of other modules, so that the optimizer would not train this module.",
                fix="create the optimizer from model.parameters(), after the last change that replaces parameters.",
            )


def installed_callbacks() -> list[object]:
    """Return callbacks from the entry points of installed packages. This reads the metadata of every package."""
    points = [point for group in _CALLBACK_FACTORIES for point in entry_points(group=group)]
    made = [point.load()() for point in points]
    return [one for some in made for one in (some if isinstance(some, (list, tuple)) else [some])]
