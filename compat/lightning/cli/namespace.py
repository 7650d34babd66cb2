"""`Namespace`: the configuration of a LightningCLI, whose entries are attributes, too."""

from __future__ import annotations

from typing import Any

__all__ = ["Namespace", "to_namespace", "to_plain"]

# Any in this file: values of settings.


class Namespace(dict[str, Any]):
    """A configuration whose entries are attributes, too; `config.get("model.width")` looks deeper."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r}; it has {', '.join(self)}.") from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __missing__(self, key: str) -> object:
        found = self.get(key, _NOTHING)
        if found is _NOTHING:
            raise KeyError(key)
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """Return what stands at a dotted path."""
        node: Any = self
        for part in key.split("."):
            if not isinstance(node, dict) or not dict.__contains__(node, part):
                return default
            node = dict.__getitem__(node, part)
        return node

    def as_dict(self) -> dict[str, object]:
        """Return it as plain dicts."""
        found: dict[str, Any] = to_plain(self)
        return found


_NOTHING = object()


def to_plain(value: object) -> Any:
    """Return a configuration as plain dicts and lists."""
    if isinstance(value, dict):
        return {key: to_plain(below) for key, below in value.items()}
    return [to_plain(one) for one in value] if isinstance(value, list) else value


def to_namespace(value: object) -> Any:
    """Return a configuration whose dicts are Namespaces."""
    if isinstance(value, dict):
        return Namespace({key: to_namespace(below) for key, below in value.items()})
    return [to_namespace(one) for one in value] if isinstance(value, list) else value
