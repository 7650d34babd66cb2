"""`Float8Precision`: products of linear layers in float8, by torchao."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, MissingDependency, ModuleError, nearest
from ..messages import warn
from .base import warn_of_unknown
from .mixed import MixedPrecision

# Any in this file: torchao, which is imported where it is used.

FLOAT8_RECIPES = ("tensorwise", "rowwise", "mxfp8")
_MX = "mxfp8"
_FIRST_CAPABILITY = (8, 9)  # of NVIDIA's devices with float8
_MX_CAPABILITY = 10  # of Blackwell's data center devices, for which torchao has kernels; the major part
_MX_CUDA = (12, 8)
_MULTIPLE = {"tensorwise": 16, "rowwise": 16, _MX: 32}  # of the sizes of a layer


class Float8Precision(MixedPrecision):
    """Compute the products of linear layers in float8, and everything else as "bf16-mixed".

    Weights, gradients and the optimizer stay in float32, so that checkpoints are those of "bf16-mixed". Inputs, weights
    and gradients of products are scaled and cast to float8 each time: e4m3 forward, e5m2 or e4m3 backward, by recipe.
    It is faster for large layers on devices with float8, together with `compile=True`. `check_format` tells what values
    lose in float8.

    The recipe "mxfp8" is `precision="mxfp8"`: e4m3 in all three products, with a power of 2 as scale for each 32 values
    along the dimension that is summed over. It has kernels on Blackwell GPUs (compute capability 10, CUDA 12.8). On
    other devices rounded operands are multiplied in bfloat16: the numbers are the same but for the order of sums, and
    it is slower than "bf16-mixed".

    Args:
        device: Device type for autocast: "cpu" or "cuda".
        recipe: Of torchao: "tensorwise" (one scale per tensor, faster), "rowwise" (more accurate), or "mxfp8".
        ignore_modules: Names of modules whose linear layers stay as they are, with those below them, such as the first
            and the last layer; None for none. Layers with sizes that are not multiples of 16 stay, too; of 32 with
            "mxfp8".
        emulate: Whether to compute with values that are rounded to float8, in the products of a wider dtype: on GPUs
            without float8, for tests. "mxfp8" does so by itself where there are no kernels, and warns.

    Attributes:
        precision: "mxfp8" with that recipe, else "float8".

    Raises:
        ConfigError: The recipe is unknown, the device has no float8, or torchao has no "mxfp8".
        MissingDependency: torchao is not installed.

    Source of "mxfp8": OCP Microscaling Formats Specification 1.0; scales are rounded up, as cuBLAS describes it.
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
        self.precision = _MX if recipe == _MX else "float8"
        if device not in ("cpu", "cuda"):
            raise ConfigError(
                f"precision={self.precision!r} cannot be used with device={device!r}, which has no float8.",
                fix="pass precision='bf16-mixed', or use a CPU or a GPU of CUDA.",
            )
        if recipe == _MX:
            _import_mx()
            if not emulate and not _has_mx_kernels(device):
                warn(
                    "precision='mxfp8' is emulated on this device: the numbers are those of MXFP8, but it is slower "
                    "than 'bf16-mixed'. It has kernels on GPUs with compute capability 10 and CUDA 12.8. To silence "
                    "this warning, pass plugins=[Float8Precision(device, recipe='mxfp8', emulate=True)]."
                )
                emulate = True
        elif device == "cuda" and not emulate and torch.cuda.get_device_capability() < _FIRST_CAPABILITY:
            raise ConfigError(
                "Expected a GPU with float8 (compute capability 8.9 or newer), got "
                f"{'.'.join(map(str, torch.cuda.get_device_capability()))}.",
                fix="pass precision='bf16-mixed', or Float8Precision(emulate=True) in plugins= to try the numbers.",
            )
        else:
            _import_torchao(self.precision)
        self.recipe = recipe
        self.ignore_modules = frozenset([ignore_modules] if isinstance(ignore_modules, str) else ignore_modules or ())
        self.emulate = emulate

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Replace linear layers in place; a second call changes nothing.

        Raises:
            ModuleError: No layer can be replaced.
        """
        if not any(isinstance(one, self._kind()) for one in module.modules()):
            warn_of_unknown(self.ignore_modules, module)
        is_fit = partial(_is_fit, self.ignore_modules, _MULTIPLE[self.recipe])
        kind = self._kind()
        if self.recipe == _MX:
            for name, one in module.named_modules():
                if is_fit(one, name):
                    # In place: hooks and other references to the layer stay.
                    one.__class__ = kind
                    one.is_emulated = self.emulate
        elif not any(isinstance(one, kind) for one in module.modules()):
            torchao = _import_torchao(self.precision)
            config = torchao.Float8LinearConfig.from_recipe_name(self.recipe)
            object.__setattr__(config, "emulate", self.emulate)  # frozen, and made by name
            torchao.convert_to_float8_training(module, module_filter_fn=is_fit, config=config)
        if not any(isinstance(one, kind) for one in module.modules()):
            raise ModuleError(
                f"Expected a module with linear layers whose sizes are multiples of {_MULTIPLE[self.recipe]}, got "
                f"{type(module).__name__} without one that is not in ignore_modules.",
                fix="use precision='bf16-mixed', or layers of other sizes.",
            )
        return module

    @contextmanager
    def plain_products(self, module: nn.Module) -> Iterator[None]:
        """Return a context in which converted layers multiply as `nn.Linear` does, for checks of a model.

        A scale of "tensorwise" depends on all tokens of a batch, also on later ones.
        """
        converted = [one for one in module.modules() if isinstance(one, self._kind())]
        try:
            for one in converted:
                one.forward = partial(nn.Linear.forward, one)
            yield
        finally:
            for one in converted:
                del one.forward

    def _kind(self) -> Any:
        return (
            _import_mx().MXLinear if self.recipe == _MX else _import_torchao(self.precision).float8_linear.Float8Linear
        )


def _is_fit(ignored: frozenset[str], multiple: int, module: nn.Module, name: str) -> bool:
    if type(module) is not nn.Linear or any(f"{name}.".startswith(f"{one}.") for one in ignored):
        return False
    return module.in_features % multiple == 0 and module.out_features % multiple == 0


def _has_mx_kernels(device: str) -> bool:
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return device == "cuda" and cuda >= _MX_CUDA and torch.cuda.get_device_capability()[0] == _MX_CAPABILITY


def quiet_torchao() -> None:
    """Import torchao, if it is installed, without its warnings on a machine that has no GPU.

    It warns that its CUDA kernels cannot be loaded, and torch of how it registers two of its types.
    """
    if "torchao" in sys.modules or torch.cuda.is_available() or importlib.util.find_spec("torchao") is None:
        return
    with (
        errors_only("torchao", "torch.utils._pytree"),
        contextlib.suppress(ImportError),  # what needs it names it
    ):
        importlib.import_module("torchao.prototype.safetensors.safetensors_support")  # which transformers imports


@contextmanager
def errors_only(*names: str) -> Iterator[None]:
    """Return a context in which loggers of these names show errors only."""
    loggers = [logging.getLogger(name) for name in names]
    before = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)


def _import_torchao(precision: str) -> Any:
    quiet_torchao()
    try:
        from torchao import float8
    except ImportError as error:
        raise MissingDependency("torchao", needed_for=f"precision={precision!r}", extra="float8") from error
    return float8


def _import_mx() -> Any:
    _import_torchao(_MX)
    try:
        return importlib.import_module(".mx_linear", __package__)
    except ImportError as error:
        raise ConfigError(
            f"precision='mxfp8' needs a torchao with torchao.prototype.moe_training.mxfp8_linear, as in 0.18, got "
            f"torchao {version('torchao')}: {error}",
            fix="pip install 'torchao==0.18.*'",
        ) from error
