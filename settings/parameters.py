"""Parameters of a class or function: names, types, defaults and descriptions."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ..lazy import home_of

# Any in this file: annotations and defaults of the user's classes.

EMPTY: Any = inspect.Parameter.empty
"""A missing default or annotation."""

_BASES = ("loopwright.trainer.module", "loopwright.data.module", "torch.nn.modules.module")


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: Name of the parameter.
        annotation: Type of the parameter, with text evaluated; Any without one, or if it cannot be evaluated.
        default: Default value; EMPTY if a value is required.
        text: Description in the docstring.
        is_annotated: Whether the signature has a type.
    """

    name: str
    annotation: Any
    default: Any
    text: str = ""
    is_annotated: bool = True

    @property
    def is_required(self) -> bool:
        """Whether it lacks a default."""
        return self.default is EMPTY


@dataclass(frozen=True)
class Parameters:
    """Parameters of a class or function, by name.

    Attributes:
        named: The parameters by name.
        is_open: Whether other names are accepted, too: `**kwargs` whose use cannot be determined.
        title: First line of the docstring.
    """

    named: Mapping[str, Parameter]
    is_open: bool
    title: str


def parameters_of(target: Callable[..., object]) -> Parameters:
    """Return the parameters of a class or function.

    Those that a constructor passes on by `super().__init__(**kwargs)` count, without the ones that it sets itself.
    """
    return _parameters_of(target)


@lru_cache(maxsize=512)
def _parameters_of(target: Callable[..., object]) -> Parameters:
    title = (inspect.getdoc(target) or "").partition("\n")[0]
    named: dict[str, Parameter] = {}
    if not inspect.isclass(target):
        named, is_open = _of_function(target, _texts(inspect.getdoc(target) or ""))
        return Parameters(MappingProxyType(named), is_open, title)
    hidden: set[str] = set()
    is_open, count = False, 0
    for owner in target.__mro__:
        function = vars(owner).get("__init__")
        if function is None or owner is object:
            continue
        if not inspect.isfunction(function):  # written in C, or a wrapper with the signature (*args, **kwargs)
            is_open = True
            break
        texts = {**_texts(inspect.getdoc(owner) or ""), **_texts(inspect.getdoc(function) or "")}
        found, is_open = _of_function(function, texts, skip_first=True)
        hidden |= set(list(found)[:count])  # the subclass passes them by their places
        for name, parameter in found.items():
            if name not in hidden:
                named.setdefault(name, parameter)
        if not is_open:
            break
        if not found and home_of(owner) in _BASES:
            is_open = False  # base classes of users' classes, which accept and ignore any argument
            break
        passed = _passed_on(function)
        if passed is None:
            break  # their use is not visible: any name is accepted
        keywords, count = passed
        hidden |= keywords | set(found)
    return Parameters(MappingProxyType(named), is_open, title)


def _of_function(
    function: Callable[..., object], texts: Mapping[str, str], *, skip_first: bool = False
) -> tuple[dict[str, Parameter], bool]:
    signature = inspect.signature(function)
    names = _Names(function)
    named, is_open = {}, False
    for number, (name, one) in enumerate(signature.parameters.items()):
        if one.kind is one.VAR_KEYWORD:
            is_open = True
        elif (
            one.kind is not one.VAR_POSITIONAL
            and one.kind is not one.POSITIONAL_ONLY
            and not (skip_first and not number)
        ):
            is_annotated = one.annotation is not EMPTY
            named[name] = Parameter(
                name, names.evaluated(one.annotation), one.default, texts.get(name, ""), is_annotated
            )
    return named, is_open


def evaluate_annotations(function: Callable[..., object]) -> None:
    """Replace a function's annotations that are texts by objects; by Any where a text cannot be evaluated."""
    names = _Names(function)
    for name, one in function.__annotations__.items():
        function.__annotations__[name] = names.evaluated(one)
    signature: inspect.Signature | None = getattr(function, "__signature__", None)
    if signature is not None:
        parameters = [
            one if one.annotation is EMPTY else one.replace(annotation=names.evaluated(one.annotation))
            for one in signature.parameters.values()
        ]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # it has one


class _Names(dict[str, Any]):
    """Evaluates annotations given as text. Names imported for type checkers only are looked up in likely modules."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        function = inspect.unwrap(function)
        self._module = getattr(function, "__module__", "")
        self._globals = getattr(function, "__globals__", {})

    def evaluated(self, annotation: object) -> Any:
        if annotation is EMPTY:
            return Any
        if not isinstance(annotation, str):
            return annotation
        try:
            return eval(annotation, {"__builtins__": {}}, self)  # the source of the class to be created
        except Exception:
            return Any  # it contains an undefined name: the value is not checked

    def __missing__(self, name: str) -> object:
        if name in self._globals:
            return self._globals[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        if hasattr(typing, name):
            return getattr(typing, name)
        home = _HOMES.get(name)
        if home is not None:
            return getattr(__import__(home, fromlist=[name]), name)
        if self._module.partition(".")[0] == "loopwright":
            loopwright = import_module("..", __package__)
            if name in loopwright.__all__:
                return getattr(loopwright, name)
        for module in (self._module.rpartition(".")[0], "torch"):
            if name in vars(sys.modules.get(module, builtins)):
                return getattr(sys.modules[module], name)
        raise NameError(name)


_HOMES = {
    "Optimizer": "torch.optim",
    "LRScheduler": "torch.optim.lr_scheduler",
    "DataLoader": "torch.utils.data",
    "Dataset": "torch.utils.data",
    "Path": "pathlib",
    "timedelta": "datetime",
    "nn": "torch",
    "Tensor": "torch",
    **dict.fromkeys(
        ("Callable", "Iterable", "Iterator", "Mapping", "MutableMapping", "Sequence", "Collection"), "collections.abc"
    ),
}


def _passed_on(function: Callable[..., object]) -> tuple[set[str], int] | None:
    """Return the names that `super().__init__(..., **kwargs)` sets, and how many arguments it passes by their places.

    None without such a call.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return None
    rest = inspect.getfullargspec(function).varkw
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "__init__":
            continue
        above = call.func.value
        is_super = isinstance(above, ast.Call) and isinstance(above.func, ast.Name) and above.func.id == "super"
        passes_rest = any(keyword.arg is None and _uses(keyword.value, rest) for keyword in call.keywords)
        if is_super and passes_rest:
            places = [one for one in call.args if not isinstance(one, ast.Starred)]
            return {keyword.arg for keyword in call.keywords if keyword.arg is not None}, len(places)
    return None


def _uses(expression: ast.expr, name: str | None) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(expression))


_ENTRY = re.compile(r"^(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def _texts(docstring: str) -> dict[str, str]:
    """Return parameter -> description from a Google-style docstring."""
    found: dict[str, str] = {}
    lines = docstring.splitlines()
    starts = [number for number, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:", "Parameters:")]
    if not starts:
        return found
    margin, name = None, None
    for line in lines[starts[0] + 1 :]:
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        margin = indent if margin is None else margin
        if indent < margin or not indent:
            break
        entry = _ENTRY.match(line.strip()) if indent == margin else None
        if entry is not None:
            name = entry[1].lstrip("*")
            found[name] = entry[2]
        elif name is not None:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
