"""`make`: an object of settings that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import ConfigError
from .build import Building
from .names import ClassProblem, find_class
from .parameters import parameters_of
from .settings import Settings
from .typed import Typed

__all__ = ["make"]

# Any in this file: values of settings.

T = TypeVar("T")


def make(cls: type[T], settings: Mapping[str, Any]) -> T:
    """Return an object of a class, made of settings.

    Args:
        cls: The class; `_class_path` in the settings may name a subclass.
        settings: Its arguments. Other objects are named by `class_path`, with `init_args`; their classes have to fit
            the types of the parameters. What no parameter takes is left out.

    Raises:
        ConfigError: They do not fit the parameters; all problems are named.
    """
    values = dict(settings)
    name = values.pop("_class_path", None)
    target: Any = cls
    if name is not None:
        try:
            target = find_class(name, cls)
        except ClassProblem as problem:
            raise ConfigError(
                f"Expected the settings of a {cls.__name__}, got: {problem}.", fix="load it with its own class."
            ) from None
    tree = Settings()
    tree.lay(values, "the checkpoint")
    known = parameters_of(target)
    taken = {key: value for key, value in tree.tree.items() if known.is_open or key in known.named}
    typed = Typed(tree, fills_untyped=True)
    plan = typed.plan(target, taken, "")
    if typed.problems:
        lines = "".join(f"\n  - {line}" for line in typed.problems)
        raise ConfigError(
            f"Expected settings of {target.__name__}, got:{lines}", fix="pass these arguments to load_from_checkpoint."
        )
    made: T = Building(tree, collects=False).made(plan)
    return made
