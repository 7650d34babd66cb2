"""Checks of the objects given to `Fabric.setup`, and the callbacks of installed packages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError, ModuleError
from .wrappers import is_wrapped

__all__ = ["check_module", "check_optimizers", "check_optimizers_of", "installed_callbacks", "refuse_wrapped"]


_CALLBACK_FACTORIES = ("loopwright.fabric.callbacks_factory", "lightning.fabric.callbacks_factory")


def refuse_wrapped(verb: str, objects: Sequence[object]) -> None:
    """Raise a ConfigError that names objects that are set up already."""
    wrapped = [type(obj).__name__ for obj in objects if is_wrapped(obj)]
    if wrapped:
        raise ConfigError(
            f"Fabric.{verb} was given what is set up already: {', '.join(wrapped)}.",
            fix="set up each object once, and use what setup returned.",
        )


def check_module(module: nn.Module) -> None:
    """Raise an error if this is not a module, or one that is set up already."""
    refuse_wrapped("setup", [module])
    if not isinstance(module, nn.Module):
        raise ModuleError(
            f"Fabric.setup was given a {type(module).__name__} as the module.", fix="pass a torch.nn.Module first."
        )


def check_optimizers(verb: str, optimizers: Sequence[Optimizer]) -> None:
    """Raise an error if one is not an optimizer, is set up already, or has parameters without values."""
    refuse_wrapped(verb, optimizers)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ModuleError(
                f"Fabric.{verb} was given a {type(optimizer).__name__} as an optimizer.",
                fix="pass torch optimizers; a schedule goes into scheduler=.",
            )
        if any(parameter.is_meta for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"the {type(optimizer).__name__} that Fabric.{verb} was given has parameters on the meta device, which "
                "have no values to train.",
                fix="set the module up first, then make the optimizer of the parameters of what is returned.",
            )


def check_optimizers_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise an error if none of an optimizer's parameters is in the module, but in another copy of it."""
    if not optimizers:
        return
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in own for parameter in parameters):
            raise ConfigError(
                f"none of the parameters of {type(optimizer).__name__} is in the {type(module).__name__} that it was "
                "given to Fabric.setup with: it would train something else.",
                fix="make the optimizer of model.parameters(), after the last change that replaces parameters.",
            )


def installed_callbacks() -> list[object]:
    """Return callbacks from the entry points of installed packages; reads the metadata of every package."""
    from importlib.metadata import entry_points

    points = [point for group in _CALLBACK_FACTORIES for point in entry_points(group=group)]
    made = [point.load()() for point in points]
    return [one for some in made for one in (some if isinstance(some, (list, tuple)) else [some])]
