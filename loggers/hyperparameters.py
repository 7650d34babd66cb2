"""Conversion of hyperparameters to plain values, flat names and YAML text.

The YAML is written here rather than with a library, because importing one would delay the first training step.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from argparse import Namespace
from collections.abc import Container, Iterator, Mapping
from enum import Enum
from typing import TypeAlias

from ..errors import ConfigError
from ..protocols import Tree

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
# What YAML 1.1 reads as something other than text.
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def plain_hyperparameters(params: Tree) -> dict[str, Plain]:
    """Return hyperparameters as a dict of plain values; what cannot be written as such becomes its `str`.

    Args:
        params: A mapping, an `argparse.Namespace`, a dataclass instance, or None (no hyperparameters).

    Raises:
        ConfigError: `params` is none of these.
    """
    if params is None:
        return {}
    value = _plain(params)
    if not isinstance(value, dict):
        raise ConfigError(
            f"hyperparameters are {params!r} of type {type(params).__name__}; "
            "expected a mapping, a Namespace, a dataclass or None.",
            fix="pass a dict of names and values.",
        )
    return value


def flatten(params: Mapping[str, Plain], separator: str = "/") -> dict[str, bool | int | float | str]:
    """Return one level of names: nested ones joined by the separator, lists and None as text.

    A name that is there already (`{"a": {"b": 1}, "a/b": 2}`) is followed by "_".
    """
    flat: dict[str, bool | int | float | str] = {}
    for key, value in params.items():
        if isinstance(value, dict) and value:
            for inner, scalar in flatten(value, separator).items():
                flat[_unused(f"{key}{separator}{inner}", flat)] = scalar
        else:
            flat[_unused(key, flat)] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat


def to_yaml(params: Mapping[str, Plain]) -> str:
    """Return YAML text from which any YAML 1.1 reader restores the same values."""
    return "".join(f"{line}\n" for line in _lines(dict(params))) if params else "{}\n"


def _unused(name: str, taken: Container[str]) -> str:
    """Return the name, followed by "_" where another entry has it."""
    while name in taken:
        name = f"{name}_"
    return name


def _plain(value: Tree) -> Plain:
    if type(value).__module__.startswith("omegaconf."):
        from ..checkpoint.to_plain import resolve_omegaconf  # not imported without such a value

        value = resolve_omegaconf(value)
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Namespace):
        return _plain(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        plain: dict[str, Plain] = {}
        for key, inner in value.items():
            plain[_unused(str(key), plain)] = _plain(inner)
        return plain
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return [_plain(inner) for inner in sorted(value, key=str)]
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a tensor or array of one number
        return _plain(value.item())
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__qualname__", value))
    return str(value)


def _lines(value: dict[str, Plain] | list[Plain], indent: str = "") -> Iterator[str]:
    entries: list[tuple[str, Plain]]
    if isinstance(value, dict):
        entries = [(f"{_text(key)}:", inner) for key, inner in value.items()]
    else:
        entries = [("-", inner) for inner in value]
    for start, inner in entries:
        if isinstance(inner, (dict, list)) and inner:
            yield f"{indent}{start}"
            yield from _lines(inner, f"{indent}  ")
        else:
            yield f"{indent}{start} {_scalar(inner)}"


def _scalar(value: Plain) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (dict, list)):
        return "{}" if isinstance(value, dict) else "[]"
    return _text(value)


def _float(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = float.__repr__(value)
    # YAML 1.1 reads 1e-05 as text: a float needs the point.
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _text(value: str) -> str:
    if _PLAIN_WORD.fullmatch(value) and value.lower() not in _RESERVED:
        return str(value)
    return '"' + "".join(_escaped(character) for character in value) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
