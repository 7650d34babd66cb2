"""Conversion of values to annotated types. Problems are collected, so that all are reported at once.

Nothing is made here: a class with arguments becomes an `ObjectPlan`, which build.py carries out if all is right.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union

from ..lazy import is_core, origin
from ..yaml_file import read
from .names import ClassProblem, NotTrusted, Trust, find_class, import_object
from .parameters import EMPTY, Parameter, parameters_of
from .tree import WRONG, Settings, SettingsTree, class_nodes, is_class_node

# Any in this file: values of settings, and annotations.

_LISTS = (
    list,
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
    collections.abc.MutableSequence,
)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_TIMES = {date: "2026-12-31", datetime: "2026-12-31T23:59:00", time: "23:59:00"}
_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


@dataclass
class ObjectPlan:
    """An object to create: a class or function with its arguments.

    Attributes:
        target: The class or function.
        arguments: By name; plans may stand in them, also within lists and dicts.
        path: Where it stands in the settings.
        is_partial: Whether to return a function that creates the object when it is called with the other arguments.
    """

    target: Callable[..., object]
    arguments: dict[str, Any]
    path: str
    is_partial: bool = False


@dataclass
class Typed:
    """Converts values; `problems` has a line for each mismatch.

    Attributes:
        settings: Where the values come from.
        problems: What is wrong so far.
        skipped: Paths of arguments that were dropped, since the class that is chosen now does not take them.
        log_folder: What a logger gets as `save_dir` where nothing is said.
        fills_untyped: Whether parameters without type and default get None where nothing is said.
        refused: Paths at which a file from an unknown source names what it must not.
    """

    settings: Settings
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    log_folder: str | None = None
    fills_untyped: bool = False
    refused: list[str] = field(default_factory=list)

    def plan(
        self, target: Callable[..., object], values: SettingsTree, path: str, *, given: frozenset[str] = frozenset()
    ) -> ObjectPlan:
        """Return a plan for a class with these arguments.

        Args:
            target: The class or function.
            values: Its arguments, as they stand in the settings.
            path: Where they stand.
            given: Names of arguments that come from elsewhere: links, or a caller of the function.
        """
        known = parameters_of(target)
        arguments: dict[str, Any] = {}
        if "save_dir" in known.named and not {"save_dir", "root_dir"} & set(values) and _is_logger(target):
            values = {"save_dir": self.log_folder or os.getcwd(), **values}
        values = with_class_defaults(known.named, values, lambda name: self._trust(f"{path}.{name}" if path else name))
        if self.fills_untyped:
            untyped = [
                name for name, one in known.named.items()
                if one.is_required and not one.is_annotated and name not in given
            ]  # fmt: skip
            values = {**dict.fromkeys(untyped), **values}
        for name, value in values.items():
            where = f"{path}.{name}" if path else name
            if name not in known.named:
                if known.is_open:
                    arguments[name] = self.value(value, Any, where)
                elif where in self.settings.stale:
                    self.skipped.append(where)
                else:
                    self._unknown(where, name, getattr(target, "__name__", str(target)), known.named)
                continue
            default = known.named[name].default
            if value is None and default is None:
                arguments[name] = None
                continue
            found = self.value(value, known.named[name].annotation, where)
            if where in self.settings.grown and isinstance(found, list | tuple) and isinstance(default, list | tuple):
                found = type(found)([*default, *found])
            arguments[name] = found
        missing = [
            one.name
            for one in known.named.values()
            if one.is_required and one.name not in values and one.name not in given
        ]
        if missing:
            name = getattr(target, "__name__", str(target))
            self._note(path, f"{name} needs {', '.join(missing)}")
        return ObjectPlan(target, arguments, path)

    def value(self, value: Any, annotation: Any, path: str) -> Any:
        """Return a value converted to an annotated type, or WRONG; see `problems`."""
        annotation = _plain(annotation)
        origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
        if value is WRONG:
            return WRONG
        if annotation is Any or annotation is object or isinstance(annotation, str):
            return self._anything(value, path)
        if origin in (Union, types.UnionType):
            return self._one_of(value, inner, path)
        if origin is Literal:
            return self._literal(value, inner, path)
        if annotation is None or annotation is types.NoneType:
            return None if value is None else self._wrong(value, annotation, path)
        if origin is type or annotation is type:
            return self._class(value, inner[0] if inner else object, path)
        if origin is collections.abc.Callable or annotation in (typing.Callable, collections.abc.Callable):
            return self._function(value, inner, path)
        if (origin or annotation) in (*_LISTS, tuple, set, frozenset):
            return self._several(value, origin or annotation, inner, path)
        if (origin or annotation) in _DICTS:
            return self._dict(value, inner, path)
        if not inspect.isclass(origin or annotation):
            return self._anything(value, path)
        return self._simple(value, origin or annotation, path)

    def no_class(self, path: str, problem: ClassProblem) -> Any:
        """Record that the value at a path does not lead to a class, and return WRONG."""
        if isinstance(problem, NotTrusted):
            self.refused.append(path)
        self.problems.append(f"{self.settings.named(path, f'{path}.class_path')}: {problem}")
        return WRONG

    @property
    def remedy(self) -> str:
        """What to do about a file that names what it must not; empty if none does."""
        names = ", ".join(dict.fromkeys(_short(path) for path in self.refused))
        return names and f"set {names} yourself, on the command line or in a file for --config."

    def _simple(self, value: object, wanted: type[Any], path: str) -> Any:
        import torch

        text = self.settings.texts.get(path)
        if wanted is bool:
            meant = _WORDS.get(value.lower()) if isinstance(value, str) else value
            return meant if isinstance(meant, bool) else self._wrong(value, wanted, path, hint="write true or false")
        if wanted is int:
            if isinstance(value, float) and value.is_integer():
                return int(value)
            return value if isinstance(value, int) and not isinstance(value, bool) else self._wrong(value, wanted, path)
        if wanted is float:
            return (
                float(value)
                if isinstance(value, int | float) and not isinstance(value, bool)
                else self._wrong(value, wanted, path)
            )
        if wanted is str:
            if isinstance(value, str):
                return value
            return text if text is not None else self._wrong(value, wanted, path, hint="put it between quotes")
        if wanted in (Path, os.PathLike) or (issubclass(wanted, Path)):
            if text is not None and not isinstance(value, str | os.PathLike):
                return Path(text)  # a folder named 2024
            return Path(value) if isinstance(value, str | os.PathLike) else self._wrong(value, wanted, path)
        if issubclass(wanted, enum.Enum):
            return self._member(value, wanted, path)
        if wanted is timedelta:
            if isinstance(value, dict):
                return ObjectPlan(timedelta, value, path)
            return (
                value
                if isinstance(value, timedelta)
                else self._wrong(value, wanted, path, hint="write it as in {hours: 2}")
            )
        if wanted in _TIMES:
            return self._time(value, wanted, path)
        if wanted in (torch.dtype, torch.device):
            return self._of_torch(value, wanted, path)
        if typing.is_typeddict(wanted):
            return self._dict(value, (), path)
        return self._object(value, wanted, path)

    def _time(self, value: object, wanted: type[Any], path: str) -> object:
        try:
            return value if isinstance(value, wanted) else wanted.fromisoformat(value)
        except (TypeError, ValueError):
            return self._wrong(value, wanted, path, hint=f"write it as in {_TIMES[wanted]}")

    def _object(self, value: Any, wanted: type[Any], path: str) -> Any:
        if isinstance(value, wanted) and not isinstance(value, str | dict):
            return value
        if isinstance(value, str):
            is_file = value.endswith((".yaml", ".yml", ".json")) and Path(value).is_file()
            if is_file and self._trust(path) is None:
                return self._object(class_nodes(read(Path(value))), wanted, path)
            return self._named(value, {}, wanted, path, path)
        if is_class_node(value):
            made = self._named(value["class_path"], value["init_args"], wanted, path, f"{path}.init_args")
            if made is not WRONG and value.get("partial"):
                made.is_partial = True
            return made
        if isinstance(value, dict):
            if inspect.isabstract(wanted) or (
                wanted.__module__.startswith("torch.") and not dataclasses.is_dataclass(wanted)
            ):
                return self._wrong(
                    value, wanted, path, hint="name the class: class_path, and its arguments below init_args"
                )
            return self.plan(wanted, value, path)
        return self._wrong(value, wanted, path)

    def _named(self, name: object, arguments: SettingsTree, wanted: type[Any], path: str, below: str) -> Any:
        if name is WRONG:
            return WRONG
        try:
            found = find_class(str(name), wanted, self._trust(path))
        except ClassProblem as problem:
            return self.no_class(path, problem)
        return self.plan(found, arguments, below)

    def _one_of(self, value: object, members: tuple[object, ...], path: str) -> object:
        members = tuple(_plain(one) for one in members)
        # Values of a matching type stay: 1 is a number for `float | int`, and "ddp" a text for `Strategy | str`.
        exact = [one for one in members if one is type(value)]
        best: list[str] | None = None
        for member in [*exact, *(one for one in members if one not in exact)]:
            if member is str and not isinstance(value, str):
                continue  # only if no other type matches: "1" that was typed for `str | int` is a number
            attempt = Typed(self.settings, log_folder=self.log_folder, fills_untyped=self.fills_untyped)
            found = attempt.value(value, member, path)
            if not attempt.problems:
                self.skipped += attempt.skipped
                return found
            if attempt.refused:  # another member would take it for something that it was not
                self.problems += attempt.problems
                self.refused += attempt.refused
                return WRONG
            if _fits_by_shape(value, member) and best is None:
                best = attempt.problems
        if str in members and path in self.settings.texts:
            return self.settings.texts[path]
        if best is not None:
            self.problems += best
            return WRONG
        return self._wrong(value, Union[members], path)  # noqa: UP007  # made of what is known at run time only

    def _literal(self, value: object, choices: tuple[object, ...], path: str) -> object:
        for one in choices:
            if one == value and type(one) is type(value):
                return one
            if isinstance(one, str) and self.settings.texts.get(path) == one:
                return one
        near = get_close_matches(str(value), [str(one) for one in choices], n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return self._note(path, f"expected one of {', '.join(map(repr, choices))}, got {value!r}{hint}")

    def _member(self, value: object, wanted: type[enum.Enum], path: str) -> object:
        for one in wanted:
            if value is one or value == one.value or (isinstance(value, str) and value.lower() == one.name.lower()):
                return one
        near = get_close_matches(str(value), [one.name for one in wanted], n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return self._note(path, f"expected one of {', '.join(one.name for one in wanted)}, got {value!r}{hint}")

    def _class(self, value: object, base: object, path: str) -> object:
        if inspect.isclass(value):
            return value
        base = base if inspect.isclass(base) else object
        try:
            return find_class(str(value), base, self._trust(path))
        except ClassProblem as problem:
            return self.no_class(path, problem)

    def _function(self, value: Any, inner: tuple[object, ...], path: str) -> object:
        """Return a function: by its path, or one that creates the class that the annotation returns."""
        made = _plain(inner[-1]) if inner else Any
        name = value["class_path"] if is_class_node(value) else value
        arguments = value["init_args"] if is_class_node(value) else {}
        if name is WRONG:
            return WRONG
        if not isinstance(name, str):
            return (
                value
                if callable(value)
                else self._note(path, f"expected a function or class by its path, got {value!r}")
            )
        base = typing.get_origin(made) or made
        if base in (Union, types.UnionType):
            members = tuple(_plain(one) for one in typing.get_args(made))
            base = members if all(map(inspect.isclass, members)) else Any
            is_class = isinstance(base, tuple)
        else:
            is_class = inspect.isclass(base) and base is not Any and base is not object
        trust = self._trust(path)
        makes_class = is_class and (trust is not None or not _is_function(name))
        try:
            if makes_class or trust is not None:
                found: Any = find_class(name, base if is_class else object, trust)
            else:
                found = import_object(name)
        except ClassProblem as problem:
            found = _with_callable_objects(name, trust)
            if found is None:
                return self.no_class(path, problem)
            makes_class = False
        if not callable(found):
            return self._note(path, f"expected a function, got {name}")
        if not makes_class and inspect.isclass(found) and _has_calls(found):
            return self.plan(found, arguments, f"{path}.init_args" if is_class_node(value) else path)
        if not inspect.isclass(found) and not arguments:
            return found
        known = parameters_of(found)
        count = len(inner[0]) if inner and isinstance(inner[0], list) else 1
        first = [one for one in known.named if one not in arguments][:count]  # arguments of the caller
        plan = self.plan(
            found,
            arguments,
            f"{path}.init_args" if is_class_node(value) else path,
            given=frozenset(known.named) if not inner else frozenset(first),
        )
        plan.is_partial = True
        return plan

    def _several(self, value: object, kind: object, inner: tuple[object, ...], path: str) -> object:
        if not isinstance(value, list | tuple | set | frozenset):
            return self._wrong(value, kind, path, hint="write a list: [a, b]")
        values = list(value)
        if kind is tuple and inner and inner[-1] is not Ellipsis:
            if len(values) != len(inner):
                return self._note(path, f"expected {len(inner)} entries, got {len(values)}")
            wanted = list(inner)
        else:
            wanted = [inner[0] if inner else Any] * len(values)
        found = [
            self.value(one, kind_of_one, f"{path}.{number}")
            for number, (one, kind_of_one) in enumerate(zip(values, wanted, strict=True))
        ]
        return (
            kind(found)
            if kind in (tuple, set, frozenset) and not any(isinstance(one, ObjectPlan) for one in found)
            else found
        )

    def _dict(self, value: object, inner: tuple[object, ...], path: str) -> object:
        if not isinstance(value, dict):
            return self._wrong(value, dict, path, hint="write a mapping: {a: 1}")
        of_key, of_value = inner if len(inner) == 2 else (Any, Any)
        found = {}
        for key, below in value.items():
            found[self.value(key, of_key, f"{path}.{key}")] = self.value(below, of_value, f"{path}.{key}")
        return found

    def _of_torch(self, value: Any, wanted: type[object], path: str) -> object:
        import torch

        if isinstance(value, wanted):
            return value
        name = str(value).removeprefix("torch.")
        if wanted is torch.dtype:
            found = getattr(torch, name, None)
            return (
                found if isinstance(found, torch.dtype) else self._note(path, f"expected a torch dtype, got {value!r}")
            )
        try:
            return torch.device(value)
        except (RuntimeError, TypeError) as error:
            return self._note(path, str(error).splitlines()[0])

    def _anything(self, value: object, path: str) -> object:
        """Return a value for a parameter of unknown type.

        A class may be named for it only if it is of a kind that runs are made of: a configuration may come with a
        checkpoint from an unknown source, and must not be able to start programs.
        """
        if is_class_node(value):
            return self._object(value, object if self._trust(path) is not None else _Harmless, path)
        if isinstance(value, dict):
            return {key: self._anything(below, f"{path}.{key}") for key, below in value.items()}
        if isinstance(value, list):
            return [self._anything(below, f"{path}.{number}") for number, below in enumerate(value)]
        return value

    def _trust(self, path: str) -> Trust | None:
        """Return what the value at a path may name; None if the user has written it."""
        return self.settings.trust_at(f"{path}.class_path")

    # -- problems ------------------------------------------------------------------------------------------------

    def _wrong(self, value: object, annotation: object, path: str, hint: str = "") -> Any:
        shown = self.settings.texts.get(path, repr(value))
        return self._note(path, f"expected {show_type(annotation)}, got {shown}{f'; {hint}' if hint else ''}")

    def _note(self, path: str, what: str) -> Any:
        self.problems.append(f"{self.settings.named(path)}: {what}")
        return WRONG

    def _unknown(self, path: str, name: str, owner: str, known: typing.Iterable[str]) -> None:
        near = get_close_matches(name, list(known), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(known)) or 'no parameters'}"
        self._note(path, f"{owner} has no parameter {name!r}; {hint}")


class _HarmlessMeta(type):
    def __subclasscheck__(cls, subclass: type[object]) -> bool:
        from torch import nn
        from torch.optim import Optimizer
        from torch.optim.lr_scheduler import LRScheduler
        from torch.utils.data import DataLoader, Dataset, Sampler

        kinds = (nn.Module, Optimizer, LRScheduler, Dataset, Sampler, DataLoader)
        return issubclass(subclass, kinds) or is_core(subclass) or dataclasses.is_dataclass(subclass)


class _Harmless(metaclass=_HarmlessMeta):
    pass


_Harmless.__name__ = (
    "module, optimizer, schedule, data set, sampler, loader, dataclass or class of Loopwright "
    "(annotate the parameter to allow others)"
)


def _is_logger(target: object) -> bool:
    from ..loggers import Logger

    return inspect.isclass(target) and issubclass(target, Logger)


def with_class_defaults(
    known: Mapping[str, Parameter], values: SettingsTree, trust_in: Callable[[str], Trust | None] = lambda name: None
) -> SettingsTree:
    """Return the arguments of a class, completed by the arguments of defaults that are classes.

    Such are jsonargparse's `lazy_instance` and a class that a function parameter has as its default: arguments may be
    given without the class, and the ones of the default hold where the chosen class takes them.

    Args:
        known: The parameters.
        values: The arguments.
        trust_in: Returns what an argument may name.
    """
    found = values
    for name, one in known.items():
        node = _class_default(one.default)
        if node is None:
            continue
        is_lazy, given = bool(node["init_args"]) or not inspect.isclass(one.default), values.get(name)
        if name not in values:
            if is_lazy:
                found = {**found, name: node}
        elif isinstance(given, dict) and (set(given) == {"init_args"} or "class_path" not in given):
            arguments = given["init_args"] if set(given) == {"init_args"} else given
            found = {**found, name: {**node, "init_args": {**node["init_args"], **arguments}}}
        elif is_lazy and isinstance(given, str | dict):
            chosen: dict[str, Any] = given if isinstance(given, dict) else {"class_path": given, "init_args": {}}
            kept = _taken_by(chosen["class_path"], type(one.default), node["init_args"], trust_in(name))
            found = {**found, name: {**chosen, "init_args": {**kept, **chosen["init_args"]}}}
    return found


def _class_default(default: Any) -> dict[str, Any] | None:
    """Return the class of a default and its arguments; None for other values."""
    if inspect.isclass(default) and default is not EMPTY:
        return {"class_path": ".".join(origin(default)), "init_args": {}}
    return lazy_node(default)


def lazy_node(default: Any) -> dict[str, Any] | None:
    """Return the class and arguments of an object of jsonargparse's `lazy_instance`; None for other values."""
    arguments = getattr(default, "_lazy_kwargs", None)
    if not isinstance(arguments, dict) or not hasattr(type(default), "lazy_get_init_args"):
        return None
    made = _made_lazily(type(default))
    return {"class_path": ".".join(origin(made)), "init_args": dict(arguments)}


