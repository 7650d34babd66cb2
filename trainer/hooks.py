"""Hooks that an object overrides, and methods that look like a hook but are not in the table."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import TypeAlias

from torch import nn

from ..callbacks import Callback
from ..data.module import DataModule
from ..errors import ModuleError, nearest
from ..lazy import is_core
from ..protocols import Owner, StepFunction
from .module import Module

# Classes that declare hooks: what they define is not an override.
MODULE_BASES: tuple[type, ...] = (Module, nn.Module)
DATA_BASES: tuple[type, ...] = (DataModule,)
CALLBACK_BASES: tuple[type, ...] = (Callback,)

Hook: TypeAlias = StepFunction  # hooks differ in arguments; the table in trainer/lifecycle.py says which


def find_override(owner: Owner, name: str, bases: tuple[type, ...]) -> Hook | None:
    """Return the owner's bound method of this name if it is the user's own, not one that a base class declares.

    A method that was set on the instance counts as the user's own.
    """
    if name in getattr(owner, "__dict__", {}):
        method = owner.__dict__[name]
        return method if callable(method) else None
    function = getattr(type(owner), name, None)
    if function is None or not callable(function):
        return None
    for base in bases:
        if getattr(base, name, None) is function:
            return None
    bound: Hook = getattr(owner, name)
    return bound


_STAGES = ("train", "val", "test", "predict")
# Beginnings of the names of hooks that take the declared arguments; steps may leave some out.
_CHECKED = ("on_", "configure_", "setup", "teardown", "prepare_data", *(f"{one}_dataloader" for one in _STAGES))
# Hooks of Lightning before 2.0, which took all outputs of an epoch.
_FORMER = {"test_epoch_end", "training_epoch_end", "validation_epoch_end"}
# Common method names that are similar to the name of a hook.
_NOT_MISSPELT = {"on_gpu", "train", "test", "predict", "validate", "fit", "backward"}


def check_hook_names(owner: Owner, listener: str, known: set[str]) -> None:
    """Refuse methods of the user's class that look like a hook but are not in the table.

    A name that starts with `on_` must be in the table for this kind of listener; any other name must not be nearly
    the name of a hook that the class does not define.

    Args:
        owner: A module, callback or data module.
        listener: "module", "callbacks" or "datamodule".
        known: Names of the hooks that such a listener may define.

    Raises:
        ModuleError: Names all such methods, each with the nearest hook.
    """
    bases = MODULE_BASES if listener == "module" else CALLBACK_BASES if listener == "callbacks" else DATA_BASES
    inherited = {name for base in bases for name in dir(base)}
    own = _own_methods(type(owner), bases)
    free = known.difference(own)
    wrong = []
    for name in own:
        if name in known or name in inherited or name in _NOT_MISSPELT or name.startswith("_"):
            continue
        hint = nearest(name, known)
        if name.startswith("on_") or (name in _FORMER and listener == "module") or _is_nearly(name, free):
            wrong.append(f"{name}{hint}")
    if wrong:
        raise ModuleError(
            f"{type(owner).__name__} has methods that look like hooks of a {listener.rstrip('s')} but are not: "
            f"{', '.join(wrong)}.",
            fix="rename each to the hook that was meant, or give helpers another name, such as one with a leading "
            "underscore; `python -m loopwright lifecycle` lists the hooks.",
        )
    _check_signatures(owner, [name for name in own if name in known and name.startswith(_CHECKED)], bases)


def _check_signatures(owner: Owner, names: Iterable[str], bases: tuple[type, ...]) -> None:
    """Refuse hooks that cannot take the arguments that the base class declares.

    Raises:
        ModuleError: Names all such hooks and the arguments that they are called with.
    """
    wrong = []
    for name in names:
        declared = next((getattr(base, name) for base in bases if hasattr(base, name)), None)
        if declared is None:
            continue
        try:
            expected = list(inspect.signature(declared).parameters.values())[1:]
            found = inspect.signature(getattr(owner, name), follow_wrapped=False)  # what can be called
        except (TypeError, ValueError):  # written in C, or a stand-in
            continue
        required = [one for one in expected if one.default is one.empty]
        if not (_takes(found, len(required)) or _takes(found, len(expected))):
            taken = ", ".join(found.parameters)
            wrong.append(f"{name}({taken}) is called as {name}({', '.join(one.name for one in expected)})")
    if wrong:
        name = type(owner).__name__
        raise ModuleError(
            f"Expected hooks of {name} to take the arguments that they are called with: {'; '.join(wrong)}.",
            fix="give them these arguments, after self.",
        )


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _own_methods(cls: type, bases: tuple[type, ...]) -> list[str]:
    names: dict[str, None] = {}
    for ancestor in cls.__mro__:
        if ancestor in bases or ancestor is object or is_core(ancestor) or ancestor.__module__.startswith("torch."):
            continue
        for name, value in vars(ancestor).items():
            if callable(value) and not isinstance(value, type):
                names[name] = None
    return list(names)


def _is_nearly(name: str, known: Iterable[str]) -> bool:
    return any(len(hook) >= 8 and SequenceMatcher(None, name, hook).ratio() >= 0.92 for hook in known)
