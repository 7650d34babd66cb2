"""`load_from_checkpoint`: builds a module or data module from the hyperparameters in a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO, TypeVar

import torch
from torch import nn

from ..errors import ConfigError
from ..protocols import MapLocation, StateDict, TrustedClasses
from ..settings.make import make
from ..strategies.load_weights import load_weights
from . import content, hparams, storage
from .file.reading import require_small
from .frozen_parameters import check_loaded
from .plain import untrust

logger = logging.getLogger(__name__)

T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound=nn.Module)


def load_module(
    cls: type[ModuleT],
    source: str | Path | IO[bytes],
    map_location: MapLocation,
    hparams_file: str | Path | None,
    *,
    strict: bool | None,
    weights_only: bool | None,
    trusted_classes: TrustedClasses,
    overrides: StateDict,
) -> ModuleT:
    """Return a `cls` with the weights of the checkpoint; see `Module.load_from_checkpoint`."""
    checkpoint = _load(source, map_location, weights_only=weights_only is not False)
    return rebuild(
        cls, checkpoint, str(source), map_location, hparams_file, strict=strict, trusted_classes=trusted_classes,
        overrides=overrides,
    )  # fmt: skip


def rebuild(
    cls: type[ModuleT],
    checkpoint: StateDict,
    source: str,
    map_location: MapLocation,
    hparams_file: str | Path | None,
    *,
    strict: bool | None,
    trusted_classes: TrustedClasses,
    overrides: StateDict,
) -> ModuleT:
    """Return a `cls` with the weights of a checkpoint that was read; `source` names it in messages."""
    states = content.read(checkpoint, source=source)
    module = _build(cls, checkpoint, "", hparams_file, trusted_classes, overrides, source=source)
    configure = getattr(module, "configure_model", None)
    if configure is not None:
        configure()
    on_load = getattr(module, "on_load_checkpoint", None)
    if on_load is not None:
        on_load(checkpoint)
    own_strict = getattr(module, "strict_loading", True) is not False
    if strict is not None and not own_strict and strict:
        raise ConfigError(
            f"load_from_checkpoint(strict=True), but {cls.__name__} sets strict_loading = False.",
            fix="leave strict out, or set strict_loading to the same.",
        )
    is_strict = own_strict if strict is None else strict
    weights = states.states["module"]
    leaves_out = getattr(module, "exclude_frozen_parameters", False)
    excluded = frozenset(states.states.get("excluded", ())) if leaves_out else frozenset()
    result = load_weights(module, weights, strict=bool(is_strict) and not excluded)
    if is_strict and excluded:
        check_loaded(module, result, excluded)
    missing = [name for name in result.missing_keys if name not in excluded]
    for what, keys in (("missing", missing), ("unexpected", result.unexpected_keys)):
        if keys:
            logger.warning("%s: %s keys, not loaded: %s", source, what, ", ".join(keys))
    if map_location is None:
        return module
    device = next((value.device for value in weights.values() if isinstance(value, torch.Tensor)), None)
    return module if device is None else module.to(device)


def load_datamodule(
    cls: type[T],
    source: str | Path | IO[bytes],
    map_location: MapLocation,
    hparams_file: str | Path | None,
    *,
    weights_only: bool | None,
    trusted_classes: TrustedClasses,
    overrides: StateDict,
) -> tuple[T, StateDict | None]:
    """Return a `cls`, and its state in the checkpoint if it has one; see `DataModule.load_from_checkpoint`."""
    checkpoint = _load(source, map_location, weights_only=weights_only is not False)
    content.require_shape(checkpoint, str(source))
    datamodule = _build(cls, checkpoint, "datamodule_", hparams_file, trusted_classes, overrides, source=str(source))
    return datamodule, checkpoint.get(cls.__qualname__)


def _build(
    cls: type[T],
    checkpoint: StateDict,
    prefix: str,
    hparams_file: str | Path | None,
    trusted_classes: TrustedClasses,
    overrides: StateDict,
    *,
    source: str,
) -> T:
    """Return a `cls` made with the hyperparameters whose keys in the checkpoint begin with this prefix."""
    settings = hparams.settings_of(checkpoint, prefix)
    hparams.put_back(checkpoint)
    # Also with a file of hyperparameters: a logger's has the object's text.
    hparams.require_passed(cls, checkpoint, prefix, overrides, source=source)
    if settings is not None and hparams_file is None:
        return make(cls, settings, overrides, trusted_classes)
    saved = checkpoint.get(f"{prefix}hyper_parameters") or {}
    former = {} if prefix else {**(checkpoint.get("module_arguments") or {}), **(checkpoint.get("hparams") or {})}
    if former:  # of Lightning before 1.0
        saved = {**former, **saved}
    if hparams_file is not None:
        saved = hparams.read_file(hparams_file)
    return cls(**hparams.constructor_arguments(cls, saved, checkpoint.get(f"{prefix}hparams_name"), overrides))


def _load(source: str | Path | IO[bytes], map_location: MapLocation, *, weights_only: bool) -> StateDict:
    location = "cpu" if map_location is None else map_location
    if isinstance(source, str | Path):
        return storage.load(source, map_location=location, weights_only=weights_only)
    if weights_only:
        require_small(source, str(source))
    loaded: StateDict = untrust(
        torch.load(source, map_location=location, weights_only=weights_only), allow=not weights_only
    )
    return loaded
