"""`TrainingFolder`: the folder of a run, what is in it, and whether given settings continue the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import ConfigError
from ..files import replace_file
from ..yaml_file import read, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Any in this file: settings are YAML values.

_FIRST_LINE = "# A run of `loopwright recipe`, with all of its settings. The same command continues it.\n"
# Settings that may change in a resumed run: the training is the same, up to rounding.
FREE = {
    "out", "cache", "strategy", "devices", "micro_batch", "num_workers", "val_data", "val_every", "save_every",
    "resume", "trust_remote_code", "allow_download", "gradient_checkpointing", "chunk_tokens", "verify_packing",
}  # fmt: skip
FREE_OF_TRAINER = {
    "accelerator", "num_nodes", "logger", "profiler", "callbacks", "plugins", "fast_dev_run", "max_time",
    "enable_progress_bar", "enable_model_summary", "enable_checkpointing", "log_every_n_steps", "default_root_dir",
    "limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps", "deterministic",
    "benchmark", "detect_anomaly", "inference_mode", "barebones", "compile",
}  # fmt: skip


@dataclass(frozen=True)
class TrainingFolder:
    """The folder of a run.

    Args:
        path: The folder.
    """

    path: Path

    @property
    def recipe(self) -> Path:
        """File with the command and its settings."""
        return self.path / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def cache(self) -> Path:
        """Folder of the tokenized data."""
        return self.path / "cache"

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return self.path / "tokenizer"

    @property
    def model(self) -> Path:
        """Folder of the trained model: complete if it is there."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """File with the report of the last training, as JSON: not there while one is under way."""
        return self.path / "report.json"

    def read(self) -> dict[str, Any] | None:
        """Return the content of `recipe`; None without a run.

        Raises:
            ConfigError: It cannot be read.
        """
        return read(self.recipe) if self.recipe.is_file() else None

    def problems(self) -> Iterator[str]:
        """Yield the reasons why this folder is neither new nor that of a run that can be continued."""
        if self.path.exists() and not self.path.is_dir():
            yield f"out: Expected a folder, got the file {self.path}."
        elif self.path.is_dir() and not self.recipe.is_file():
            others = sorted(one.name for one in self.path.iterdir() if one != self.cache)
            if others:
                yield (
                    f"out: Expected a new folder, or that of a run (with {self.recipe.name}), got {self.path} with "
                    f"{', '.join(others[:3])}{' and others' if len(others) > 3 else ''}."
                )

    def changes(self, command: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
        """Return what differs from the run in this folder, as problems; nothing if there is none.

        Args:
            command: "finetune" or "pretrain".
            settings: As `plain_settings` returns them.
            defaults: Of settings that the run may not have known.
        """
        try:
            stored = self.read()
        except ConfigError as error:
            return [f"out: {error.what}"]
        if stored is None:
            return []
        if stored.get("command") != command:
            return [f"out: Expected a run of {command}, got {self.path}, a run of {stored.get('command')}."]
        before = {**defaults, **(stored.get("settings") or {})}
        if settings["global_batch"] in ("auto", stored.get("global_batch")):
            before["global_batch"] = settings["global_batch"]
        return [
            f"{name}: Expected {_shown(old)}, as in the run in {self.path}, got {_shown(new)}."
            for name, old, new in changed_settings(before, settings)
        ]

    def write(self, command: str, settings: Mapping[str, Any], **facts: object) -> None:
        """Write `recipe`, at once or not at all.

        Args:
            command: "finetune" or "pretrain".
            settings: As `plain_settings` returns them.
            facts: What followed from them.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"command": command, "loopwright": __version__, **facts, "settings": dict(settings)}
        replace_file(self.recipe, _FIRST_LINE + write(content))

    def save_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Copy the tokenizer with its chat template, unless it is there."""
        if self.tokenizer.is_dir():
            return
        temporary = self.tokenizer.with_name(f"tokenizer.{os.getpid()}.part")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()  # a new one: no link is followed
        tokenizer.save_pretrained(str(temporary))
        temporary.rename(self.tokenizer)


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the settings that change a training: name, old and new value.

    Args:
        before: Of the run.
        after: Those that are given now.
    """
    free = FREE - ({"micro_batch"} if after.get("group_by_length") else set())
    old, new = _flat(before, free), _flat(after, free)
    missing = object()
    return [
        (name, old.get(name), new.get(name))
        for name in dict.fromkeys([*new, *old])
        if old.get(name, missing) != new.get(name, missing) and (old.get(name), new.get(name)) != (None, None)
    ]


def _flat(settings: Mapping[str, Any], free: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name in free:
            continue
        if name in ("lora", "trainer") and isinstance(value, Mapping):
            left_out = FREE_OF_TRAINER if name == "trainer" else set[str]()
            found.update({f"{name}.{key}": one for key, one in value.items() if key not in left_out})
        else:
            found[name] = value
    return found


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value) if not isinstance(value, str) else value
