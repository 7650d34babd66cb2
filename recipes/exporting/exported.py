"""Files of an exported model: weights, tokenizer, model card; and loading them as users do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ..inference.model import InferenceSettings, OpenedModel, open_base
from ..inference.prompts import end_tokens
from ..model.fingerprint import fingerprint_of_folder
from ..model.imports import import_peft
from ..model.litgpt import config_file
from .location import RECIPE_JSON, ModelLocation
from .merge import last_hidden
from .model_card import public_name, write_model_card

# Any in this file: models of transformers and peft.

_KEPT = ("command", "kind", "train_on", "prompt_style", "max_length", "packing")  # what evaluation and prompts follow
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")


def write_weights(
    model: Any, opened: OpenedModel, folder: Path, *, kind: str, base: Path | None, max_shard_size: str
) -> None:
    """Write weights and configuration, as `save_pretrained` of transformers or peft does.

    Args:
        model: What is written.
        opened: Where it is from.
        folder: An empty folder.
        kind: "adapter", "merged" or "model".
        base: Base of an adapter.
        max_shard_size: Largest size of a file, such as "5GB".
    """
    if kind == "adapter":
        config = model.peft_config[model.active_adapter]
        config.base_model_name_or_path = str(base.absolute() if base is not None and base.exists() else base)
        model.save_pretrained(str(folder), save_embedding_layers=False)
        return
    model.config.use_cache = True  # training turned it off
    generation = model.generation_config
    stops = end_tokens(model, opened.tokenizer)
    if stops:
        generation.eos_token_id = stops if len(stops) > 1 else stops[0]
    if opened.tokenizer.pad_token_id is not None:
        generation.pad_token_id = opened.tokenizer.pad_token_id
    if not generation.do_sample:  # such values beside greedy search are refused by save_pretrained
        for name in _SAMPLING:
            setattr(generation, name, None)
    model.save_pretrained(str(folder), max_shard_size=max_shard_size)


def write_texts(
    opened: OpenedModel, folder: Path, *, kind: str, base: Path | None, name: Path, facts: Sequence[str]
) -> None:
    """Write the tokenizer with its chat template, recipe.json and the model card.

    Args:
        opened: The model.
        folder: Where its weights are.
        kind: "adapter", "merged" or "model".
        base: Base of an adapter, merged or not.
        name: Path that the exported model will have.
        facts: Sentences for the card.
    """
    location = opened.location
    opened.tokenizer.save_pretrained(str(folder))
    trained_from = base or _trained_from(location)
    recipe: dict[str, Any] = {
        "loopwright": __version__,
        "kind": kind,
        "base": public_name(trained_from) if trained_from is not None else None,
        "quantize": location.quantize,
        "settings": {key: location.trained[key] for key in _KEPT if location.trained.get(key) is not None},
    }
    if kind == "adapter" and base is not None and base.exists():
        recipe["fingerprint"] = location.recipe.get("fingerprint") or fingerprint_of_folder(base)
    (folder / RECIPE_JSON).write_text(json.dumps(recipe, indent=1))
    write_model_card(
        folder,
        name=public_name(name),
        is_adapter=kind == "adapter",
        base=recipe["base"],
        settings=location.trained,
        facts=facts,
    )


def reload_hidden(
    folder: Path,
    ids: Tensor,
    *,
    base: Path | None,
    settings: InferenceSettings,
    device: torch.device,
    like: torch.dtype,
    with_logits: bool = False,
) -> Tensor:
    """Load a folder with plain transformers, an adapter with plain peft, and return its last hidden states.

    Args:
        folder: Exported folder.
        ids: Tokens.
        base: Base of an adapter; None for a model.
        settings: What is permitted.
        device: Where it is computed.
        like: Dtype of the base's weights.
        with_logits: See `last_hidden`.
    """
    from transformers import AutoModelForCausalLM

    options = {"trust_remote_code": settings.trust_remote_code, "local_files_only": not settings.allow_download}
    if base is None:
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto", **options)
    else:
        if config_file(base) is None:
            model = AutoModelForCausalLM.from_pretrained(str(base), dtype=like, **options)
        else:
            model = open_base(base, replace(settings, dtype=str(like).removeprefix("torch.")))
        model = import_peft("adapters").PeftModel.from_pretrained(model, str(folder))
    return last_hidden(model.to(device).eval(), ids, with_logits=with_logits)


def dtype_of(model: Any, *, is_adapter: bool) -> str:
    """Return the name of the dtype of the weights that are exported."""
    chosen = (one for name, one in model.named_parameters() if not is_adapter or "lora_" in name)
    return str(next(one.dtype for one in chosen if one.is_floating_point())).removeprefix("torch.")


def _trained_from(location: ModelLocation) -> Path | None:
    """Return the model that was trained further; None if the initial values were random."""
    settings = location.model_settings
    found = location.recipe.get("base") if location.kind == "folder" else settings.get("model")
    return Path(str(found)) if found and not settings.get("from_scratch") else None
