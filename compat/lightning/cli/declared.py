"""What a `LightningArgumentParser` declares: groups of a class, values, links."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ....cli.parameters import EMPTY, Parameter
from ....errors import ConfigError
from ....yaml_file import parse_scalar

if TYPE_CHECKING:
    from ....cli.parameters import Parameter

__all__ = ["ClassGroup", "Link", "Value", "make_value", "without_options"]

# Any in this file: classes of users, and values of settings.

_FLAGS: Mapping[str, object] = {"store_true": True, "store_false": False}


@dataclass(frozen=True)
class ClassGroup:
    """Settings of an object below a key.

    Attributes:
        key: The key.
        target: Its class, or a function that makes it; with names_class, a class or several.
        names_class: Whether the user names the class.
        required: Whether one must be named.
        instantiate: Whether the object is made; otherwise its arguments are.
        skip: Parameters that are not settings.
    """

    key: str
    target: Any
    names_class: bool = False
    required: bool = True
    instantiate: bool = True
    skip: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Value:
    """A value.

    Attributes:
        parameter: Its key, type and default.
        options: Its names on the command line, as typed.
        nargs: As in argparse.
        action: As in argparse.
        const: Its value where the option is typed alone.
        convert: A function that makes the value of text; None where a type says what it is.
    """

    parameter: Parameter
    options: tuple[str, ...]
    nargs: str | int | None = None
    action: str = "store"
    const: object = None
    convert: Callable[[Any], object] | None = None


@dataclass(frozen=True)
class Link:
    """A setting that follows from others.

    Attributes:
        sources: Dotted keys.
        target: A dotted key, without `init_args`.
        compute: Makes the target's value of theirs; None takes the one's.
        on_instantiate: Whether the sources are attributes of objects.
    """

    sources: tuple[str, ...]
    target: str
    compute: Callable[..., Any] | None
    on_instantiate: bool

    def value(self, found: Sequence[Any]) -> Any:
        """Return the target's value for those of the sources."""
        return found[0] if self.compute is None else self.compute(*found)


def make_value(
    names: Sequence[str],
    *,
    type: Any = None,  # argparse's name
    default: Any = None,
    nargs: str | int | None = None,
    action: Any = "store",
    choices: Sequence[Any] | None = None,
    required: bool = False,
    const: object = None,
    dest: str | None = None,
    help: object = None,  # argparse's name
) -> Value:
    """Return the declaration of a value; arguments as for argparse's `add_argument`."""
    long = [name for name in names if name.startswith("--")] or list(names)
    key = (dest or long[0].lstrip("-")).replace("-", "_")
    convert = None
    kind: Any = str if type is None else type
    if choices is not None:
        kind = Literal[tuple(choices)]
    elif callable(type) and inspect.isroutine(type):
        kind, convert = Any, type
    if action in _FLAGS:
        kind, default, const = bool, (not _FLAGS[action] if default is None else default), _FLAGS[action]
    elif action not in ("store", None):
        raise ConfigError(
            f"Expected add_argument({names[-1]!r}) with action='store', 'store_true' or 'store_false', got {action!r}.",
            fix="declare a type, as in type=bool or type=list[int].",
        )
    if nargs in ("*", "+") or isinstance(nargs, int):
        kind = list[kind]
    is_required = required or not names[-1].startswith("-")
    if default is None and not is_required:
        kind = kind | None if kind is not Any else Any
    chosen = EMPTY if is_required and default is None else default
    return Value(Parameter(key, kind, chosen, str(help or "")), tuple(names), nargs, str(action), const, convert)


def without_options(tokens: Sequence[str], values: Sequence[Value]) -> list[str]:
    """Return a command line in which options of argparse are written as `--key=value`: flags, several values, `-s 3`.

    Args:
        tokens: What was typed.
        values: What is declared.
    """
    known = {option: one for one in values for option in one.options if option.startswith("-")}
    found: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        name, is_given, text = token.partition("=")
        one = known.get(name)
        if one is None:
            found.append(token)
            continue
        option = f"--{one.parameter.name}"
        if one.action in _FLAGS:
            found.append(f"{option}={json.dumps(one.const)}")
        elif is_given:
            found.append(f"{option}={text}")
        elif one.nargs == "?" and not _takes(rest):
            found.append(f"{option}={_text(one.const)}")
        elif one.nargs in (None, "?"):
            found += [f"{option}={rest.pop(0)}" if rest else option]
        else:
            several: list[str] = []
            while _takes(rest) and (not isinstance(one.nargs, int) or len(several) < one.nargs):
                several.append(rest.pop(0))
            found.append(f"{option}={json.dumps([_item(text, one.parameter.annotation) for text in several])}")
    return found


def _takes(rest: Sequence[str]) -> bool:
    """Return whether the next token is a value."""
    return bool(rest) and (not rest[0].startswith("-") or isinstance(parse_scalar(rest[0]), int | float))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _item(text: str, annotation: object) -> object:
    """Return one of several values; a text stays a text where texts are expected."""
    return text if "str" in str(annotation) else parse_scalar(text)
