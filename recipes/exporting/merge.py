"""Merging an adapter into its base, and comparing the models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ..inference.model import num_embeddings

# Any in this file: models of transformers and peft.

_ROWS, _LENGTH = 2, 32


@torch.no_grad()
def merge_adapter(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Merge the adapter of a PeftModel into its base, tensor by tensor, and return the base.

    Each weight is merged in float32 at least and rounded once. Weights that an adapted layer shares with another one,
    such as a tied output layer, are separated first.

    Args:
        model: PeftModel on an unquantized base; it is not usable afterwards.
        dtype: Dtype of the merged weights; None for that of the base.

    Raises:
        ConfigError: The base is quantized, or a merged weight is not finite.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if getattr(model.get_base_model(), "is_quantized", False):
        raise ConfigError(
            "merge: Expected an unquantized base, got a quantized one.", fix="open the base without quantize."
        )
    layers: list[tuple[str, Any]] = [
        (name, one) for name, one in model.named_modules() if isinstance(one, BaseTunerLayer)
    ]
    for name, layer in layers:
        base = layer.get_base_layer()
        if _separate(model, base):
            model.get_base_model().config.tie_word_embeddings = False
        stored = _dtype_of(base)
        layer.to(torch.promote_types(stored, torch.float32))
        try:
            layer.merge(safe_merge=True)
        except ValueError as error:
            raise ConfigError(
                f"merge: Expected finite weights, got others in {name} ({error}).",
                fix="train again with a smaller learning rate, or export an earlier checkpoint.",
            ) from error
        base.to(dtype or stored)
    return model.unload()


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters in place; buffers keep their dtype, as those of rotary embeddings are float32 in any model."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


@dataclass(frozen=True)
class ModelComparison:
    """How two models differ in their last hidden states, on the same tokens.

    Attributes:
        difference: Largest absolute difference.
        scale: Largest absolute value.
    """

    difference: float
    scale: float

    @property
    def relative(self) -> float:
        """Difference divided by scale."""
        return self.difference / self.scale if self.scale else math.inf

    def is_rounding(self, dtype: torch.dtype) -> bool:
        """Return whether it is as small as rounding errors of a dtype in a model of many layers."""
        return math.isfinite(self.difference) and self.relative <= 256 * torch.finfo(dtype).eps


def compare_hidden(first: Tensor, second: Tensor) -> ModelComparison:
    """Return how two results of `last_hidden` differ; a shape or a NaN that differs is an infinite difference."""
    if first.shape != second.shape:
        return ModelComparison(math.inf, 1.0)
    difference = float((first.double() - second.double()).abs().max())
    return ModelComparison(math.inf if math.isnan(difference) else difference, float(second.double().abs().max()))


@torch.inference_mode()
def has_adapted_head(model: nn.Module) -> bool:
    """Return whether the output layer of a PeftModel has an adapter, which hidden states do not show."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base: Any = model.get_base_model()  # type: ignore[operator]
    return isinstance(base.get_output_embeddings(), BaseTunerLayer)


@torch.no_grad()
def last_hidden(model: Any, ids: Tensor, *, with_logits: bool = False) -> Tensor:
    """Return the last hidden states, on the CPU.

    Logits alone would show less: a normalization before them may hide what differs.

    Args:
        model: The model.
        ids: Tokens.
        with_logits: Whether logits follow the hidden states of each token.
    """
    out = model(input_ids=ids.to(next(iter(model.parameters())).device), use_cache=False, output_hidden_states=True)
    hidden: Tensor = out.hidden_states[-1]
    return (torch.cat([hidden, out.logits.to(hidden)], dim=-1) if with_logits else hidden).cpu()


def without_adapter(model: Any, ids: Tensor, *, with_logits: bool = False) -> Tensor:
    """Return the last hidden states of an adapter's base."""
    with model.disable_adapter():
        return last_hidden(model, ids, with_logits=with_logits)


def sample_ids(model: Any) -> Tensor:
    """Return tokens to compare models on, drawn by a fixed seed: shape (2, 32), or what the model has positions for."""
    config = model.config.get_text_config()
    length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    draw = torch.Generator().manual_seed(0)
    return torch.randint(num_embeddings(model), (_ROWS, length), generator=draw)


def _separate(model: nn.Module, base: nn.Module) -> bool:
    """Copy the weights of a layer that other modules use, too; return whether there were any."""
    shared = False
    for name, parameter in list(base.named_parameters(recurse=False)):
        owners = [module for module in _owners(model, parameter) if module is not base]
        if owners:
            setattr(base, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            shared = True
    return shared


def _owners(model: nn.Module, parameter: nn.Parameter) -> Iterator[nn.Module]:
    for module in model.modules():
        if any(one is parameter for one in module._parameters.values()):
            yield module


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
