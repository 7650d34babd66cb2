"""Texts of --help of a LightningCLI."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ....cli.groups import Groups
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
    program = Program(shown, trainer, bases, declared, seed)
    return help_on(program, topic, {})


def _base(group: ClassGroup) -> type:
    target = group.target
    if inspect.isclass(target):
        return target
    return Module if group.key == "model" else DataModule
