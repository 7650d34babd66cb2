"""`find_model`: what a path holds (a model folder, an adapter, a run or a checkpoint), and what belongs to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import checkpoint as checkpoints
from ...checkpoint.formats import find_format
from ...errors import CheckpointError, ConfigError
from ...messages import warn
from ...yaml_file import read
from ..model.litgpt import config_file

# Any in this file: what JSON and YAML files and checkpoints hold.

ADAPTER_CONFIG = "adapter_config.json"
RECIPE_JSON = "recipe.json"  # beside exported weights: the base's fingerprint, and how prompts are written
RUN_FILE = "recipe.yaml"
_FIX = (
    "pass a folder with config.json and weights, a LitGPT folder, a folder with adapter_config.json, the folder of a "
    "run, or a checkpoint."
)


@dataclass(frozen=True)
class ModelLocation:
    """Where a model is, before anything large is read.

    Attributes:
        kind: "folder" (Hugging Face or LitGPT), "adapter" (peft), or "checkpoint".
        path: The folder or the checkpoint.
        tokenizer: Folder of the tokenizer.
        recipe: What recipe.json or the checkpoint records about the training; empty for folders of other programs.
        run: Folder of the run that it belongs to; None without one.
        settings: Of that run, as in recipe.yaml.
    """

    kind: str
    path: Path
    tokenizer: Path
    recipe: Mapping[str, Any] = field(default_factory=dict)
    run: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are those of an adapter, which needs its base."""
        return self.kind == "adapter" or bool(self.model_settings.get("lora"))

    @property
    def model_settings(self) -> Mapping[str, Any]:
        """Settings of the model that was trained, of a checkpoint."""
        return dict(self.recipe.get("model") or {}) if self.kind == "checkpoint" else {}

    @property
    def quantize(self) -> str | None:
        """The quantization of the base in training."""
        found = self.model_settings.get("quantize") or self.recipe.get("quantize")
        return str(found) if found else None

    @property
    def trained(self) -> Mapping[str, Any]:
        """Settings of the training by name, as far as they are known."""
        return {**self.settings, **dict(self.recipe.get("settings") or {})}

    def recorded_base(self) -> Path | None:
        """Return the base that an adapter was trained on, by its name; None if it does not name one."""
        if self.kind == "adapter":
            found = read_json(self.path / ADAPTER_CONFIG).get("base_model_name_or_path")
        else:
            found = self.model_settings.get("model")
        return Path(str(found)) if found else None


