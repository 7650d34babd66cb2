"""LoRA adapters of peft: their configuration, their place in a model, and how tensor parallelism splits them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ...errors import ConfigError
from .imports import import_peft
from .settings import LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Any in this file: peft's configuration.

# Styles of the layers in an adapted layer, by the style that the layer itself has in the plan of transformers. The
# small matrices follow the large one: the first takes its input, the second gives its output.
_STYLES: Mapping[str, Mapping[str, str]] = {
    "colwise": {"base_layer": "colwise", "lora_B.default": "colwise"},
    "rowwise": {"base_layer": "rowwise", "lora_A.default": "rowwise"},
}


def adapter_config(lora: LoraSettings) -> Any:
    """Return peft's configuration of the adapters.

    Raises:
        MissingDependency: peft is not installed.
    """
    return import_peft("LoRA").LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        use_dora=lora.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )


def add_adapters(model: PreTrainedModel, lora: LoraSettings, *, has_values: bool = True) -> nn.Module:
    """Return the model with adapters, which alone are trained: a PeftModel.

    Args:
        model: The model, which is changed in place.
        lora: Settings of the adapters.
        has_values: Whether adapters get initial values; False leaves them on the meta device.

    Raises:
        ConfigError: No layer has the names in `targets`, or one is not linear.
        MissingDependency: peft is not installed.
    """
    config = adapter_config(lora)
    from peft import get_peft_model

    try:
        with warnings.catch_warnings():
            # peft 0.21 asks for it by a name that transformers 5 has given up.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.* is deprecated")
            # Of a plan for experts that peft makes itself; and of GPT-2, whose layers it then treats rightly.
            warnings.filterwarnings("ignore", message=".*_pattern keys did not match any targeted module")
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            adapted: nn.Module = get_peft_model(model, config, low_cpu_mem_usage=not has_values)
            return adapted
    except ValueError as error:
        first = str(error).partition(". ")[0].rstrip(".")
        raise ConfigError(
            f"lora.targets: Expected names of linear layers, got {lora.targets!r} ({first}).",
            fix="name layers of the model, such as [q_proj, v_proj], or leave out lora.targets.",
        ) from error


def adapter_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the tensor plan of a model with adapters: patterns of its modules and their styles.

    Args:
        model: The model of transformers, with adapters in it.
        plan: The plan of transformers for the model without adapters.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {name for name, one in model.named_modules() if isinstance(one, BaseTunerLayer)}
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        matching = [name for name in adapted if _matches(pattern, name)]
        if not matching:
            found[pattern] = style
        for name in matching:
            found |= {f"{name}.{part}": inner for part, inner in _STYLES[style].items()}
    return found


def _matches(pattern: str, name: str) -> bool:
    ours, theirs = pattern.split("."), name.split(".")
    return len(ours) == len(theirs) and all(one in ("*", other) for one, other in zip(ours, theirs, strict=True))
