"""Hyperparameters in a checkpoint: what is written, what the caller must pass, and what an object is built with.

A module's arguments may be objects: an activation, an enum, a dataclass. A file contains only plain values, so these
arguments are omitted from the key `hyper_parameters`, or stored there as a plain dict for readers. A separate key lists
them with descriptions. No reader may silently use the constructor's defaults or the dict instead:

- Loopwright's `load_from_checkpoint` raises an error that lists them and shows the call;
- Lightning's rejects an `_instantiator` that it does not know, and shows its text.

Of OmegaConf containers, a checkpoint has names and content, with interpolations. An interpolation of a file may refer
to other values. One that calls a resolver (`${oc.env:HOME}`) could call any function that the program has registered:
in its place stands the value that it had when the file was written.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import inspect
import logging
import re
import sys
import types
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import yaml_file
from ..errors import ArgumentTypeError, ConfigError
from ..protocols import StateDict, Tree
from .plain import Untrusted, to_plain
from .to_plain import resolve_omegaconf

logger = logging.getLogger(__name__)

# Any in this file: hyperparameters of any type.

INSTANTIATOR = "_instantiator"
_LONGEST_TEXT = 120
_ALL = ""  # stands for the hyperparameters themselves
_REFERENCE = re.compile(r"\$\{[^{}:$\\]*\}")
_OF_LIGHTNING = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")


def to_pass_key(prefix: str) -> str:
    """Return the key of a checkpoint for the arguments to pass: name -> description."""
    return f"{prefix}hyper_parameters_to_pass"


def trusted_key(prefix: str) -> str:
    """Return the key of a checkpoint for hyperparameters that were marked as trusted: name -> `Trusted`."""
    return f"{prefix}trusted_hyper_parameters"


def containers_key(prefix: str) -> str:
    """Return the key of a checkpoint for the names of hyperparameters that were OmegaConf containers."""
    return f"{prefix}hyper_parameters_omegaconf"


# --- what is written ------------------------------------------------------------------------------------------------


def write(owner: Any, prefix: str) -> StateDict:
    """Return the entries of a checkpoint for the hyperparameters of a module (prefix "") or "datamodule_"."""
    plain, to_pass = split(owner.hparams, owner=type(owner).__name__)
    if to_pass:
        logger.warning(
            "hyperparameters that are not plain values are not saved: %s; pass them to load_from_checkpoint",
            ", ".join(to_pass),
        )
    return entries(owner, prefix, plain, to_pass)


def entries(owner: Any, prefix: str, kept: StateDict, to_pass: Mapping[str, str]) -> StateDict:
    """Return the entries of a checkpoint for values that it can hold and descriptions of the others."""
    name = getattr(owner, "_lw_hparams_name", None) or "kwargs"
    found: StateDict = {f"{prefix}hparams_name": name, f"{prefix}hyper_parameters": kept}
    containers = find_containers(owner.hparams)
    if containers:
        found[containers_key(prefix)] = containers
    return {**found, to_pass_key(prefix): to_pass} if to_pass else found


def split(
    hparams: Mapping[str, Any], *, owner: str, lost: Mapping[str, str] | None = None
) -> tuple[StateDict, dict[str, str]]:
    """Return the plain hyperparameters for a checkpoint, and those that it cannot contain: name -> description.

    Args:
        hparams: Arguments of a constructor, or the entries of the argument that holds all hyperparameters.
        owner: Name of the class, for other readers' errors.
        lost: Arguments that are already omitted: name -> description.
    """
    plain: StateDict = {}
    to_pass: dict[str, str] = dict(lost or {})
    # One OmegaConf container may hold all of them; a value that it misses is an error when it is read.
    for name, value in resolve_omegaconf(hparams).items():
        converted, left_out = to_plain({name: value})
        if not left_out:
            plain.update(converted)
        if left_out or _becomes_a_dict(value):
            to_pass[str(name)] = describe(value)
    if to_pass:
        plain[INSTANTIATOR] = refusal(owner, to_pass)
    return plain, to_pass


def refusal(owner: str, to_pass: Iterable[str]) -> str:
    """Return the text with which other readers refuse a file that lacks arguments, stored under INSTANTIATOR."""
    call = ", ".join(f"{name}=..." for name in to_pass)
    return f"loopwright.{owner}({call}): these arguments are not in the file and have to be passed"


# --- what is read ---------------------------------------------------------------------------------------------------


def require_passed(
    cls: type, checkpoint: Mapping[str, Any], prefix: str, passed: Mapping[str, object], *, source: str
) -> None:
    """Check that the caller passes all arguments that a checkpoint does not contain.

    Args:
        cls: Class to build.
        checkpoint: The checkpoint.
        prefix: Prefix of its keys; empty for a module.
        passed: The caller's arguments.
        source: Path, for the error.

    Raises:
        ArgumentTypeError: Arguments are missing; lists them with descriptions, and shows the call.
    """
    to_pass = checkpoint.get(to_pass_key(prefix)) or {}
    hparams = checkpoint.get(f"{prefix}hyper_parameters") or {}
    marks = {name: next(_marks(value, set()), None) for name, value in hparams.items()}
    trusted = {name: getattr(mark, "kind", "an object") for name, mark in marks.items() if mark is not None}
    is_taken = _takes(cls, checkpoint.get(f"{prefix}hparams_name"))
    missing = {name: what for name, what in {**trusted, **to_pass}.items() if name not in passed and is_taken(name)}
    if not missing:
        return
    call = ", ".join(f"{name}=..." for name in missing)
    trust = "; or weights_only=False, only if you trust whoever wrote the file" if trusted else ""
    raise ArgumentTypeError(
        f"{source} does not hold all arguments of {cls.__name__}: "
        + ", ".join(f"{name} was {what}" for name, what in missing.items())
        + ".",
        fix=f"pass them: {cls.__name__}.load_from_checkpoint({source!r}, {call}){trust}.",
    )


def settings_of(checkpoint: Mapping[str, Any], prefix: str) -> StateDict | None:
    """Return the hyperparameters that are settings of Lightning's command line; None if they are arguments.

    Classes in them are named by `class_path`, with `init_args`; the object's own class by `_class_path`.
    """
    hparams = checkpoint.get(f"{prefix}hyper_parameters")
    marked = str(hparams.get(INSTANTIATOR)) if isinstance(hparams, dict) else ""
    if hparams is None or marked not in _OF_LIGHTNING:
        return None
    return {name: value for name, value in hparams.items() if name != INSTANTIATOR}


def put_back(checkpoint: StateDict) -> None:
    """Restore trusted objects and OmegaConf containers in `hyper_parameters`, as hooks expect them; in place.

    The file has trusted objects under a separate key, so that other readers do not mistake a mark for a value.
    """
    for prefix in ("", "datamodule_"):
        hparams = checkpoint.get(f"{prefix}hyper_parameters")
        if isinstance(hparams, dict):
            hparams.pop(INSTANTIATOR, None)
            trusted = checkpoint.pop(trusted_key(prefix), {})
            hparams.update(trusted)
            to_pass = checkpoint.get(to_pass_key(prefix), {})
            for name in [name for name, value in trusted.items() if not isinstance(value, Untrusted)]:
                to_pass.pop(name, None)
            _restore_containers(checkpoint, prefix)


def _marks(value: Any, seen: set[int]) -> Iterator[Untrusted]:
    """Yield the objects in a hyperparameter that were not opened."""
    if isinstance(value, Untrusted):
        yield value
    elif isinstance(value, dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _marks(item, seen)


def _takes(cls: type, container: str | None) -> Callable[[str], bool]:
    """Return a test of whether the constructor accepts a name, as an argument or in one that holds all of them."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    has_container = bool(container) and container != "kwargs"
    return lambda name: takes_any or has_container or name in parameters


