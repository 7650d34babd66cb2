"""Texts of --help."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from ..lazy import origin
from ..settings.parameters import EMPTY, Parameter, parameters_of
from ..settings.typed import show_type
from .sources import CONFIG_VARIABLE, PREFIX

# Any in this file: classes of any kind, and defaults.

_USAGE = """\
usage: {program} [--config FILE]... [KEY=VALUE]...

{title}

Settings are KEY=VALUE or --KEY VALUE, as in trainer.max_epochs=3. KEY+=VALUE adds to a list, ~KEY removes a setting of
a file.
  --config FILE, -c FILE     a YAML file; later files override earlier ones
  --print-config[=short]     print the merged settings of all sources and exit; short: without defaults
  --help [KEY or CLASS]      show this text, or the help on trainer, model, data, a parameter, or a class

Sources in increasing priority: files, environment variables ({prefix}TRAINER__MAX_EPOCHS=3; {files} names files),
command line. `data=digits` reads data/digits.yaml beside a --config file, in the current folder, or in conf/; if there
is none, it names a class. `data=digits.yaml` is the file itself.
"""


def overview(program: str, title: str, groups: Mapping[str, Any], values: Iterable[Parameter]) -> str:
    """Return the text of --help.

    Args:
        program: The program's name with the subcommand.
        title: Description of the subcommand.
        groups: Key -> class with its parameters; None if the user has to name a class.
        values: Top-level settings.
    """
    lines = [_USAGE.format(program=program, title=title, prefix=PREFIX, files=CONFIG_VARIABLE)]
    for one in values:
        lines += describe_parameter(one, "")
    for key, target in groups.items():
        if target is None or isinstance(target, tuple):
            lines += [
                "",
                f"{key}: name a class, as in {key}=package.module.Class, and its parameters as {key}.PARAMETER=...",
            ]
            continue
        lines += ["", f"{key}: {'.'.join(origin(target))}"]
        known = parameters_of(target)
        names = ", ".join(f"{name}*" if one.is_required else name for name, one in known.named.items())
        lines.append(f"  {names or 'no parameters'}")
        lines.append(f"  (see --help {key}{'; * is required' if '*' in names else ''})")
    return "\n".join(lines) + "\n"


def describe_class(
    target: Callable[..., object],
    key: str,
    annotations: Mapping[str, object] = MappingProxyType({}),
    *,
    without: Collection[str] = (),
) -> str:
    """Return the parameters of a class with types, defaults and descriptions.

    Args:
        target: The class, or a function.
        key: Prefix of its parameters; empty for none.
        annotations: Parameter types that are more precise than the signature's.
        without: Parameters to leave out.
    """
    known = parameters_of(target)
    lines = [".".join(origin(target)), *([f"  {known.title}"] if known.title else []), ""]
    for one in (one for one in known.named.values() if one.name not in without):
        wanted = annotations.get(one.name, one.annotation)
        lines += describe_parameter(replace(one, annotation=wanted), f"{key}." if key else "")
    if known.is_open:
        lines.append("  and others, which are passed on")
    return "\n".join(lines) + "\n"


def describe_parameter(one: Parameter, prefix: str) -> list[str]:
    """Return the lines about a parameter: name, type, default and description."""
    default = "required" if one.default is EMPTY else f"default {_shown(one.default)}"
    lines = [f"  {prefix}{one.name}: {show_type(one.annotation)} ({default})"]
    if one.text:
        lines.append(f"      {one.text}")
    return lines


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    return (
        getattr(value, "__qualname__", repr(value))
        if inspect.isroutine(value) or inspect.isclass(value)
        else repr(value)
    )
