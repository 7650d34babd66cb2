"""`Float8Precision`: products of linear layers in float8, by torchao."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, MissingDependency, ModuleError, nearest
from .mixed import MixedPrecision

# Any in this file: torchao, which is imported where it is used.

FLOAT8_RECIPES = ("tensorwise", "rowwise")
_FIRST_CAPABILITY = (8, 9)  # of NVIDIA's devices with float8
_MULTIPLE = 16  # of the sizes of a layer, which torch._scaled_mm needs


class Float8Precision(MixedPrecision):
    """Compute the products of linear layers in float8, and everything else as "bf16-mixed".

    Weights, gradients and the optimizer stay in float32, so that checkpoints are those of "bf16-mixed". Inputs, weights
    and gradients of products are scaled and cast to float8 each time: e4m3 forward, e5m2 or e4m3 backward, by recipe.
    It is faster for large layers on devices with float8, together with `compile=True`. `check_format` tells what values
    lose in float8.

    Args:
        device: Device type for autocast: "cpu" or "cuda".
        recipe: Of torchao: "tensorwise" (one scale per tensor, faster) or "rowwise" (more accurate).
        ignore_modules: Names of modules whose linear layers stay as they are, with those below them, such as the first
            and the last layer; None for none. Layers with sizes that are not multiples of 16 stay, too.
        emulate: Whether to compute with values that are rounded to float8, in the products of a wider dtype: on GPUs
            without float8, for tests.

    Raises:
        ConfigError: The recipe is unknown, or the GPU has no float8.
        MissingDependency: torchao is not installed.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        recipe: str = "tensorwise",
        ignore_modules: Collection[str] | None = None,
        emulate: bool = False,
    ) -> None:
        super().__init__("bf16-mixed", device)
        if recipe not in FLOAT8_RECIPES:
            raise ConfigError(
                f"Expected a recipe of torchao, got recipe={recipe!r}{nearest(str(recipe), FLOAT8_RECIPES)}.",
                fix=f"use {', '.join(FLOAT8_RECIPES)}.",
            )
        if device == "cuda" and not emulate and torch.cuda.get_device_capability() < _FIRST_CAPABILITY:
            raise ConfigError(
                "Expected a GPU with float8 (compute capability 8.9 or newer), got "
                f"{'.'.join(map(str, torch.cuda.get_device_capability()))}.",
                fix="pass precision='bf16-mixed', or Float8Precision(emulate=True) in plugins= to try the numbers.",
            )
        _import_torchao()
        self.precision = "float8"
        self.recipe = recipe
        self.ignore_modules = frozenset([ignore_modules] if isinstance(ignore_modules, str) else ignore_modules or ())
        self.emulate = emulate

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Replace linear layers in place; a second call changes nothing.

        Raises:
            ModuleError: No layer can be replaced.
        """
        torchao = _import_torchao()
        kind = torchao.float8_linear.Float8Linear
        if any(isinstance(one, kind) for one in module.modules()):
            return module
        config = torchao.Float8LinearConfig.from_recipe_name(self.recipe)
        object.__setattr__(config, "emulate", self.emulate)  # frozen, and made by name
        torchao.convert_to_float8_training(
            module, module_filter_fn=partial(_is_fit, self.ignore_modules), config=config
        )
        if not any(isinstance(one, kind) for one in module.modules()):
            raise ModuleError(
                f"Expected a module with linear layers whose sizes are multiples of {_MULTIPLE}, got "
                f"{type(module).__name__} without one that is not in ignore_modules.",
                fix="use precision='bf16-mixed', or layers of other sizes.",
            )
        return module


def _is_fit(ignored: frozenset[str], module: nn.Module, name: str) -> bool:
    if type(module) is not nn.Linear or any(f"{name}.".startswith(f"{one}.") for one in ignored):
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def quiet_torchao() -> None:
    """Import torchao, if it is installed, without its warnings on a machine that has no GPU.

    It warns that its CUDA kernels cannot be loaded, and torch of how it registers two of its types.
    """
    if "torchao" in sys.modules or torch.cuda.is_available() or importlib.util.find_spec("torchao") is None:
        return
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        with contextlib.suppress(ImportError):  # what needs it names it
            importlib.import_module("torchao.prototype.safetensors.safetensors_support")  # which transformers imports
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)


def _import_torchao() -> Any:
    quiet_torchao()
    try:
        from torchao import float8
    except ImportError as error:
        raise MissingDependency("torchao", needed_for="precision='float8'", extra="float8") from error
    return float8
