"""Folders that LitGPT writes: their configuration and weights as transformers names them.

LitGPT describes every model by one class of settings, so that a model's family follows from these and not from its
name. A setting that the family of transformers does not have must have the value that changes nothing.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import ConfigError, MissingDependency
from ...yaml_file import read

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Any in this file: values of YAML and JSON, and arguments of transformers.

CONFIG, WEIGHTS = "model_config.yaml", "lit_model.pth"
FAMILIES = ("GPT-NeoX", "Llama", "Mistral", "Qwen 2", "Qwen 3", "Gemma")
_WEIGHTS_OF_TRANSFORMERS = ("*.safetensors", "pytorch_model*.bin")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Defaults of LitGPT, which files written by earlier versions leave out; None means that there is no such setting.
_DEFAULTS: Mapping[str, Any] = {
    "block_size": 4096, "n_layer": 16, "n_embd": 4096, "vocab_size": 50254, "padding_multiple": 512, "n_head": 32,
    "norm_class_name": "LayerNorm", "norm_eps": 1e-5, "norm_qk": False, "norm_qk_type": "default",
    "post_attention_norm": False, "post_mlp_norm": False, "parallel_residual": True, "shared_attention_norm": False,
    "attn_bias": False, "rope_base": 10000, "rotary_percentage": 0.25, "rope_condense_ratio": 1,
    "rope_interleave": False, "bias": True, "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "none", "n_expert": 0,
    "n_expert_per_token": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "scale_embeddings": False,
    "lm_head_bias": False, "norm_1": True, "norm_2": True,
}  # fmt: skip
_COUNTS = ("block_size", "n_layer", "n_embd", "vocab_size", "padding_multiple", "n_head")
_DERIVED = ("padded_vocab_size", "head_size", "n_query_groups", "intermediate_size")
_NUMBERS = ("norm_eps", "rope_base", "rotary_percentage", "rope_condense_ratio")
# Settings that say nothing about the computation, or nothing without another one that is looked at.
_FREE = {
    "name", "hf_config", "vocab_size", "padding_multiple", "padded_vocab_size", "block_size", "n_layer", "n_embd",
    "n_head", "head_size", "n_query_groups", "intermediate_size", "norm_eps", "rope_base", "rope_condense_ratio",
    "rope_adjustments", "sliding_window_indices", "rope_indices", "moe_intermediate_size", "mlp_class_name",
    "norm_class_name", "norm_qk_type",
}  # fmt: skip
# What else a family may set; all others must have the value of LitGPT's simplest model.
_NEUTRAL: Mapping[str, Any] = {
    **_DEFAULTS, "parallel_residual": False, "bias": False, "rotary_percentage": 1.0, "gelu_approximate": "none",
}  # fmt: skip
_SET_BY: Mapping[str, frozenset[str]] = {
    "gpt_neox": frozenset({"parallel_residual", "bias", "rotary_percentage", "gelu_approximate"}),
    "llama": frozenset({"bias", "gelu_approximate"}),
    "mistral": frozenset({"sliding_window_size", "gelu_approximate"}),
    "qwen2": frozenset({"attn_bias", "gelu_approximate"}),
    "qwen3": frozenset({"norm_qk", "gelu_approximate"}),
    "gemma": frozenset({"scale_embeddings", "gelu_approximate"}),
}

_OUTER: Mapping[str, str] = {
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
}
_INNER: Mapping[str, str] = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.proj": "self_attn.o_proj",
    "attn.norm_q": "self_attn.q_norm",
    "attn.norm_k": "self_attn.k_norm",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}
_OUTER_NEOX: Mapping[str, str] = {
    "transformer.wte": "gpt_neox.embed_in",
    "transformer.ln_f": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
}
_INNER_NEOX: Mapping[str, str] = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.proj": "attention.dense",
    "mlp.fc": "mlp.dense_h_to_4h",
    "mlp.proj": "mlp.dense_4h_to_h",
}


def config_file(path: Path) -> Path | None:
    """Return the configuration of a LitGPT folder, or the path if it is such a file; None for anything else.

    A folder that has weights for transformers beside LitGPT's, as downloads have, is left to transformers.
    """
    if path.is_file():
        return path if path.name == CONFIG else None
    if not (path / CONFIG).is_file():
        return None
    is_hugging_face = (path / "config.json").is_file()
    if is_hugging_face and any(True for pattern in _WEIGHTS_OF_TRANSFORMERS for _ in path.glob(pattern)):
        return None
    return path / CONFIG


def read_litgpt_config(file: Path) -> PretrainedConfig:
    """Return the configuration of transformers for a `model_config.yaml`, with the dtype of the weights beside it.

    The embedding is tied to the head if the file of weights has one tensor for both, as LitGPT trains them.

    Raises:
        ConfigError: The model is of no family in `FAMILIES`, or the file is damaged.
        MissingDependency: transformers is not installed.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingDependency("transformers", needed_for="a recipe", extra="recipes") from error
    values = _values(file)
    family = _family(values, file)
    arguments = {**_sizes(values, family), **_tokens(file.parent), "tie_word_embeddings": False}
    if (file.parent / WEIGHTS).is_file():
        stored = _load(file.parent / WEIGHTS)
        embedding, head = stored.get("transformer.wte.weight"), stored.get("lm_head.weight")
        if embedding is not None:
            arguments["dtype"] = embedding.dtype
            arguments["tie_word_embeddings"] = head is not None and head.data_ptr() == embedding.data_ptr()
    config: PretrainedConfig = AutoConfig.for_model(family, **arguments)
    return config


