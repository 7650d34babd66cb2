"""`Groups`: a program's settings besides trainer, model and data, declared in `CLI.add_arguments`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..settings.parameters import EMPTY, Parameter
from ..settings.tree import WRONG, SettingsTree
from .sources import PREFIX, SHORT_PREFIX

TYPED = ("command line", PREFIX, SHORT_PREFIX)
"""Prefixes of sources that apply to this run only."""

# Any in this file: values of settings and the user's classes.


@dataclass(frozen=True)
class _Link:
    sources: tuple[str, ...]
    target: str
    compute: Callable[..., Any] | None
    after_build: bool

    def value(self, found: Sequence[object]) -> Any:
        return found[0] if self.compute is None else self.compute(*found)


class Groups:
    """Further settings of a program: classes, values, defaults, and links between them.

    Args:
        reserved: Names that are taken.
    """

    def __init__(self, reserved: Sequence[str] = ()) -> None:
        self._lw_reserved = tuple(reserved)
        self._lw_links: list[_Link] = []
        self.classes: dict[str, Callable[..., object]] = {}
        self.required: set[str] = set()
        self.values: dict[str, Parameter] = {}
        self.defaults: SettingsTree = {}

    @property
    def names(self) -> list[str]:
        """All declared top-level keys."""
        return [*self.classes, *self.values]

    def add_class(self, name: str, target: Callable[..., object], *, required: bool = True) -> None:
        """Declare an object with its parameters below `name`. A callback is added to the trainer.

        Args:
            name: The key.
            target: Class of the object, or a function that creates it.
            required: Whether the object is created if no setting names it.
        """
        self._lw_check_free(name)
        self.classes[name] = target
        if required:
            self.required.add(name)

    def add_value(self, name: str, kind: object = Any, default: object = EMPTY, text: str = "") -> None:
        """Declare a value.

        Args:
            name: The key.
            kind: Type of the value.
            default: Default value. Without one, the value is required.
            text: Description for --help.
        """
        self._lw_check_free(name)
        self.values[name] = Parameter(name, kind, default, text)

    def set_defaults(self, values: SettingsTree) -> None:
        """Set defaults, which files and the command line may change.

        Args:
            values: Dotted key -> value, as in {"trainer.max_epochs": 3}.
        """
        self.defaults.update(values)

    def link(
        self,
        source: str | Sequence[str],
        target: str,
        compute: Callable[..., Any] | None = None,
        *,
        after_build: bool = False,
    ) -> None:
        """Compute one setting from others; the user cannot set it then.

        Args:
            source: Dotted keys, such as "data.batch_size". With after_build, attributes of objects: "data.num_classes".
            target: Dotted key of the computed setting.
            compute: Function of the sources' values that returns the target's value; None copies the only source.
            after_build: Whether the values are taken from the created objects.
        """
        sources = (source,) if isinstance(source, str) else tuple(source)
        if compute is None and len(sources) != 1:
            raise ConfigError(
                f"Expected one source for the link to {target}, got {len(sources)}.", fix="pass compute=."
            )
        self._lw_links.append(_Link(sources, target, compute, after_build))

    # -- for CLI -------------------------------------------------------------------------------------------------

    def linked(self, key: str) -> frozenset[str]:
        """Return the parameters of a group that links set after objects are created."""
        return frozenset(
            one.target.partition(".")[2]
            for one in self._lw_links
            if one.after_build and one.target.startswith(f"{key}.")
        )

    def with_links(
        self, tree: SettingsTree, default: Callable[[str], Any], origin: Callable[[str], str]
    ) -> tuple[SettingsTree, list[str]]:
        """Return settings with links applied, and the replaced values.

        Args:
            tree: The settings; they are changed.
            default: Returns the value of a dotted key that is not set, EMPTY if it has none.
            origin: Returns the source of a dotted key.

        Raises:
            ConfigError: The user set a target, or a source is not set.
        """
        replaced = []
        for one in self._lw_links:
            is_set = _has(tree, one.target)
            if is_set and origin(one.target).startswith(TYPED):
                raise ConfigError(
                    f"Expected {one.target} to be unset, since it follows from {', '.join(one.sources)}.",
                    fix=f"omit {one.target}.",
                )
            # A saved configuration contains the computed values of its run.
            before = _taken(tree, one.target) if is_set else EMPTY
            if one.after_build:
                continue
            found = [_at(tree, source, default) for source in one.sources]
            value = WRONG if any(part is WRONG for part in found) else one.value(found)
            if before is not EMPTY and before != value:
                replaced.append(f"{one.target}={before!r} becomes {value!r}: it follows from {', '.join(one.sources)}")
            put(tree, one.target, value)
        return tree, replaced

    def copies(self) -> list[tuple[str, str]]:
        """Return (source, target) of the links that copy a setting."""
        return [(one.sources[0], one.target) for one in self._lw_links if one.compute is None and not one.after_build]

    def order(self, keys: Sequence[str]) -> list[str]:
        """Return groups in an order in which links find their sources.

        Raises:
            ConfigError: Links form a cycle.
        """
        needs = {key: set() for key in keys}  # type: dict[str, set[str]]
        for one in self._lw_links:
            if one.after_build:
                needs[one.target.partition(".")[0]] |= {source.partition(".")[0] for source in one.sources}
        ordered: list[str] = []
        while len(ordered) < len(keys):
            ready = [key for key in keys if key not in ordered and needs[key] <= set(ordered)]
            if not ready:
                rest = ", ".join(key for key in keys if key not in ordered)
                raise ConfigError(
                    f"Expected links without cycles, got a cycle between {rest}.", fix="remove one of them."
                )
            ordered.append(ready[0])
        return ordered

    def linked_values(self, key: str, built: dict[str, Any]) -> dict[str, object]:
        """Return parameters of a group that are computed from objects."""
        found = {}
        for one in self._lw_links:
            if one.after_build and one.target.startswith(f"{key}."):
                values = []
                for source in one.sources:
                    group, *parts = source.split(".")
                    value = built[group]
                    for part in parts:
                        value = getattr(value, part)
                    values.append(value)
                found[one.target.partition(".")[2]] = one.value(values)
        return found

    def _lw_check_free(self, name: str) -> None:
        if name in self._lw_reserved or name in self.names or not name.isidentifier():
            raise ConfigError(f"Expected an unused name for a setting, got {name!r}.", fix="choose another name.")


def _node(tree: SettingsTree, key: str) -> Any:
    node = tree.get(key)
    return node["init_args"] if isinstance(node, dict) and "class_path" in node else node


def _has(tree: dict[str, object], path: str) -> bool:
    key, _, name = path.partition(".")
    node = _node(tree, key)
    return (isinstance(node, dict) and name in node) if name else key in tree


def _taken(tree: SettingsTree, path: str) -> object:
    key, _, name = path.partition(".")
    return _node(tree, key).pop(name) if name else tree.pop(key)


def _at(tree: SettingsTree, path: str, default: Callable[[str], object]) -> object:
    key, *parts = path.split(".")
    if parts:
        node = _node(tree, key)
    else:  # the full setting, with its class
        node = tree[key] if key in tree else default(path)
    for part in parts:
        if not isinstance(node, dict) or part not in node:
            node = default(path)
            break
        node = node[part]
    if node is EMPTY:
        raise ConfigError(
            f"Expected a value of {path}, from which another setting follows, got none.", fix=f"set {path}."
        )
    return node


def put(tree: SettingsTree, path: str, value: object) -> None:
    """Set a value at a dotted key; for a class, among its arguments."""
    key, *parts = path.split(".")
    if not parts:
        tree[key] = value
        return
    if tree.get(key) is None:
        tree[key] = {}
    elif isinstance(tree[key], str):
        tree[key] = {"class_path": tree[key], "init_args": {}}
    node = _node(tree, key)
    for part in parts[:-1]:
        node = node.setdefault(part, {})
    node[parts[-1]] = value
