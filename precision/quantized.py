"""`BitsandbytesPrecision`: linear layers with weights of 4 or 8 bits, by bitsandbytes."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ConfigError, MissingDependency, ModuleError, nearest
from .base import kept_buffers, warn_of_unknown
from .uniform import UniformPrecision

# Any in this file: bitsandbytes, which has no types.

BITSANDBYTES_MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")
_BITSANDBYTES = "bitsandbytes"
_KERNELS = "kernels"


class BitsandbytesPrecision(UniformPrecision):
    """Replace linear layers by those of bitsandbytes, and hold everything else in a 16-bit dtype or float32.

    The weights of replaced layers are frozen, except with "int8-training": train what else there is, such as adapters,
    norms, biases or a head. Other parameters and inputs are cast to `dtype`.

    Checkpoints hold the packed weights; they are read into a module that is quantized in the same way, and so are
    checkpoints with the weights before, which are quantized then.

    Args:
        mode: "nf4" or "fp4": 4 bits, with a scale for 64 values; "nf4-dq", "fp4-dq": scales of 8 bits, too; "int8": 8
            bits, with a scale for each row; "int8-training": products in 8 bits of weights in `dtype`, which are
            trained.
        dtype: Dtype of products and of other parameters; None for bfloat16. In float16, Adam's `eps` of 1e-8 is 0.
        ignore_modules: Names of modules whose linear layers stay as they are, with those below them, as "lm_head" or
            "blocks.3"; None for none.

    Raises:
        ConfigError: The mode or dtype is unknown.
        MissingDependency: bitsandbytes is not installed.
    """

    def __init__(
        self, mode: str, dtype: torch.dtype | None = None, ignore_modules: Collection[str] | None = None
    ) -> None:
        if mode not in BITSANDBYTES_MODES:
            raise ConfigError(
                f"Expected a mode of bitsandbytes, got mode={mode!r}{nearest(str(mode), BITSANDBYTES_MODES)}.",
                fix=f"use {', '.join(BITSANDBYTES_MODES)}.",
            )
        dtype = dtype or torch.bfloat16
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ConfigError(
                f"Expected dtype float16, bfloat16 or float32, got {dtype}.", fix="pass one of torch's three dtypes."
            )
        if importlib.util.find_spec(_BITSANDBYTES) is None:
            raise MissingDependency(_BITSANDBYTES, needed_for="BitsandbytesPrecision", extra="qlora")
        super().__init__(dtype, torch.float32)
        self.precision = mode
        self.ignore_modules = frozenset([ignore_modules] if isinstance(ignore_modules, str) else ignore_modules or ())

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Replace linear layers in place, cast the rest, and return the module; a second call changes nothing.

        Raises:
            ModuleError: The module has no linear layer to replace, or is one itself.
            ConfigError: Ranks have other weights: each would scale the packed weights of rank 0 by its scales.
        """
        bnb = import_bitsandbytes()
        kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
        if any(isinstance(one, kinds) for one in module.modules()):
            return module
        warn_of_unknown(self.ignore_modules, module)
        found = {
            name: one
            for name, one in module.named_modules()
            if type(one) is nn.Linear and not any(f"{name}.".startswith(f"{left}.") for left in self.ignore_modules)
        }
        if not found or "" in found:
            raise ModuleError(
                f"Expected a module with linear layers to quantize, got {type(module).__name__} "
                f"{'with none' if not found else 'itself'}"
                f"{f' outside of ignore_modules={sorted(self.ignore_modules)}' if self.ignore_modules else ''}.",
                fix="use another precision, or put the layer into a module.",
            )
        shared = _shared_weights(module, found)
        if shared:
            raise ModuleError(
                f"Expected linear layers with weights of their own, got {', '.join(shared)}, tied to other modules.",
                fix=f"pass ignore_modules={shared!r}.",
            )
        _compare_ranks(found)
        with kept_buffers(module, self.keep_buffers):
            module.to(self._dtype)
        for name, linear in found.items():
            module.set_submodule(name, self._layer_of(linear))
        return module

    def _layer_of(self, linear: nn.Linear) -> nn.Module:
        bnb = import_bitsandbytes()
        size: dict[str, Any] = {"bias": linear.bias is not None, "device": "meta"}
        layer: Any
        weight = linear.weight.data
        if self.precision.startswith("int8"):
            keeps = self.precision == "int8-training"
            layer = importlib.import_module(".int8_linear", __package__).Int8Linear(
                linear.in_features, linear.out_features, has_fp16_weights=keeps, threshold=6.0, **size
            )
            layer.weight = bnb.nn.Int8Params(
                weight, requires_grad=keeps and linear.weight.requires_grad, has_fp16_weights=keeps
            )
        else:
            kind, _, doubly = self.precision.partition("-")
            options = {"quant_type": kind, "compress_statistics": bool(doubly)}
            layer = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, compute_dtype=self._dtype, **options, **size
            )
            layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=layer, **options)
            layer.register_load_state_dict_pre_hook(_read_4bit)
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                # It would pack the weights again in the first evaluation, with scales rounded to bfloat16.
                layer.support_avx512bf16_for_cpu = False
        layer.bias = linear.bias
        layer.train(linear.training)
        return layer.to(weight.device)  # type: ignore[no-any-return]  # it packs the weights


