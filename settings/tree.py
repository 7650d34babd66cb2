"""The tree of settings, merged from several sources, with the source of each value.

A node that names a class has one form in here: `class_path`, with arguments below `init_args`. Hydra's `_target_` is
brought into it, and `model.lr` reaches `model.init_args.lr`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeAlias

from ..errors import ConfigError, nearest
from .names import Trust

# Any in this file: settings are YAML values.

CLASS_KEYS = ("model", "data", "optimizer", "lr_scheduler")
"""Top-level keys whose text is a class name."""

SettingsTree: TypeAlias = dict[str, Any]
"""Settings in the form that `Settings` describes: dicts and lists, nested, and values of YAML."""

WRONG: Any = object()
"""Marker of an invalid value, whose problem has been recorded."""

_NODE = ("class_path", "init_args")
_INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_OF_RESOLVER = re.compile(r"^\w+ raised while resolving interpolation: ")


def is_class_node(value: object) -> bool:
    """Return whether a value names a class and its arguments."""
    return isinstance(value, dict) and "class_path" in value


@dataclass
class Settings:
    """Settings of several sources; later ones override earlier ones.

    Attributes:
        tree: Nested dicts and lists in the form that this file describes.
        origins: Dotted path to the name of the source that set it last.
        lines: Name of a source to its lines, by dotted path without `init_args`.
        texts: Dotted path to what was typed, for values of the command line and of environment variables: text that
            looks like a number is text again where text is expected.
        stale: Dotted paths of arguments that were given for another class than the one that is chosen now.
        grown: Dotted paths of lists that were only added to: they extend the parameter's default.
        problems: What is wrong with the sources.
        trusts: Source -> what it may name, for files from unknown sources.
    """

    tree: SettingsTree = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    lines: dict[str, dict[str, int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    grown: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    trusts: dict[str, Trust] = field(default_factory=dict)
    _has_dots: bool = False

    def lay(
        self, values: SettingsTree, source: str, trust: Trust | None = None, lines: Mapping[str, int] | None = None
    ) -> None:
        """Merge the content of a file over the current settings.

        Args:
            values: The content.
            source: Name of the file.
            trust: What it may name; None if the user has written it.
            lines: Dotted path to its line, for messages.
        """
        known = self.lines.setdefault(source, {})
        for path, line in (lines or {}).items():
            known.setdefault(_shown(path), line)  # of a class: the line of its key, not of its init_args
        if trust is not None:
            self.trusts[source] = trust
            self._has_dots = self._has_dots or _has_dots(values)
        self.tree = self._merged(self.tree, class_nodes(values), "", source)

    def assign(self, path: str, value: object, source: str, *, text: str | None = None, appends: bool = False) -> None:
        """Set one value, as `trainer.max_epochs=3` does.

        Args:
            path: Dotted; numbers are places in lists.
            value: The value.
            source: Where it came from.
            text: What was typed.
            appends: Add it to the list that is there; a list adds each of its entries.
        """
        if appends:
            self._append(path, value, source, text)
            return
        nested: Any = value
        for part in reversed(path.split(".")):
            nested = class_nodes({part: nested})
        self.tree = self._merged(self.tree, nested, "", source)
        if text is not None:
            self.texts[self.route(path)] = text

    def _append(self, path: str, value: object, source: str, text: str | None) -> None:
        routed, there = self.route(path), _as_list(self._at(path))
        is_grown = routed in self.grown or routed not in self.origins
        kept = [
            (own, {one: own[one] for one in own if one.startswith(f"{routed}.")}) for own in (self.origins, self.texts)
        ]
        self.assign(path, [*there, *_as_list(value, of_null=[None])], source)
        for own, before in kept:
            own.update(before)
        routed = self.route(path)
        if text is not None and not isinstance(value, list):
            self.texts[f"{routed}.{len(there)}"] = text
        if is_grown:
            self.grown.add(routed)

    def remove(self, path: str) -> None:
        """Remove a setting, as if no source had given it."""
        *above, last = self.route(path).split(".")
        node: Any = self.tree
        for part in above:
            node = _step(node, part)
        if not isinstance(node, dict) or last not in node:
            raise ConfigError(f"Expected a setting to remove, got ~{path}, which is not set.", fix=f"omit ~{path}.")
        del node[last]

    def route(self, path: str) -> str:
        """Return the path in this form: `model.lr` becomes `model.init_args.lr` where the model names its class."""
        node: Any = self.tree
        parts: list[str] = []
        for part in path.split("."):
            if is_class_node(node) and part not in _NODE:
                parts.append("init_args")
                node = node.get("init_args")
                if part == "dict_kwargs":  # Lightning's key for arguments that are passed on
                    continue
            parts.append(part)
            node = _step(node, part)
        return ".".join(parts)

    def origin(self, path: str) -> str:
        """Return the source of a setting, or of its nearest parent; empty for defaults."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return ""

    def named(self, path: str, at: str | None = None) -> str:
        """Return a path and where it was set, as messages name them: `model.lr (base.yaml:3)`.

        Args:
            path: The path.
            at: The path whose source is named, if it is another one.
        """
        path, at = _shown(path), path if at is None else at
        source = self.origin(at)
        if not source:
            return path
        lines, place = self.lines.get(source, {}), _shown(at)
        while place and place not in lines:
            place = place.rpartition(".")[0]
        file, comma, section = source.partition(", section ")
        return f"{path} ({file}:{lines[place]}{comma}{section})" if place else f"{path} ({source})"

    def trust_at(self, path: str) -> Trust | None:
        """Return what the value at a path may name; None if the user has written it.

        What follows from other settings counts as a file's; and everything does if keys in the file have dots, since a
        path does not show then from which source its value is.
        """
        if not self.trusts:
            return None
        source = "" if self._has_dots else self.origin(path)
        return self.trusts.get(source) if source else next(iter(self.trusts.values()))

    def has(self, path: str) -> bool:
        """Return whether a path is set."""
        node: Any = self.tree
        for part in self.route(path).split("."):
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                return False
        return True

    def note(self, path: str, what: str) -> None:
        """Record a problem at a path."""
        self.problems.append(f"{self.named(path)}: {what}")

    def _at(self, path: str) -> object:
        node: Any = self.tree
        for part in self.route(path).split("."):
            node = _step(node, part)
        return node

    def _merged(self, base: Any, over: Any, path: str, source: str) -> Any:
        if not path:
            return self._into_dict(dict(base), over, "", source)
        key = path.rpartition(".")[2]
        # A trainer's strategy, logger and profiler may be names, which a later source gives arguments.
        if isinstance(over, dict) and isinstance(base, str):
            base = {"class_path": base, "init_args": {}}
        if isinstance(over, str) and (is_class_node(base) or (isinstance(base, dict) and key in CLASS_KEYS)):
            over = {"class_path": over, "init_args": {}}
        if isinstance(over, dict) and isinstance(base, dict):
            if not is_class_node(base) and (is_class_node(over) or set(over) == {"init_args"}):
                base = base if set(base) == {"init_args"} else {"init_args": base}
            if is_class_node(base) or set(base) == {"init_args"}:
                return self._class_node(base, over, path, source)
            return self._into_dict(dict(base), over, path, source)
        if isinstance(over, dict) and isinstance(base, list) and base and over:
            return self._into_list(list(base), over, path, source)
        self._forget(path)
        self._note(over, path, source)
        return over

    def _into_dict(self, base: SettingsTree, over: dict[str, object], path: str, source: str) -> dict[str, object]:
        for key, value in over.items():
            below = f"{path}.{key}" if path else str(key)
            if key in base:
                base[key] = self._merged(base[key], value, below, source)
            else:
                base[key] = value
                self._note(value, below, source)
        return base

    def _class_node(self, base: SettingsTree, over: SettingsTree, path: str, source: str) -> dict[str, object]:
        node = dict(base)
        arguments = dict(over.get("init_args") or {})
        if "class_path" in over:
            if over["class_path"] != base.get("class_path"):
                self.stale |= {f"{path}.init_args.{key}" for key in base.get("init_args") or {} if "class_path" in base}
            node["class_path"] = over["class_path"]
            self.origins[f"{path}.class_path"] = source
        arguments.update(over.get("dict_kwargs") or {})
        apart = (*_NODE, "partial", "dict_kwargs")
        arguments.update({key: value for key, value in over.items() if key not in apart})
        if "partial" in over:
            node["partial"] = over["partial"]
        node["init_args"] = self._into_dict(dict(base.get("init_args") or {}), arguments, f"{path}.init_args", source)
        self.stale -= {f"{path}.init_args.{key}" for key in arguments}
        return node

    def _into_list(self, base: list[object], over: dict[str, object], path: str, source: str) -> list[object]:
        """Change items by index; other keys are arguments of the last item, as in Lightning's command line."""
        for key, value in over.items():
            place, below = (int(key), value) if key.isdigit() else (len(base) - 1, {key: value})
            if place >= len(base):
                raise ConfigError(
                    f"{path}.{key} ({source}): the list has {len(base)} entries.", fix=f"use {path}+=VALUE to add one."
                )
            base[place] = self._merged(base[place], below, f"{path}.{place}", source)
        return base

    def _forget(self, path: str) -> None:
        for kept in (self.origins, self.texts):
            for one in [one for one in kept if one == path or one.startswith(f"{path}.")]:
                del kept[one]
        self.stale = {one for one in self.stale if not one.startswith(f"{path}.")}
        self.grown = {one for one in self.grown if one != path and not one.startswith(f"{path}.")}

    def _note(self, value: object, path: str, source: str) -> None:
        self.origins[path] = source
        self.texts.pop(path, None)
        for key, below in _items(value):
            self._note(below, f"{path}.{key}", source)