def read_litgpt_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a LitGPT folder by their names in transformers; they stay in the file until they are used.

    Raises:
        ConfigError: The file is damaged, holds more than tensors and plain values, or has unknown names.
    """
    values = _values(folder / CONFIG)
    family = _family(values, folder / CONFIG)
    outer, inner = (_OUTER_NEOX, _INNER_NEOX) if family == "gpt_neox" else (_OUTER, _INNER)
    found: dict[str, Tensor] = {}
    for name, value in _load(folder / WEIGHTS).items():
        module, _, kind = name.rpartition(".")
        in_block = re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", module)
        if in_block is None:
            found[f"{_renamed(name, module, outer)}.{kind}"] = value
            continue
        number, part = in_block.groups()
        block = f"gpt_neox.layers.{number}" if family == "gpt_neox" else f"model.layers.{number}"
        if part in ("attn.qkv", "attn.attn") and kind in ("weight", "bias"):
            projections = _projections(value, values, is_grouped=part == "attn.attn")
            if family == "gpt_neox":
                found[f"{block}.attention.query_key_value.{kind}"] = _by_head(projections, values)
            else:
                names = (f"{block}.self_attn.{one}_proj.{kind}" for one in "qkv")
                found.update(zip(names, projections, strict=True))
        else:
            found[f"{block}.{_renamed(name, part, inner)}.{kind}"] = value
    return found


def _renamed(name: str, part: str, names: Mapping[str, str]) -> str:
    if part not in names:
        is_adapted = ".lora_" in name or ".linear." in name
        raise ConfigError(
            f"model: Expected the weights of a LitGPT model without adapters, got {name}.",
            fix="merge adapters with `litgpt merge_lora`." if is_adapted else "write the folder again with LitGPT.",
        )
    return names[part]


def _values(file: Path) -> dict[str, Any]:
    """Return the settings of a model, with those that follow from others as LitGPT computes them."""
    values = {**_DEFAULTS, **read(file)}
    wrong = [name for name in _COUNTS if not _is_count(values[name])]
    wrong += [name for name in _DERIVED if values.get(name) and not _is_count(values[name])]
    wrong += [name for name in _NUMBERS if type(values[name]) not in (int, float)]
    wrong += [
        name
        for name, kind in (("rope_adjustments", dict), ("sliding_window_indices", list))
        if values.get(name) is not None and not isinstance(values[name], kind)
    ]
    if wrong:
        raise ConfigError(
            f"model: Expected the settings of a LitGPT model, got {', '.join(f'{n}={values[n]!r}' for n in wrong)} in "
            f"{file}.",
            fix="copy or write the folder again.",
        )
    multiple = values["padding_multiple"]
    values["padded_vocab_size"] = values.get("padded_vocab_size") or -(-values["vocab_size"] // multiple) * multiple
    values["head_size"] = values.get("head_size") or values["n_embd"] // values["n_head"]
    values["n_query_groups"] = values.get("n_query_groups") or values["n_head"]
    values["intermediate_size"] = values.get("intermediate_size") or 4 * values["n_embd"]
    return values


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _family(values: Mapping[str, Any], file: Path) -> str:
    """Return the model type of transformers that computes the same.

    Raises:
        ConfigError: There is none; names the settings that differ from the nearest one.
    """
    mlp, norm = values["mlp_class_name"], values["norm_class_name"]
    is_gemma = "Gemma" in str(values.get("name"))  # by which LitGPT adds one to the weights of norms
    if mlp == "GptNeoxMLP":
        family, expected = "gpt_neox", {"norm_class_name": "LayerNorm", "bias": True}
    elif mlp == "GemmaMLP" and is_gemma:
        family, expected = "gemma", {"norm_class_name": "RMSNorm", "scale_embeddings": True}
    elif mlp == "LLaMAMLP" and not is_gemma:
        qwen = "qwen3" if values["norm_qk"] else "qwen2" if values["attn_bias"] and not values["bias"] else None
        family = qwen or ("mistral" if values.get("sliding_window_size") else "llama")
        expected = {"norm_class_name": "RMSNorm"}
    else:
        raise _unsupported(values, file, [f"mlp_class_name={mlp}"])
    if "OLMo" in str(values.get("name")) and norm == "LayerNorm":  # which LitGPT gives no weights
        expected = {**expected, "norm_class_name": "one with weights"}
    problems = [f"{name}={values[name]}" for name, value in expected.items() if values[name] != value]
    problems += [
        f"{name}={value}"
        for name, value in values.items()
        if name not in _FREE | _SET_BY[family] and (value or None) != (_NEUTRAL.get(name) or None)
    ]
    problems += list(_unusual(values, family))
    if problems:
        raise _unsupported(values, file, problems)
    return family


def _unusual(values: Mapping[str, Any], family: str) -> Iterator[str]:
    """Find values that the family of transformers cannot express."""
    if family in ("gpt_neox", "qwen2") and values["head_size"] * values["n_head"] != values["n_embd"]:
        yield f"head_size={values['head_size']}"
    if family == "gpt_neox" and values["n_query_groups"] != values["n_head"]:
        yield f"n_query_groups={values['n_query_groups']}"
    if family == "qwen3" and values["norm_qk_type"] != "default":
        yield f"norm_qk_type={values['norm_qk_type']}"
    if family == "mistral" and not all((values.get("sliding_window_indices") or [1])[: values["n_layer"]]):
        yield f"sliding_window_indices={values['sliding_window_indices']}"
    adjustments = set(values.get("rope_adjustments") or ())
    if adjustments not in (
        set(),
        {"factor"},
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"},
    ):
        yield f"rope_adjustments={values['rope_adjustments']}"
    elif adjustments and values["rope_condense_ratio"] != 1:
        yield f"rope_condense_ratio={values['rope_condense_ratio']}"


def _sizes(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the arguments of the configuration of a family."""
    found = {
        "vocab_size": values["padded_vocab_size"],
        "hidden_size": values["n_embd"],
        "num_hidden_layers": values["n_layer"],
        "num_attention_heads": values["n_head"],
        "intermediate_size": values["intermediate_size"],
        "max_position_embeddings": values["block_size"],
        "rope_parameters": _rope(values),
    }
    gelu = "gelu_pytorch_tanh" if values["gelu_approximate"] == "tanh" else "gelu"
    if family == "gpt_neox":
        found["rope_parameters"]["partial_rotary_factor"] = values["rotary_percentage"]
        return {
            **found,
            "layer_norm_eps": values["norm_eps"],
            "use_parallel_residual": values["parallel_residual"],
            "hidden_act": gelu,
        }
    found |= {"rms_norm_eps": values["norm_eps"], "num_key_value_heads": values["n_query_groups"]}
    if family != "qwen2":
        found["head_dim"] = values["head_size"]
    if family == "llama":
        found |= {"attention_bias": values["bias"], "mlp_bias": values["bias"]}
    elif family == "mistral":
        found["sliding_window"] = values["sliding_window_size"]
    elif family == "gemma":
        found["hidden_act"] = gelu
    return found


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    adjustments = dict(values.get("rope_adjustments") or {})
    factor = adjustments.get("factor", values["rope_condense_ratio"])
    found: dict[str, Any] = {"rope_theta": float(values["rope_base"]), "rope_type": "default"}
    if "original_max_seq_len" in adjustments:
        length = adjustments.pop("original_max_seq_len")
        return {**found, "rope_type": "llama3", "original_max_position_embeddings": length, **adjustments}
    return found if factor == 1 else {**found, "rope_type": "linear", "factor": float(factor)}


