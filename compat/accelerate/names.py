"""Accelerate's modules and names: where each name lives here, and which are refused; they are listed in names.toml."""

from __future__ import annotations

import tomllib
from importlib import resources
from types import MappingProxyType

__all__ = ["HOMES", "MODULES", "REFUSED", "REFUSED_ARGUMENTS", "REFUSED_ATTRIBUTES", "VERSION"]

VERSION = "1.15.0"
"""The version whose names and behavior the layer follows."""

_TABLE = tomllib.loads(resources.files(__package__).joinpath("names.toml").read_text(encoding="utf-8"))

MODULES = frozenset(["accelerate", *(f"accelerate.{place}" for place in _TABLE["modules"].split())])
HOMES = MappingProxyType({name: file for file, names in _TABLE["homes"].items() for name in names.split()})
"""Name -> file of this folder."""
REFUSED = MappingProxyType({name: part["instead"] for part in _TABLE["refused"] for name in part["names"].split()})
"""Name -> what to use instead."""
REFUSED_ARGUMENTS, REFUSED_ATTRIBUTES = (
    MappingProxyType[str, str](_TABLE[part]) for part in ("arguments", "attributes")
)
"""The same for arguments and attributes of `Accelerator`."""
