"""`write_model_card`: README.md of an exported model, with what it was trained on and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from omegaconf import OmegaConf

# Any in this file: settings from YAML.

# Settings that do not describe the model.
_LEFT_OUT = (
    "out", "cache", "num_workers", "resume", "trust_remote_code", "allow_download", "save_every", "verify_packing",
)  # fmt: skip
# Settings whose values are paths: only their last part is published.
_PATHS = ("model", "tokenizer", "data", "val_data")
_ADAPTER_CODE = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
base = AutoModelForCausalLM.from_pretrained({base!r}, dtype="auto")
model = PeftModel.from_pretrained(base, {name!r})
"""
_MODEL_CODE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({name!r}, dtype="auto")
"""


def write_model_card(
    folder: Path, *, name: str, is_adapter: bool, base: str | None, settings: Mapping[str, Any], facts: Sequence[str]
) -> None:
    """Write README.md.

    Args:
        folder: Folder of the exported model.
        name: Of the model.
        is_adapter: Whether it is an adapter for its base.
        base: Name of the model that it was trained from; None if from scratch.
        settings: Of the training.
        facts: Sentences on the result.
    """
    head: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["loopwright", *(["lora"] if is_adapter else [])],
    }
    if base:
        head["base_model"] = base
    kind = f"Adapter for {base}" if is_adapter else (f"Trained from {base}" if base else "Trained from random weights")
    code = (_ADAPTER_CODE if is_adapter else _MODEL_CODE).format(name=name, base=base)
    shown = OmegaConf.to_yaml(OmegaConf.create(public_settings(settings))) if settings else ""
    parts = [
        f"---\n{OmegaConf.to_yaml(OmegaConf.create(head))}---",
        f"# {name}",
        f"{kind}, with Loopwright. The weights are safetensors; the tokenizer has the chat template of the training.",
        *([f"- {fact}" for fact in facts]),
        f"## Usage\n\n```python\n{code}```",
        *([f"## Settings\n\n```yaml\n{shown}```"] if shown else []),
    ]
    (folder / "README.md").write_text(_joined(parts))


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that show how a model was trained, without folders of the machine."""
    return {
        name: _last_part(value) if name in _PATHS else value
        for name, value in settings.items()
        if value not in (None, {}) and name not in _LEFT_OUT
    }


def public_name(path: str | PurePath) -> str:
    """Return the last part of a path; of the result of a run, `RUN/model`, the name of the run."""
    path = PurePath(path)
    is_result = path.name == "model" and path.parent.name
    return path.parent.name if is_result else path.name or str(path)


def _last_part(value: Any) -> Any:
    if isinstance(value, str | PurePath):
        return public_name(value)
    if isinstance(value, Mapping):
        return {key: _last_part(one) if key == "path" else one for key, one in value.items()}
    return [_last_part(one) for one in value] if isinstance(value, Sequence) else value


def _joined(parts: Sequence[str]) -> str:
    """Return paragraphs; items of a list follow each other."""
    text = ""
    for before, part in zip(["", *parts], parts, strict=False):
        is_list = before.startswith("- ") and part.startswith("- ")
        text += ("\n" if is_list else "\n\n" if before else "") + part
    return text + "\n"