def _becomes_a_dict(value: object) -> bool:
    """Return whether the plain form of a value is a dict, which the constructor would not accept instead of it."""
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def describe(value: Any) -> str:
    """Return a description of an object in one line: its representation and its class."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # any error in the object's __repr__: its class is enough
        return kind
    return f"{text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + '...'} ({kind})"


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
            arguments: StateDict = {container_name: _make_container({**whole, **entries})}
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


def read_file(path: str | Path) -> StateDict:
    """Return the hyperparameters in a .yaml, .yml or .csv (key,value) file.

    Raises:
        ConfigError: The suffix is another one.
    """
    suffix = Path(path).suffix
    if suffix in (".yaml", ".yml"):
        return read_yaml(path)
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


def read_yaml(path: str | Path) -> StateDict:
    """Return the hyperparameters in a YAML file. References to each other are followed; resolvers are not called.

    Raises:
        ConfigError: The file cannot be read, or it calls a resolver.
    """
    hparams = yaml_file.read(Path(path))
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


# --- containers of OmegaConf -----------------------------------------------------------------------------------------


def find_containers(hparams: Mapping[str, object]) -> dict[str, Tree]:
    """Return the values that are OmegaConf containers, as plain values in which interpolations are not resolved.

    The name of the hyperparameters themselves is empty.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None:
        return {}
    named = {_ALL: hparams} if isinstance(hparams, omegaconf.Container) else dict(hparams)
    found = {name: value for name, value in named.items() if isinstance(value, omegaconf.Container)}
    unresolved = {name: omegaconf.OmegaConf.to_container(value, resolve=False) for name, value in found.items()}
    return {name: to_plain(value)[0] for name, value in unresolved.items()}


