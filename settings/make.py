"""`make`: creates an object from settings in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import ConfigError
from ..protocols import TrustedClasses
from ..yaml_file import MOST_VALUES
from .build import Building
from .names import ClassProblem, NotTrusted, Trust, find_class
from .parameters import parameters_of
from .tree import Settings
from .typed import ObjectPlan, Typed

# Any in this file: values of settings.

T = TypeVar("T")


def make(
    cls: type[T],
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    trusted_classes: TrustedClasses = (),
) -> T:
    """Return an object of a class, created from settings in a file of possibly unknown origin.

    Args:
        cls: The class; `_class_path` in the settings may name a subclass.
        settings: Arguments of the class. Other objects are named by `class_path`, with `init_args`. Settings that match
            no parameter are ignored. `names.Trust` defines which classes the settings may name.
        overrides: The caller's arguments, which replace arguments in the settings. They may name any class.
        trusted_classes: Further classes that the settings may name; a Python module stands for all its classes.

    Raises:
        ConfigError: Settings do not fit the parameters, or name a class that they may not; all problems are named.
    """
    plan, tree = _planned(cls, settings, overrides or {}, trusted_classes)
    made: T = Building(tree, collects=False).made(plan)
    return made


def check(cls: type[object], settings: Mapping[str, Any]) -> None:
    """Check that settings in a file from an unknown source name only what `names.Trust` allows.

    Args:
        cls: What they are settings of, as for `make`; arguments may be missing.
        settings: The settings.

    Raises:
        ConfigError: They do not fit the parameters, or name what they must not; all problems are named.
    """
    _planned(cls, settings, {}, (), is_whole=False)


def _planned(
    cls: type[object],
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any],
    trusted_classes: TrustedClasses,
    *,
    is_whole: bool = True,
) -> tuple[ObjectPlan, Settings]:
    values, overrides = dict(settings), dict(overrides)
    if _num_values(values, {}) > MOST_VALUES:
        raise ConfigError(
            f"Expected settings of {cls.__name__} with up to {MOST_VALUES:,} values, got more in the checkpoint.",
            fix="pass the arguments to the constructor, and load the weights with load_state_dict.",
        )
    trust = Trust(tuple(trusted_classes))
    name = values.pop("_class_path", None)
    target: Any = cls
    if name is not None:
        try:
            target = find_class(str(name), cls, trust)
        except ClassProblem as problem:
            remedy = "import the module of its class first, or load it with that class"
            raise ConfigError(
                f"Expected the settings of a {cls.__name__}, got: {problem}.",
                fix=f"{remedy}." if isinstance(problem, NotTrusted) else "load it with its own class.",
            ) from None
    tree = Settings()
    tree.lay({key: value for key, value in values.items() if key not in overrides}, "the checkpoint", trust)
    tree.lay(overrides, "the caller")
    known = parameters_of(target)
    taken = {key: value for key, value in tree.tree.items() if known.is_open or key in known.named}
    typed = Typed(tree, fills_untyped=True)
    plan = typed.plan(target, taken, "", given=frozenset(() if is_whole else known.named))
    if typed.problems:
        lines = "".join(f"\n  - {line}" for line in typed.problems)
        refused = dict.fromkeys(path.partition(".")[0] for path in typed.refused)
        arguments = ", ".join(f"{one}=..." for one in refused)
        more = "; or name classes that you trust in trusted_classes=[...]" if refused else ""
        raise ConfigError(
            f"Expected settings of {target.__name__}, got:{lines}",
            fix=f"pass {'it yourself' if len(refused) == 1 else 'these arguments yourself'} to load_from_checkpoint"
            f"{f': {arguments}' if refused else ''}{more}.",
        )
    return plan, tree


def _num_values(value: object, known: dict[int, int]) -> int:
    """Return the number of values, those in shared containers as often as they are reached."""
    if not isinstance(value, dict | list | tuple):
        return 1
    if id(value) not in known:
        below = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_num_values(one, known) for one in below)
    return known[id(value)]
