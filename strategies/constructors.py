"""Descriptions of the arguments that the constructors of several strategies have, written once."""

from __future__ import annotations

import inspect
import re

_SECTION = re.compile(r"^Args:\n((?: {4}.*\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): .*\n(?: {5,}.*\n)*", re.MULTILINE)


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