def _made_lazily(lazy: type[Any]) -> type[Any]:
    """Return the class that a `lazy_instance` stands for: its base that is not jsonargparse's."""
    return next(one for one in lazy.__mro__[1:] if "lazy_get_init_args" not in vars(one))


def _taken_by(name: str, lazy: type[Any], arguments: SettingsTree, trust: Trust | None) -> SettingsTree:
    try:
        known = parameters_of(find_class(name, _made_lazily(lazy), trust)).named
    except ClassProblem:
        return {}  # reported when the value is planned
    return {key: value for key, value in arguments.items() if key in known}


def _with_callable_objects(name: str, trust: Trust | None) -> Any:
    """Return the class of a path if its objects can be called, as modules can; None for others."""
    try:
        found = None if "." not in name else import_object(name) if trust is None else find_class(name, object, trust)
    except ClassProblem:
        return None
    return found if inspect.isclass(found) and _has_calls(found) else None


def _has_calls(found: type[Any]) -> bool:
    return any("__call__" in vars(one) for one in found.__mro__)


def _short(path: str) -> str:
    return path.replace(".init_args", "")


def _is_function(name: str) -> bool:
    if "." not in name:
        return False
    try:
        return not inspect.isclass(import_object(name))
    except ClassProblem:
        return False


def _plain(annotation: object) -> Any:
    """Return an annotation without qualifiers."""
    while True:
        if isinstance(annotation, typing.TypeVar):
            annotation = annotation.__bound__ or Any
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif typing.get_origin(annotation) in (typing.Annotated, typing.Final, typing.ClassVar):
            annotation = typing.get_args(annotation)[0]
        elif hasattr(annotation, "__value__"):  # type X = ...
            annotation = annotation.__value__
        else:
            return annotation


