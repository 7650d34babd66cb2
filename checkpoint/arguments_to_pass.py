"""Hyperparameters that a checkpoint cannot contain, so that the caller must pass them to build the object.

A module's arguments may be objects: an activation, an enum, a dataclass. A file contains only plain values, so these
arguments are omitted from the key `hyper_parameters`, or stored there as a plain dict for readers. A separate key lists
them with descriptions. No reader may silently use the constructor's defaults or the dict instead:

- Loopwright's `load_from_checkpoint` raises an error that lists them and shows the call;
- Lightning's rejects an `_instantiator` that it does not know, and shows its text.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import ArgumentTypeError
from ..protocols import StateDict
from .omegaconf_containers import restore_containers
from .plain import Untrusted, to_plain
from .to_plain import resolve_omegaconf

__all__ = [
    "INSTANTIATOR",
    "describe",
    "put_back",
    "refusal",
    "require_passed",
    "settings_of",
    "split",
    "to_pass_key",
    "trusted_key",
]

# Any in this file: hyperparameters of any type.

INSTANTIATOR = "_instantiator"
_LONGEST_TEXT = 120
_OF_LIGHTNING = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")


def to_pass_key(prefix: str) -> str:
    """Return the key of a checkpoint for the arguments to pass: name -> description."""
    return f"{prefix}hyper_parameters_to_pass"


def trusted_key(prefix: str) -> str:
    """Return the key of a checkpoint for hyperparameters that were marked as trusted: name -> `Trusted`."""
    return f"{prefix}trusted_hyper_parameters"


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
    """Return the text with which other readers refuse a file that lacks arguments, to stand under INSTANTIATOR."""
    call = ", ".join(f"{name}=..." for name in to_pass)
    return f"loopwright.{owner}({call}): these arguments are not in the file and have to be passed"


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
            restore_containers(checkpoint, prefix)


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
