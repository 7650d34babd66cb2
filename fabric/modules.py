"""Steps of `Fabric.setup` for a module: it is compiled, converted, moved, and wrapped by the strategy."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..messages import warn
from ..precision import Precision
from ..strategies import SingleDeviceStrategy, Strategy
from ..strategies.optional import changing


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper, whose parameters have the user's names."""
    original: nn.Module = module.__dict__.get("_modules", {}).get("_orig_mod", module)
    return original


def compiled(module: nn.Module, strategy: Strategy, value: bool | Mapping[str, object]) -> nn.Module:
    """Return the module, compiled in place if requested by `compile=` or by torch.compile."""
    if value is False and uncompiled(module) is module and "_lw_compile_options" not in vars(module):
        return module
    from .compiling import compile_for_fabric  # not imported where nothing is compiled
    from .wrappers import STEPS

    return compile_for_fabric(module, strategy, value, STEPS)


def converted(module: nn.Module, strategy: Strategy, precision: Precision, *, moves: bool) -> nn.Module:
    """Return the module in the dtypes of a precision, on the strategy's device unless it is left where it is."""
    with changing(strategy, module):
        module = precision.convert_module(module)
    if moves:
        strategy.module_to_device(module)
        return module
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    if len(devices) > 1:
        warn(
            f"the parameters of {type(module).__name__} are on several devices: {', '.join(devices)}; they are not "
            "moved."
        )
    return module


def run_by(strategy: Strategy, module: nn.Module, *, moves: bool) -> nn.Module:
    """Return the module as the strategy runs it."""
    if not moves and type(strategy).setup_module is SingleDeviceStrategy.setup_module:
        return module  # it would only move the module
    return strategy.setup_module(module)