def _fits_by_shape(value: Any, member: Any) -> bool:
    origin = typing.get_origin(member) or member
    if isinstance(value, list):
        return origin in (*_LISTS, tuple, set, frozenset)
    if is_class_node(value):
        return (
            inspect.isclass(origin) and origin not in (*_LISTS, *_DICTS, str, int, float, bool)
        ) or origin is collections.abc.Callable
    if isinstance(value, dict):
        return origin in _DICTS or (
            inspect.isclass(origin) and origin not in (*_LISTS, str, int, float, bool, types.NoneType)
        )
    if isinstance(value, str):  # text does not denote a tensor
        others = (int, float, bool, types.NoneType, str, *_TIMES)
        named = inspect.isclass(origin) and origin not in (*_LISTS, *_DICTS, *others)
        return named and (origin.__module__, origin.__name__) != ("torch", "Tensor")
    return False


def show_type(annotation: object) -> str:
    """Return an annotation as text."""
    annotation = _plain(annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is types.NoneType:
        return "null"
    if annotation is Any:
        return "anything"
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return " | ".join(one.name for one in annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(show_type(one) for one in inner)
    if origin is Literal:
        return " | ".join(map(repr, inner))
    if origin is collections.abc.Callable:
        return f"function that returns {show_type(inner[-1])}" if inner else "function"
    name = getattr(origin or annotation, "__name__", str(annotation))
    if inner and origin is not None:
        return f"{name}[{', '.join('...' if one is Ellipsis else show_type(one) for one in inner)}]"
    return name
