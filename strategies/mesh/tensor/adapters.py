"""Adapters of peft in a plan: the styles of LoRA's two small layers follow from that of the layer beside them."""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle

from ....errors import Clauses
from .styles import Colwise, Embedding, PackedColwise, Rowwise

_WITHIN = re.compile(r"\.(base_layer|lora_[AB]\.[^.]+)$")
_OF_LORA = {"base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}


def called_as(name: str) -> str:
    """Return the name under which a model calls a layer, where that is in a layer of peft."""
    return _WITHIN.sub("", name)


def base_of(module: nn.Module) -> nn.Module:
    """Return the layer that a layer of peft wraps; any other module as it is."""
    base = getattr(module, "base_layer", None)
    is_of_peft = any(one.__module__.startswith("peft.") for one in type(module).__mro__)
    return base if is_of_peft and isinstance(base, nn.Module) else module


def expand_adapters(module: nn.Module, styles: dict[str, ParallelStyle]) -> Clauses:
    """Apply the style of each layer that peft has wrapped to the layer within, and to its LoRA. Return what cannot be.

    LoRA adds `lora_B(lora_A(x))` to the output of a layer. Beside outputs in parts, `lora_B` is split by output
    features; beside inputs in parts, `lora_A` by input features. The other one of the two is full.

    Args:
        module: The user's module.
        styles: By name; changed.
    """
    problems = Clauses()
    for name, style in list(styles.items()):
        wrapper = module.get_submodule(name)
        base = base_of(wrapper)
        if base is wrapper:
            continue
        del styles[name]
        styles[f"{name}.base_layer"] = style
        others = {key.partition(".")[0] for key, _ in wrapper.named_parameters()} - _OF_LORA
        is_split = isinstance(style, Colwise | PackedColwise | Rowwise)
        if others or not (isinstance(style, Embedding) or (is_split and not isinstance(base, nn.Embedding))):
            what = f"{name} is a layer of peft with {', '.join(sorted(others)) or type(style).__name__}"
            problems.add(f"{what}, which cannot be split", "use LoRA without DoRA, or leave the layer out")
        elif is_split:
            side = "lora_A" if isinstance(style, Rowwise) else "lora_B"
            styles.update({f"{name}.{side}.{adapter}": style for adapter in getattr(wrapper, side, ())})
    return problems