def _tokens(folder: Path) -> dict[str, Any]:
    """Return the special tokens of a `config.json` that LitGPT copied: its own file has none."""
    try:
        stored = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        stored = {}
    return {name: stored.get(name) if isinstance(stored, dict) else None for name in _TOKENS}


def _load(file: Path) -> dict[str, Tensor]:
    try:
        # weights_only: a pickle from an unknown source must not run code. mmap: values are read when they are used.
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"model: Expected tensors and plain values in {file}, got other objects, which are not loaded; `litgpt "
            "convert_pretrained_checkpoint` writes the weights of a pretraining alone.",
            fix="write the weights alone, and pass that folder.",
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        first = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ConfigError(
            f"model: Expected the weights of LitGPT, got {file}, which cannot be read ({first}).",
            fix="copy or write the folder again.",
        ) from error
    content = content.get("model", content) if isinstance(content, dict) else {}
    named = content.items() if isinstance(content, Mapping) else ()
    found = {str(name).replace("_orig_mod.", ""): value for name, value in named if isinstance(value, Tensor)}
    if "transformer.wte.weight" not in found:
        raise ConfigError(
            f"model: Expected the weights of LitGPT in {file}, got no transformer.wte.weight.",
            fix=f"pass the folder of a checkpoint that LitGPT wrote, with {WEIGHTS}.",
        )
    return found