def _restore_containers(checkpoint: StateDict, prefix: str) -> None:
    """Make OmegaConf containers of the hyperparameters that were such; in place."""
    found = checkpoint.get(containers_key(prefix))
    key = f"{prefix}hyper_parameters"
    if not found or type(checkpoint.get(key)) is not dict:
        return
    if _ALL in found:
        checkpoint[key] = _restored(found[_ALL], checkpoint[key])
        return
    for name, content in found.items():
        if isinstance(checkpoint[key].get(name), dict | list):
            checkpoint[key][name] = _restored(content, checkpoint[key][name])


def _restored(content: Tree, resolved: Tree) -> Tree:
    """Return the container, without interpolations if they led out of it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        container = _make_container(_without_resolvers(content, resolved))
        OmegaConf.to_container(container, resolve=True)
    except OmegaConfBaseException:
        return _make_container(_escaped(resolved))
    return container


def calls_resolver(text: str) -> bool:
    """Return whether a text has an interpolation that is not a mere reference to another value."""
    before = ""
    while text != before:  # references may stand in references
        before, text = text, _REFERENCE.sub("", text)
    return "${" in text


def _without_resolvers(content: Tree, resolved: Tree) -> Tree:
    """Return the content with the resolved values in place of interpolations that call a resolver."""
    if isinstance(content, dict):
        others = resolved if isinstance(resolved, dict) else {}
        return {key: _without_resolvers(value, others.get(key)) for key, value in content.items()}
    if isinstance(content, list):
        entries = resolved if isinstance(resolved, list) and len(resolved) == len(content) else [None] * len(content)
        return [_without_resolvers(value, other) for value, other in zip(content, entries, strict=True)]
    return _escaped(resolved) if isinstance(content, str) and calls_resolver(content) else content


def _escaped(value: Tree) -> Tree:
    """Return values that OmegaConf does not take for interpolations."""
    if isinstance(value, dict):
        return {key: _escaped(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_escaped(below) for below in value]
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value) if isinstance(value, str) else value


def _make_container(value: Any) -> Any:  # Any: OmegaConf's overloads of dicts, lists and texts
    """Return a dict or list as an OmegaConf container."""
    from omegaconf import OmegaConf

    return OmegaConf.create(value, flags={"allow_objects": True})