def _shared_weights(module: nn.Module, found: dict[str, nn.Linear]) -> list[str]:
    """Return the names of layers whose weight belongs to another module, too."""
    owners: dict[int, int] = {}
    for one in module.modules():
        for parameter in one._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + (parameter is not None)
    return [name for name, linear in found.items() if owners[id(linear.weight)] > 1]


def _compare_ranks(found: dict[str, nn.Linear]) -> None:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    mine = {name: float(one.weight.detach().double().sum()) for name, one in found.items()}
    everywhere: list[dict[str, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    other = next((rank for rank, theirs in enumerate(everywhere) if theirs != everywhere[0]), None)
    if other is not None:
        raise ConfigError(
            f"Expected the same weights on all ranks before they are quantized, got other ones on rank {other}.",
            fix="call seed_everything before the model is built, or load the weights on all ranks.",
        )


def _read_4bit(module: Any, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Take the packed weight of a state dict with its scales, or quantize a weight that is not packed."""
    name = f"{prefix}weight"
    weight = state_dict.get(name)
    if not isinstance(weight, Tensor):
        return  # strict loading reports it
    scales = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(f"{name}.")}
    kind, device = type(module.weight), module.weight.device
    if scales:
        short = {key.removeprefix(prefix): value for key, value in scales.items()}
        module.weight = kind.from_prequantized(weight.to(device), short, requires_grad=False, device=device)
        module.weight.module = module
        module.quant_state = module.weight.quant_state
    elif weight.is_floating_point():
        old = module.weight
        options = {"quant_type": old.quant_type, "compress_statistics": old.compress_statistics}
        module.weight = kind(weight.detach().clone(), requires_grad=False, module=module, **options).to(device)
    state_dict[name] = module.weight.data


def import_bitsandbytes() -> Any:
    """Return the module bitsandbytes, without its kernel from the hub; None if it is not installed.

    Version 0.50 downloads that kernel, which is code, on processors with AVX512-BF16 when it is imported beside the
    package kernels; without that package, it warns that it could not.
    """
    if _BITSANDBYTES not in sys.modules and importlib.util.find_spec(_BITSANDBYTES) is not None:
        with _without_kernels():
            importlib.import_module(_BITSANDBYTES)
    return sys.modules.get(_BITSANDBYTES)


@contextmanager
def _without_kernels() -> Iterator[None]:
    logger = logging.getLogger(f"{_BITSANDBYTES}.backends.cpu.ops")
    level = logger.level
    had_it, before = _KERNELS in sys.modules, sys.modules.get(_KERNELS)
    sys.modules[_KERNELS] = None  # type: ignore[assignment]  # an import of it is refused
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        del sys.modules[_KERNELS]
        if had_it:
            sys.modules[_KERNELS] = before  # type: ignore[assignment]
