"""`Namespace`: the configuration of a LightningCLI, whose entries are attributes and dotted keys."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Namespace", "to_namespace", "to_plain"]

# Any in this file: values of settings.

_NOTHING = object()


class Namespace(argparse.Namespace):
    """A configuration. `config.model.width`, `config["model.width"]` and `config.get("model.width")` are the same.

    Args:
        entries: A mapping of the entries, or another namespace.
        more: Entries.
    """

    def __init__(self, entries: Mapping[str, Any] | argparse.Namespace | None = None, **more: Any) -> None:
        super().__init__()
        given = vars(entries) if isinstance(entries, argparse.Namespace) else entries or {}
        for key, value in {**given, **more}.items():
            self[key] = value

    def __getitem__(self, key: str) -> Any:
        found = self.get(key, _NOTHING)
        if found is _NOTHING:
            raise KeyError(key)
        return found

    def __setitem__(self, key: str, value: object) -> None:
        node: Any = self
        *above, last = key.split(".")
        for part in above:
            below = _at(node, part)
            if not isinstance(below, dict | argparse.Namespace):
                below = Namespace()
                _put(node, part, below)
            node = below
        _put(node, last, value)

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key, _NOTHING) is not _NOTHING

    def __bool__(self) -> bool:
        return bool(vars(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, argparse.Namespace) and to_plain(self) == to_plain(other)

    __hash__ = None  # it can be changed

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(vars(self))

    def get(self, key: str, default: Any = None) -> Any:
        """Return what stands at a dotted key."""
        node: Any = self
        for part in key.split("."):
            node = _at(node, part)
            if node is _NOTHING:
                return default
        return node

    def pop(self, key: str, default: Any = _NOTHING) -> Any:
        """Take out what stands at a dotted key, and return it."""
        above, _, last = key.rpartition(".")
        node = self.get(above) if above else self
        found = _at(node, last)
        if found is not _NOTHING:
            del (node if isinstance(node, dict) else vars(node))[last]
            return found
        if default is _NOTHING:
            raise KeyError(key)
        return default

    def keys(self, branches: bool = False) -> Iterator[str]:
        """Yield the dotted keys of values; with branches, also those of the namespaces that they stand in."""
        return (key for key, _ in self.items(branches))

    def values(self, branches: bool = False) -> Iterator[Any]:
        """Yield the values."""
        return (value for _, value in self.items(branches))

    def items(self, branches: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield dotted keys and values; with branches, also of the namespaces that they stand in."""
        for key, value in vars(self).items():
            if not isinstance(value, Namespace):
                yield key, value
                continue
            if branches:
                yield key, value
            for below, inner in value.items(branches):
                yield f"{key}.{below}", inner

    def update(self, value: Any, key: str | None = None, only_unset: bool = False) -> Namespace:
        """Set entries of another namespace or mapping, or one value at a key; return this one."""
        if key is not None and not isinstance(value, Mapping | argparse.Namespace):
            if not only_unset or key not in self:
                self[key] = value
            return self
        given = value if isinstance(value, Namespace) else Namespace(value)
        for name, one in given.items():
            path = f"{key}.{name}" if key else name
            if not only_unset or path not in self:
                self[path] = one
        return self

    def clone(self) -> Namespace:
        """Return a copy; values are shared unless they are namespaces, dicts or lists."""
        return Namespace({key: _cloned(value) for key, value in vars(self).items()})

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain dicts."""
        found: dict[str, Any] = to_plain(self)
        return found

    def as_flat(self) -> argparse.Namespace:
        """Return a namespace whose names are the dotted keys."""
        return argparse.Namespace(**dict(self.items()))


def _at(node: Any, part: str) -> Any:
    if isinstance(node, argparse.Namespace):
        return vars(node).get(part, _NOTHING)
    return node.get(part, _NOTHING) if isinstance(node, dict) else _NOTHING


def _put(node: Any, part: str, value: object) -> None:
    (node if isinstance(node, dict) else vars(node))[part] = value


def _cloned(value: Any) -> Any:
    if isinstance(value, Namespace):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(one) for key, one in value.items()}
    return [_cloned(one) for one in value] if isinstance(value, list) else value


def to_plain(value: Any) -> Any:
    """Return a configuration as plain dicts and lists."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return {key: to_plain(below) for key, below in value.items()}
    return [to_plain(one) for one in value] if isinstance(value, list) else value


def to_namespace(value: Any, *, is_group: bool = True) -> Any:
    """Return settings as a configuration: groups and classes with arguments are namespaces, other mappings are dicts.

    Args:
        value: The settings.
        is_group: Whether this mapping is a group.
    """
    if isinstance(value, dict):
        below = {key: to_namespace(one, is_group=False) for key, one in value.items()}
        if "class_path" in below and isinstance(below.get("init_args"), dict):
            below["init_args"] = Namespace(below["init_args"])
        return Namespace(below) if is_group or "class_path" in below else below
    return [to_namespace(one, is_group=False) for one in value] if isinstance(value, list) else value