def _projections(value: Tensor, values: Mapping[str, Any], *, is_grouped: bool) -> tuple[Tensor, ...]:
    """Return queries, keys and values of a fused projection.

    Args:
        value: Weight or bias; its rows are all queries, all keys, all values; or with `is_grouped`, as earlier versions
            of LitGPT wrote them, the queries, the key and the value of each group.
        values: The model's settings.
        is_grouped: How rows are ordered.
    """
    size, groups = values["head_size"], values["n_query_groups"]
    queries = values["n_head"] * size
    rows = len(value) if value.ndim else 0
    if rows != queries + 2 * groups * size:
        raise ConfigError(
            f"model: Expected {queries + 2 * groups * size} rows of queries, keys and values, as {CONFIG} says, got "
            f"{rows} in {WEIGHTS}.",
            fix="copy both files from one LitGPT folder.",
        )
    if not is_grouped:
        return torch.split(value, [queries, groups * size, groups * size])
    by_group = torch.split(value.unflatten(0, (groups, -1, size)), [values["n_head"] // groups, 1, 1], dim=1)
    return tuple(one.flatten(0, 2) for one in by_group)


def _by_head(projections: tuple[Tensor, ...], values: Mapping[str, Any]) -> Tensor:
    """Return the rows of GPT-NeoX's fused projection: query, key and value of each head."""
    heads = [one.unflatten(0, (values["n_head"], values["head_size"])) for one in projections]
    return torch.stack(heads, dim=1).flatten(0, 2)


def _unsupported(values: Mapping[str, Any], file: Path, problems: list[str]) -> ConfigError:
    name = values.get("name") or "a model without a name"
    return ConfigError(
        f"model: Expected a LitGPT model that computes as {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]} of transformers "
        f"do, got {name} with {', '.join(problems)} in {file}.",
        fix="convert it with `litgpt convert_from_litgpt`, and pass the Hugging Face folder.",
    )
