"""Hyperparameters that a checkpoint cannot hold as they are: whoever builds the object from it has to pass them.

A module's arguments may be objects: an activation, an enum, a dataclass. A file holds plain values, so they are left
out of the field's key `hyper_parameters`, or are there as a plain dict that can be read. Beside it stands which they
are and what they were. No reader may take the constructor's defaults or the dict in their place without a word:

- Loopwright's `load_from_checkpoint` raises an error that names them and shows the call;
- Lightning's refuses an `_instantiator` that it does not know, and shows its text.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from ..protocols import StateDict
from .plain import Untrusted, to_plain

__all__ = ["INSTANTIATOR", "describe", "put_back", "require_passed", "split", "to_pass_key", "trusted_key"]

# Any in this file: hyperparameters of any type.

INSTANTIATOR = "_instantiator"
_LONGEST_TEXT = 120


def to_pass_key(prefix: str) -> str:
    """Return the key of a checkpoint that says what is to be passed: name -> what it was."""
    return f"{prefix}hyper_parameters_to_pass"


def trusted_key(prefix: str) -> str:
    """Return the key of a checkpoint for hyperparameters that were marked as trusted: name -> `Trusted`."""
    return f"{prefix}trusted_hyper_parameters"


def split(
    hparams: Mapping[str, Any], *, owner: str, lost: Mapping[str, str] | None = None
) -> tuple[StateDict, dict[str, str]]:
    """Return what a checkpoint holds of hyperparameters, and what it does not hold as it is: name -> what it was.

    Args:
        hparams: Arguments of a constructor, or the entries of the one that held them all.
        owner: Name of the class, for other readers' errors.
        lost: Arguments that were left out already: name -> what it was.
    """
    plain: StateDict = {}
    to_pass: dict[str, str] = dict(lost or {})
    for name, value in hparams.items():
        converted, left_out = to_plain({name: value})
        if not left_out:
            plain.update(converted)
        if left_out or _becomes_a_dict(value):
            to_pass[str(name)] = describe(value)
    if to_pass:
        call = ", ".join(f"{name}=..." for name in to_pass)
        plain[INSTANTIATOR] = f"loopwright.{owner}({call}): these arguments are not in the file and have to be passed"
    return plain, to_pass


def require_passed(
    cls: type, checkpoint: Mapping[str, Any], prefix: str, passed: Mapping[str, object], *, source: str
) -> None:
    """Refuse to build an object without the arguments that its checkpoint does not hold.

    Args:
        cls: Class to build.
        checkpoint: The checkpoint.
        prefix: How its keys begin; empty for a module.
        passed: What the caller gives.
        source: Path, for the error.

    Raises:
        ConfigError: Names each, with what it was and the call.
    """
    to_pass = checkpoint.get(to_pass_key(prefix)) or {}
    hparams = checkpoint.get(f"{prefix}hyper_parameters") or {}
    trusted = {name: "an object" for name, value in hparams.items() if isinstance(value, Untrusted)}
    is_taken = _takes(cls, checkpoint.get(f"{prefix}hparams_name"))
    missing = {name: what for name, what in {**trusted, **to_pass}.items() if name not in passed and is_taken(name)}
    if not missing:
        return
    call = ", ".join(f"{name}=..." for name in missing)
    trust = "; or weights_only=False, only if you trust whoever wrote the file" if trusted else ""
    raise ConfigError(
        f"{source} does not hold all arguments of {cls.__name__}: "
        + ", ".join(f"{name} was {what}" for name, what in missing.items())
        + ".",
        fix=f"pass them: {cls.__name__}.load_from_checkpoint({source!r}, {call}){trust}.",
    )


def put_back(checkpoint: StateDict) -> None:
    """Let `hyper_parameters` be what they were when they were saved, as hooks expect them; in place.

    Objects that were marked as trusted stand beside them in the file, so that no other reader takes the mark for one.
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


def _takes(cls: type, container: str | None) -> Callable[[str], bool]:
    """Return whether the constructor takes an argument of a name, by itself or in the one that holds them all."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    has_container = bool(container) and container != "kwargs"
    return lambda name: takes_any or has_container or name in parameters


def _becomes_a_dict(value: object) -> bool:
    """Return whether the plain form is a dict and the value is not: the constructor would get something else."""
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def describe(value: Any) -> str:
    """Return what an object is in a line: its representation and its class."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever the object's own __repr__ raises: its class says enough
        return kind
    return f"{text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + '...'} ({kind})"