def resolve(settings: Settings, default: Callable[[SettingsTree, str], Any]) -> SettingsTree:
    """Return the tree with interpolations (`${trainer.max_epochs}`, `${oc.env:HOME}`) replaced, by OmegaConf.

    One that leads nowhere, or a value that is `???`, is WRONG then, and noted in `settings.problems`.

    Args:
        settings: The settings.
        default: Returns the value of a parameter that no source sets, EMPTY if it has none; of the tree and its path.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    routing = _Routing(settings, default)
    container = OmegaConf.create(routing.routed(settings.tree, ""))
    for path in routing.borrowed:
        OmegaConf.update(container, settings.route(path), default(settings.tree, path), force_add=True)
    try:
        found = OmegaConf.to_container(container, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError):
        found = _each(container, "", settings)
    assert isinstance(found, dict)
    for path in routing.borrowed:
        _drop(found, settings.route(path).split("."))
    for path in routing.broken:
        *above, last = path.split(".")
        node: Any = found
        for part in above:
            node = _step(node, part)
        node[int(last) if isinstance(node, list) else last] = WRONG
    return {str(key): value for key, value in found.items()}


def escaped(value: object) -> object:
    """Return settings that `resolve` maps to these: what means something else in a text is escaped for OmegaConf."""
    if isinstance(value, str):
        return _escape(value) if "${" in value else _escape_marks(value) if value.endswith("\\???") else value
    if isinstance(value, dict):
        return {key: escaped(below) for key, below in value.items()}
    return [escaped(below) for below in value] if isinstance(value, list | tuple) else value


def _escape(text: str) -> str:
    # Backslashes matter only before an interpolation; in OmegaConf 2.3 also at the end of such a text.
    once = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", text)
    end = len(text) - len(text.rstrip("\\"))
    if not end:
        return once
    from omegaconf import OmegaConf  # not imported where nothing is escaped

    is_same = OmegaConf.create({"text": once}).text == text
    return once if is_same else once + end * "\\"


def _escape_marks(text: str) -> str:
    # Backslashes before nothing but ???: OmegaConf 2.4 takes the first one as an escape, 2.3 has none.
    from omegaconf import OmegaConf  # not imported where nothing is escaped

    return text if OmegaConf.create({"text": text}).text == text else f"\\{text}"


class _Routing:
    """Rewrites interpolations to the actual paths.

    Args:
        settings: The settings.
        default: See `resolve`.

    Attributes:
        borrowed: Dotted paths of parameters whose defaults are referred to.
        broken: Dotted paths of texts that OmegaConf cannot read.
    """

    def __init__(self, settings: Settings, default: Callable[[SettingsTree, str], Any]) -> None:
        self.borrowed: list[str] = []
        self.broken: list[str] = []
        self._settings = settings
        self._default = default

    def routed(self, value: object, path: str) -> Any:
        """Return the value at a path."""
        if isinstance(value, str):
            return self._text(_INTERPOLATION.sub(self._place, value), path) if "${" in value else value
        if isinstance(value, dict):
            return {key: self.routed(below, f"{path}.{key}" if path else str(key)) for key, below in value.items()}
        if isinstance(value, list):
            return [self.routed(below, f"{path}.{number}") for number, below in enumerate(value)]
        return value

    def _place(self, found: re.Match[str]) -> str:
        path = found[1]
        if path not in self.borrowed and not self._settings.has(path):
            value = self._default(self._settings.tree, path)
            if isinstance(value, str | int | float | bool | NoneType):
                self.borrowed.append(path)
        return "${" + self._settings.route(path) + "}"

    def _text(self, text: str, path: str) -> str | None:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            OmegaConf.create({"text": text})
        except OmegaConfBaseException as error:
            what = str(getattr(error, "msg", None) or error).splitlines()[0]
            self._settings.note(path, f"{what}; write \\${{ where no interpolation is meant")
            self.broken.append(path)
            return None
        return text


def _drop(node: Any, parts: list[str]) -> None:
    """Remove a temporary default and the containers created for it."""
    below = node.get(parts[0])
    if len(parts) > 1 and isinstance(below, dict):
        _drop(below, parts[1:])
        if below:
            return
    node.pop(parts[0], None)


def _each(container: Any, path: str, settings: Settings) -> object:
    """Return the entries of a container, and record each that cannot be resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    is_dict = OmegaConf.is_dict(container)
    found: dict[Any, Any] = {}
    for key in container if is_dict else range(len(container)):
        below = f"{path}.{key}" if path else str(key)
        try:
            if OmegaConf.is_missing(container, key):
                settings.note(below, "must be given (it is ???)")
                found[key] = WRONG
                continue
            value = container[key]
            if not OmegaConf.is_config(value):
                found[key] = value
            elif OmegaConf.is_interpolation(container, key):
                found[key] = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            else:
                found[key] = _each(value, below, settings)
        except (OmegaConfBaseException, RecursionError) as error:
            settings.note(below, _explained(error, settings))
            found[key] = WRONG
    return found if is_dict else list(found.values())


