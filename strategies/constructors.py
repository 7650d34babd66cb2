"""Arguments that the constructors of several strategies have: passed on by name, and described in one place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["inherit_descriptions", "passed_on", "rest_of"]

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SECTION = re.compile(r"^Args:\n((?: {4}.*\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): .*\n(?: {5,}.*\n)*", re.MULTILINE)


def passed_on(target: Callable[..., object], arguments: Mapping[str, Any]) -> dict[str, Any]:  # Any: of any kind
    """Return those of a constructor's arguments that another function, or the constructor of a base class, names.

    Args:
        target: The function or the base class.
        arguments: The arguments by name: `locals()`, in the first line of the constructor.

    Raises:
        TypeError: The target names no argument.
    """
    names = [one.name for one in inspect.signature(target).parameters.values() if one.kind not in _REST]
    if not names:
        raise TypeError(f"Expected a function that names its arguments, got {target!r}.")
    return {name: arguments[name] for name in names if name in arguments}


def rest_of(arguments: Mapping[str, Any], *taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return a constructor's arguments without `self` and those in `taken`; its `**kwargs` are among them by name.

    Args:
        arguments: A copy of `locals()`, from the first line of the constructor.
        taken: What is passed on already.
    """
    used = {"self", "kwargs", "__class__"}.union(*taken)
    return {**{name: value for name, value in arguments.items() if name not in used}, **arguments.get("kwargs", {})}


def inherit_descriptions(cls: type) -> None:
    """Add to the section "Args" of a class's docstring the arguments that only a base class's docstring describes.

    They come in the order of the constructor. A class without this section or without a constructor stays as it is.
    """
    text = _text(cls)
    section = _SECTION.search(text)
    if section is None or "__init__" not in vars(cls):
        return
    known = {entry[1]: entry[0] for owner in reversed(cls.__mro__) for entry in _entries(_text(owner))}
    names = dict.fromkeys([*inspect.signature(cls).parameters, *(entry[1] for entry in _entries(text))])
    start, end = section.span(1)
    cls.__doc__ = text[:start] + "".join(known[name] for name in names if name in known) + text[end:]


def _text(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "") + "\n"


def _entries(text: str) -> list[re.Match[str]]:
    section = _SECTION.search(text)
    return [] if section is None else list(_ENTRY.finditer(section[1]))
