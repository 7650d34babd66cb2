"""The settings of a program: its classes, its groups, the arguments of its subcommand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..lazy import home_of
from ..settings.names import ClassProblem, Trust, find_class
from ..settings.parameters import EMPTY, Parameter, parameters_of
from ..settings.tree import CLASS_KEYS, SettingsTree, is_class_node
from .groups import Groups

# Any in this file: the user's classes and their defaults.

SUBCOMMANDS = {
    "fit": "train and validate a model",
    "validate": "evaluate a model on the validation data",
    "test": "evaluate a model on the test data",
    "predict": "compute predictions",
}
_LEFT_OUT = ("self", "model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule")


@dataclass
class Program:
    """The available settings.

    Attributes:
        name: How the program was started, for messages.
        trainer_class: Trainer, or a subclass.
        bases: For "model" and "data": the class that the program passed (None if it passed none), and the base class
            that any class must have.
        declared: The declarations of `CLI.add_arguments`.
        seed_default: The default seed.
        subcommand: Subcommand to run; None only creates objects.
        subcommands: Name -> description.
        skipped: Parameters of the subcommand's method that are not settings, besides the model and its data.
        trust_at: Returns what the setting at a path may name; None if the user has written it.
    """

    name: str
    trainer_class: Any
    bases: Mapping[str, tuple[Callable[..., object] | None, type[object]]]
    declared: Groups
    seed_default: bool | int | None
    subcommand: str | None = None
    subcommands: dict[str, str] = field(default_factory=lambda: dict(SUBCOMMANDS))
    skipped: frozenset[str] = frozenset()
    trust_at: Callable[[str], Trust | None] = lambda path: None

    @property
    def shown(self) -> str:
        """The program with its subcommand, as in error messages."""
        return f"{self.name} {self.subcommand}" if self.subcommand else self.name

    @property
    def arguments(self) -> dict[str, Parameter]:
        """Settings of the subcommand."""
        if self.subcommand is None:
            return {}
        known = parameters_of(getattr(self.trainer_class, self.subcommand))
        return {name: one for name, one in known.named.items() if name not in (*_LEFT_OUT, *self.skipped)}

    @property
    def values(self) -> dict[str, Parameter]:
        """Top-level settings that are values."""
        seed = Parameter(
            "seed_everything", bool | int | None, self.seed_default, "Seed of all random generators; true draws one."
        )
        return {seed.name: seed, **self.arguments, **self.declared.values}

    @property
    def keys(self) -> list[str]:
        """All top-level settings."""
        return ["seed_everything", "trainer", *CLASS_KEYS, *self.arguments, *self.declared.names]

    def is_fixed(self, name: str, key: str) -> bool:
        """Return whether a name denotes the program's own class; a script's classes are __main__.Net.

        Args:
            name: The name, or path.
            key: "model" or "data".
        """
        fixed = self.bases[key][0]
        own = getattr(fixed, "__qualname__", "")
        return fixed is not None and name in (f"{home_of(fixed)}.{own}", f"__main__.{own}", own)

    def class_of(self, key: str, value: Any) -> Any:
        """Return the class or function of the object at a key; None if none is named.

        Args:
            key: A top-level key.
            value: Its settings.

        Raises:
            ClassProblem: The named class does not exist.
        """
        if key == "trainer":
            return self.trainer_class
        fixed, base = self.bases.get(key, (self.declared.classes.get(key), object))
        chosen = value["class_path"] if is_class_node(value) else value
        if key in self.bases and isinstance(chosen, str) and not self.is_fixed(chosen, key):
            return find_class(chosen, fixed if isinstance(fixed, type) else base, self.trust_at(f"{key}.class_path"))
        return fixed

    def default_of(self, tree: SettingsTree, path: str) -> Any:
        """Return the default of a parameter; EMPTY without one.

        Args:
            tree: Settings.
            path: Dotted.
        """
        key, _, name = path.partition(".")
        if not name:
            return self.values[key].default if key in self.values else EMPTY
        try:
            target = self.class_of(key, tree.get(key))
        except ClassProblem:
            return EMPTY  # reported when the object is planned
        found = None if target is None else parameters_of(target).named.get(name.removeprefix("init_args."))
        return EMPTY if found is None else found.default