def _explained(error: Exception, settings: Settings) -> str:
    if isinstance(error, RecursionError):
        return "it refers to itself"
    what = str(getattr(error, "msg", None) or error).splitlines()[0].rstrip(".")
    what = _OF_RESOLVER.sub("", what).strip('"')
    unknown = re.search(r"Interpolation key '([^']*)' not found", what)
    if unknown is not None:
        known = [one.replace(".init_args", "") for one in settings.origins]
        return what + nearest(unknown[1].replace(".init_args", ""), known)
    return what


def class_nodes(value: object) -> Any:
    """Return settings in this file's form: `_target_` and its siblings, or `dict_kwargs`, become a class node."""
    if isinstance(value, list | tuple):
        return [class_nodes(below) for below in value]
    if not isinstance(value, dict):
        return value
    node = {str(key): class_nodes(below) for key, below in value.items()}
    if "_target_" in node:
        if node.get("_args_"):
            raise ConfigError(f"Expected named arguments of {node['_target_']}, got _args_.", fix="write name: value.")
        dropped = ("_target_", "_args_", "_convert_", "_recursive_", "_partial_")
        arguments = {key: below for key, below in node.items() if key not in dropped}
        found = {"class_path": node["_target_"], "init_args": arguments}
        return {**found, "partial": True} if node.get("_partial_") else found
    if "class_path" in node:
        more = {key: below for key, below in node.items() if key not in (*_NODE, "dict_kwargs", "partial")}
        arguments = {**(node.get("init_args") or {}), **(node.get("dict_kwargs") or {}), **more}
        found = {"class_path": node["class_path"], "init_args": arguments}
        return {**found, "partial": True} if node.get("partial") else found
    return node


def _shown(path: str) -> str:
    return path.replace(".init_args", "").replace(".dict_kwargs", "")


def _items(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _has_dots(value: object) -> bool:
    return any((isinstance(key, str) and "." in key) or _has_dots(below) for key, below in _items(value))


def _step(node: object, part: str) -> Any:
    if isinstance(node, list):
        return node[int(part)] if part.isdigit() and int(part) < len(node) else None
    return node.get(part) if isinstance(node, dict) else None


def _as_list(value: object, of_null: list[Any] | None = None) -> list[object]:
    if value is None:
        return of_null or []
    return list(value) if isinstance(value, list) else [value]
