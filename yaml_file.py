"""YAML for configuration files: what looks like text stays text.

YAML 1.1, which PyYAML reads, takes `no` and `on` for booleans, `12:30:00` for 45000 and `1e-3` for text. Here scalars
are those of YAML 1.2, and a key that stands twice is an error.

A file may come from an unknown source. It creates plain values only, and its size, its depth and what its aliases
expand to are limited, so that reading it ends.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, nearest

# Any in this file: the content of a document.


_LONGEST = 1 << 24  # characters
_DEEPEST = 64
MOST_VALUES = 200_000  # what uses the values visits an aliased one as often as it is named


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML is not annotated
    yaml_implicit_resolvers: dict[str, object] = {}

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise yaml.MarkedYAMLError(problem=f"it has {len(text):,} characters; at most {_LONGEST:,} are read")
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        """Return the next node, within the limits."""
        mark = self.peek_event().start_mark
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"it nests deeper than {_DEEPEST} levels", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and node not in self._sizes:
            raise yaml.MarkedYAMLError(problem="the value contains itself", problem_mark=mark)
        if not is_alias:
            below = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = (part for entry in below for part in (entry if isinstance(entry, tuple) else (entry,)))
            self._sizes[node] = 1 + sum(self._sizes[part] for part in parts)
        if self._sizes[node] > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"it has more than {MOST_VALUES:,} values", problem_mark=mark)
        return node


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.?(?:inf|Inf|INF)|\.?(?:nan|NaN|NAN)",
        "-+0123456789.iInN",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text, 16) if "0x" in text else int(text)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[object, object]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node)
        if not isinstance(key, Hashable):
            raise yaml.MarkedYAMLError(problem=f"{key!r} cannot be a key", problem_mark=key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"duplicate key {key!r}", problem_mark=key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value
    }


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # as above
    """Writes text that this reader and YAML 1.1 readers read alike."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    if not text.replace("\n", "").isprintable():
        return dumper.represent_scalar(
            "tag:yaml.org,2002:str", text, style='"'
        )  # which escapes characters that others would fold
    is_plain = isinstance(parse_scalar(text), str) and not re.fullmatch(r"[-+0-9_:.eE]+", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else "'")


_Dumper.add_representer(str, _text)


def _load(text: str) -> tuple[Any, yaml.Node | None]:
    """Return the content of a document, and its root.

    Raises:
        YAMLError: It is not valid.
    """
    try:
        loader = _Loader(text)  # a SafeLoader: it creates plain values only
        root = loader.get_single_node()
        return (None if root is None else loader.construct_document(root)), root
    except (ValueError, KeyError, AttributeError) as error:  # a value that does not fit its tag: !!int "x"
        raise yaml.MarkedYAMLError(problem=f"a value cannot be read ({error})") from error


def parse(text: str, where: str) -> Any:
    """Return the content of a YAML document.

    Args:
        text: The document.
        where: Its name in errors.

    Raises:
        ConfigError: It is not valid YAML; with the line.
    """
    return _parse(text, where)[0]


def _parse(text: str, where: str) -> tuple[Any, yaml.Node | None]:
    try:
        return _load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"{where}{place}: {problem}.", fix="write YAML: key: value, indented by two spaces below a key."
        ) from None


def parse_scalar(text: str) -> object:
    """Return the value of the text after `=` on the command line: a number, `[1, 2]`, `{a: 1}`, null, or text."""
    try:
        return _load(text)[0]
    except yaml.YAMLError:
        return text  # a path with `: `, a pattern with brackets


def read(path: Path) -> dict[str, Any]:
    """Return the mapping in a file; an empty file is an empty mapping.

    Raises:
        ConfigError: There is no such file, or it holds something else.
    """
    return read_with_lines(path)[0]


def read_with_lines(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping in a file, as `read`, and dotted path -> line of each of its keys and list entries."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LONGEST + 1)  # one more than is accepted
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        beside = [one.name for one in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ConfigError(
            f"the configuration file {path} cannot be read: {reason}{nearest(path.name, beside)}.",
            fix="pass a YAML file.",
        ) from None
    found, root = _parse(text, str(path))
    if found is None:
        return {}, {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(
            f"the configuration file {path} must be a mapping with names as keys, got {type(found).__name__}.",
            fix="write `trainer:` and, indented by two spaces on the next line, `max_epochs: 3`.",
        )
    return found, dict(_lines(root, ""))


def _lines(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    """Yield dotted path and line of each key and list entry below a node."""
    if isinstance(node, yaml.ScalarNode):
        return
    if isinstance(node, yaml.MappingNode):
        entries = [(key.value, key, value) for key, value in node.value]
    else:
        entries = [(number, value, value) for number, value in enumerate(node.value)]
    for name, start, value in entries:
        below = f"{path}.{name}" if path else str(name)
        yield below, start.start_mark.line + 1
        yield from _lines(value, below)


def write(value: object) -> str:
    """Return a value as YAML, in the order of its keys."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text
