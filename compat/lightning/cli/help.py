"""Texts of --help of a LightningCLI."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ....cli.groups import Groups
from ....cli.help_text import describe_class, describe_parameter
from ....cli.program import Program
from ....cli.topics import help_on
from ....data import DataModule
from ....trainer.module import Module
from ..trainer import Trainer
from .declared import ClassGroup, Value

if TYPE_CHECKING:
    from .argument_parser import LightningArgumentParser

__all__ = ["help_of"]

# Any in this file: classes of users.


def help_of(parser: LightningArgumentParser, topic: str, shown: str) -> str:
    """Return the text of --help.

    Args:
        parser: What is declared.
        topic: A key, a parameter or a class; empty for an overview.
        shown: The program, with its subcommand.
    """
    declared = Groups()
    bases: dict[str, Any] = {}
    trainer: Any = Trainer
    seed: Any = None
    for key, one in parser.declared.items():
        if isinstance(one, Value):
            if key == "seed_everything":
                seed = one.parameter.default
            else:
                declared.values[key] = one.parameter
        elif key == "trainer":
            trainer = one.target
        elif one.names_class:
            if key in ("model", "data"):
                bases[key] = (None, _base(one))
        else:
            declared.classes[key] = one.target
    if not topic:
        return _overview(parser, shown)
    program = Program(shown, trainer, bases, declared, seed)
    return help_on(program, topic, {})


_USAGE = """\
usage: {shown} [--config FILE]... [--KEY VALUE]...

  --config FILE, -c FILE     a YAML or JSON file; later files override earlier ones
  --print_config             print the merged settings of all sources and exit
  --help [KEY or CLASS]      show this text, or the help on a key, a parameter, or a class
"""


def _overview(parser: LightningArgumentParser, shown: str) -> str:
    """Return the text with every setting as it is typed: `--model.width: int (default 3)`."""
    lines = [_USAGE.format(shown=shown)]
    for one in parser.declared.values():
        if isinstance(one, Value):
            lines += describe_parameter(one.parameter, "--")
    for key, one in parser.declared.items():
        if isinstance(one, Value):
            continue
        if one.names_class:
            lines += ["", f"{key}: name a class, as in --{key} package.module.Class; then --{key}.PARAMETER VALUE"]
        else:
            lines += ["", describe_class(one.target, f"--{key}", without=one.skip).rstrip("\n")]
    return "\n".join(lines) + "\n"


def _base(group: ClassGroup) -> type:
    target = group.target
    if inspect.isclass(target):
        return target
    return Module if group.key == "model" else DataModule