def find_model(path: str | Path, checkpoint: str | None = None, *, allow_download: bool = False) -> ModelLocation:
    """Return what a path holds.

    A run's `model/` is preferred to its checkpoints, unless `checkpoint` names one of these.

    Args:
        path: Hugging Face folder, LitGPT folder, adapter folder, folder of a run, or checkpoint.
        checkpoint: Of a run: "last", "best", or a file or folder in `checkpoints/`. None for its result.
        allow_download: Whether a path that does not exist may be the name of a model on the hub.

    Raises:
        ConfigError: It holds none of these.
        CheckpointError: The checkpoint is damaged.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if allow_download and not folder.is_absolute():
            return ModelLocation("folder", Path(path), Path(path))
        raise ConfigError(f"model: Expected an existing path, got {folder}, which does not exist.", fix=_FIX)
    if (folder / RUN_FILE).is_file():
        return _in_run(folder, checkpoint)
    if checkpoint is not None:
        raise ConfigError(
            f"checkpoint: Expected it only with the folder of a run, got {checkpoint!r} for {folder}.",
            fix="leave it out, or pass the folder of the run, which has recipe.yaml.",
        )
    return _folder(folder) or _checkpoint(folder, _run_of(folder))


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file.

    Raises:
        ConfigError: There is none.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Expected a readable {path}, got {error}.", fix="write or export the folder again."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"Expected a mapping in {path}, got {values!r}.", fix="write or export the folder again.")
    return values


def _folder(folder: Path, run: Path | None = None) -> ModelLocation | None:
    """Return a folder of a model or an adapter; None if it is something else."""
    if not folder.is_dir():
        return None
    kind = "adapter" if (folder / ADAPTER_CONFIG).is_file() else "folder"
    if kind == "folder" and config_file(folder) is None and not (folder / "config.json").is_file():
        return None
    recipe = read_json(folder / RECIPE_JSON) if (folder / RECIPE_JSON).is_file() else {}
    location = ModelLocation(kind, folder, folder, recipe, run, _run_settings(run))
    if _has_tokenizer(folder):
        return location
    other = [run / "tokenizer"] if run is not None else []
    base = location.recorded_base() if kind == "adapter" else None
    found = next((one for one in [*other, *([base] if base else [])] if _has_tokenizer(one)), folder)
    return ModelLocation(kind, folder, found, recipe, run, location.settings)


def _in_run(run: Path, checkpoint: str | None) -> ModelLocation:
    if checkpoint is None:
        return _folder(run / "model", run) or _checkpoint(_newest(run), run)
    folder = run / "checkpoints"
    named = [folder / checkpoint, folder / f"{checkpoint}.ckpt", Path(checkpoint).expanduser()]
    for path in [*named, *sorted(folder.glob(f"{checkpoint}*"))]:
        if path.exists():
            return _checkpoint(path, run)
    known = ", ".join(sorted(one.name for one in folder.glob("*"))) if folder.is_dir() else ""
    raise ConfigError(
        f"checkpoint: Expected one of {known or 'the checkpoints of a run'}, got {checkpoint!r} for {run}.",
        fix="pass the name of a file or folder in checkpoints/, or leave it out.",
    )


def _newest(run: Path) -> Path:
    folder = run / "checkpoints"
    found = [one for one in folder.glob("*") if one.is_file() or find_format(one)] if folder.is_dir() else []
    ordered = sorted(found, key=lambda one: one.stat().st_mtime_ns, reverse=True)
    newest = checkpoints.newest_valid(ordered, _warn_of_damage)
    if newest is None:
        raise ConfigError(
            f"model: Expected a run with model/ or a checkpoint, got neither in {run}.",
            fix="train until the first checkpoint, or pass another model.",
        )
    return newest


def _warn_of_damage(path: Path, error: CheckpointError) -> None:
    warn(f"{path} is damaged and skipped: {error.what}")


def _checkpoint(path: Path, run: Path | None) -> ModelLocation:
    if path.is_dir() and find_format(path) is None:
        raise ConfigError(
            f"model: Expected a folder with a model, an adapter, a run or a checkpoint, got {path}.", fix=_FIX
        )
    content = checkpoints.load(path, lazy=True, verify=False)
    recipe = content.get("recipe")
    recipe = recipe if isinstance(recipe, Mapping) else {}
    model = recipe.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("model"), str):
        raise ConfigError(
            f"model: Expected a checkpoint of a recipe, got {path}, which has no entry 'recipe'.",
            fix="pass a checkpoint that `loopwright recipe` wrote.",
        )
    settings = _run_settings(run)
    base = Path(model["model"])
    candidates = ([run / "tokenizer"] if run is not None else []) + [base]
    tokenizer = next((one for one in candidates if _has_tokenizer(one)), base)
    return ModelLocation("checkpoint", path, tokenizer, recipe, run, settings)


def _run_of(path: Path) -> Path | None:
    """Return the run that a checkpoint lies in."""
    return next((one for one in path.resolve().parents[:3] if (one / RUN_FILE).is_file()), None)


def _run_settings(run: Path | None) -> dict[str, Any]:
    if run is None:
        return {}
    values = read(run / RUN_FILE)
    settings = values.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    used = values.get("used")
    for name, value in used.items() if isinstance(used, dict) else ():
        if settings.get(name) in (None, "auto"):
            settings[name] = value
    return {"command": values.get("command"), **{str(name): value for name, value in settings.items()}}


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file()
