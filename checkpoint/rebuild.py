"""`load_from_checkpoint`: builds a module or data module from the hyperparameters in a checkpoint."""

from __future__ import annotations

import csv
import inspect
import logging
from ast import literal_eval
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TypeVar

import torch
from torch import nn

from ..errors import ArgumentTypeError, ConfigError
from ..protocols import MapLocation, StateDict, TrustedClasses
from ..strategies.load_weights import load_weights
from ..yaml_file import read
from . import arguments_to_pass, content, storage
from .file.reading import require_small
from .frozen_parameters import check_loaded
from .omegaconf_containers import calls_resolver, find_containers, make_container
from .plain import untrust

__all__ = ["constructor_arguments", "load_datamodule", "load_module", "read_hparams_file", "read_hparams_yaml"]

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
    states = content.read(checkpoint, source=str(source))
    module = _build(cls, checkpoint, "", hparams_file, trusted_classes, overrides, source=str(source))
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
    settings = arguments_to_pass.settings_of(checkpoint, prefix)
    arguments_to_pass.put_back(checkpoint)
    # Also with a file of hyperparameters: a logger's has the object's text.
    arguments_to_pass.require_passed(cls, checkpoint, prefix, overrides, source=source)
    if settings is not None and hparams_file is None:
        from ..cli.make import make  # settings of a command line are converted as it does

        return make(cls, settings, overrides, trusted_classes)
    hparams = checkpoint.get(f"{prefix}hyper_parameters") or {}
    former = {} if prefix else {**(checkpoint.get("module_arguments") or {}), **(checkpoint.get("hparams") or {})}
    if former:  # of Lightning before 1.0
        hparams = {**former, **hparams}
    if hparams_file is not None:
        hparams = read_hparams_file(hparams_file)
    return cls(**constructor_arguments(cls, hparams, checkpoint.get(f"{prefix}hparams_name"), overrides))


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


def constructor_arguments(
    cls: type, hparams: Mapping[str, object], container_name: str | None, overrides: Mapping[str, object]
) -> StateDict:
    """Return the keyword arguments to build `cls` with: saved hyperparameters, then the caller's.

    Args:
        cls: Class to build.
        hparams: Saved hyperparameters; those that `__init__` does not take are left out.
        container_name: Name of the argument that took all of them as one object, None where each is an argument.
        overrides: The caller's arguments; they win.

    Raises:
        ArgumentTypeError: A required argument is missing.
    """
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if container_name and container_name != "kwargs":
        if container_name not in parameters:
            raise ArgumentTypeError(
                f"{cls.__name__}.load_from_checkpoint: the checkpoint has all hyperparameters in the argument "
                f"{container_name!r}, which __init__ does not take.",
                fix="load it with the class that was saved.",
            )
        from ..data.hparams import HyperParameters

        entries = {name: value for name, value in overrides.items() if name not in parameters}
        whole = find_containers(hparams).get("")
        if isinstance(whole, dict):
            arguments: StateDict = {container_name: make_container({**whole, **entries})}
        else:
            arguments = {container_name: HyperParameters({**hparams, **entries})}
        arguments.update({key: value for key, value in overrides.items() if key in parameters})
    else:
        arguments = {key: value for key, value in hparams.items() if takes_any or key in parameters}
        arguments.update(overrides)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and name not in arguments
    ]
    if missing:
        raise ArgumentTypeError(
            f"{cls.__name__}.load_from_checkpoint: __init__ needs {', '.join(missing)}, which the checkpoint does not "
            f"have; it has the hyperparameters {sorted(map(str, hparams))}.",
            fix=f"pass {', '.join(f'{n}=...' for n in missing)}, or call self.save_hyperparameters() in __init__.",
        )
    return arguments


def read_hparams_file(path: str | Path) -> StateDict:
    """Return the hyperparameters in a .yaml, .yml or .csv (key,value) file.

    Raises:
        ConfigError: The suffix is another one.
    """
    suffix = Path(path).suffix
    if suffix in (".yaml", ".yml"):
        return read_hparams_yaml(path)
    if suffix == ".csv":
        values: StateDict = {}
        with open(path, newline="") as stream:
            for row in list(csv.reader(stream))[1:]:
                try:
                    values[row[0]] = literal_eval(row[1])
                except (ValueError, SyntaxError):
                    values[row[0]] = row[1]
        return values
    raise ConfigError(f"hparams_file={str(path)!r} has the suffix {suffix!r}.", fix="use .yaml, .yml or .csv.")


def read_hparams_yaml(path: str | Path) -> StateDict:
    """Return the hyperparameters in a YAML file. References to each other are followed; resolvers are not called.

    Raises:
        ConfigError: The file cannot be read, or it calls a resolver.
    """
    hparams = read(Path(path))
    stack: list[tuple[str, object]] = list(hparams.items())
    texts = []
    for name, value in stack:  # grows while it is read
        if isinstance(value, dict | list):
            stack.extend((name, below) for below in (value.values() if isinstance(value, dict) else value))
        elif isinstance(value, str) and "${" in value:
            texts.append(value)
            if calls_resolver(value):
                raise ConfigError(
                    f"{path}: {name} has the interpolation {value!r}, which calls a function of this program.",
                    fix=f"pass it yourself: {name}=..., and take it out of the file.",
                )
    if not texts:
        return hparams
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found: StateDict = OmegaConf.to_container(OmegaConf.create(hparams), resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{path}: an interpolation cannot be followed: {str(error).splitlines()[0]}.",
            fix="write the value in place of the interpolation.",
        ) from None
    return found
