"""The exceptions that Loopwright raises.

    PlainError                     what happened; layers and programs may raise it, Loopwright does not
    LoopwrightError (PlainError)   what happened, and how to fix it
    ├── ConfigError (ValueError)            an invalid argument or combination of arguments
    │   └── ArgumentTypeError (TypeError)       an argument of the wrong type, or an unknown one
    ├── ModuleError (TypeError)             an invalid module, callback or data module
    │   └── MissingMetric (RuntimeError)        a metric that is monitored was not logged
    ├── LaunchError (RuntimeError)          processes could not be started or joined
    │   └── MissingVariable (KeyError)          an environment variable of a launcher is not set
    ├── RankFailure (RuntimeError)          a rank failed; names rank, host, step and hook
    ├── CheckpointError (RuntimeError)      a checkpoint cannot be written or read
    │   └── MissingEntry (KeyError)             it lacks entries that were requested
    ├── DataError (RuntimeError)            a loader returned unusable data
    ├── NonFiniteError (ArithmeticError)    a loss is NaN or infinite
    └── MissingDependency (ImportError)     an optional package is not installed
    StopBySignal (SystemExit)      the run stopped after SIGTERM, between two optimizer steps

They are raised as early as possible: in a constructor, or before processes start.
"""

from __future__ import annotations

import inspect
import re
import sys
from difflib import get_close_matches
from functools import reduce, wraps
from operator import ne
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_P = ParamSpec("_P")
_R = TypeVar("_R")

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_UNKNOWN_KEYWORD = re.compile(
    r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'"
)  # from Python 3.13 on there is more

__all__ = [
    "ArgumentTypeError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LaunchError",
    "LoopwrightError",
    "MissingDependency",
    "MissingEntry",
    "MissingMetric",
    "MissingVariable",
    "ModuleError",
    "NonFiniteError",
    "RankFailure",
    "StopBySignal",
]


class PlainError(Exception):
    """Root of the errors: what happened.

    Loopwright raises `LoopwrightError`, which has a remedy. Programs for other libraries raise this class by their name
    for it, and catch both.
    """


class LoopwrightError(PlainError):
    """Base class: what happened, and how to fix it.

    Args:
        what: What happened: expected value, actual value, and location.
        fix: The remedy, as a sentence that begins in lower case.
    """

    _lw_arguments: tuple[str, ...] = ("fix",)
    """Keyword arguments of the constructor, which are attributes; a subclass with more names all."""

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  To fix it: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, {name: getattr(self, name) for name in self._lw_arguments}))


def _rebuild(error_class: Callable[..., LoopwrightError], what: str, arguments: dict[str, object]) -> LoopwrightError:
    return error_class(what, **arguments)


class ConfigError(LoopwrightError, ValueError):
    """An argument or a combination of arguments is invalid."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument has the wrong type, or does not exist."""


class ModuleError(LoopwrightError, TypeError):
    """The user's module, callback or data module is invalid."""


class MissingMetric(ModuleError, RuntimeError):
    """A metric that is monitored was not logged."""


class LaunchError(LoopwrightError, RuntimeError):
    """Processes could not be started or joined."""


class MissingVariable(LaunchError, KeyError):
    """An environment variable that a launcher sets is not set."""


class RankFailure(LoopwrightError, RuntimeError):
    """A rank failed; the message names rank, host, step and hook."""


class CheckpointError(LoopwrightError, RuntimeError):
    """A checkpoint cannot be written, read or verified."""


class MissingEntry(CheckpointError, KeyError):
    """A checkpoint lacks entries that were requested."""


class DataError(LoopwrightError, RuntimeError):
    """A loader returned data with which training cannot continue."""


class NonFiniteError(LoopwrightError, ArithmeticError):
    """A loss is NaN or infinite, and the policy is to stop."""


class MissingDependency(LoopwrightError, ImportError):
    """A required optional package is not installed.

    Args:
        package: Name of the package on PyPI.
        needed_for: The feature or argument that needs it.
        extra: Loopwright's extra that includes the package; None without one.
    """

    def __init__(self, package: str, *, needed_for: str, extra: str | None = None) -> None:
        command = f"pip install 'loopwright[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{needed_for} needs the package {package!r}, which is not installed.", fix=command)
        self.package = package
        self.needed_for = needed_for
        self.extra = extra

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_missing, (self.package, self.needed_for, self.extra))


def _rebuild_missing(package: str, needed_for: str, extra: str | None) -> MissingDependency:
    return MissingDependency(package, needed_for=needed_for, extra=extra)


class StopBySignal(SystemExit):
    """The run stopped after SIGTERM, between two optimizer steps; the exit code is 143."""

    def __init__(self) -> None:
        super().__init__(143)


class ReplayEnd(SystemExit):
    """The step that is replayed has been made; the program ends here, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest of the known names, or an empty string."""
    matches = get_close_matches(name, list(known), n=3, cutoff=0.6)
    if not matches:
        return ""
    # One wrong letter is likelier than a missing one: "dpp" is "ddp", not "dp".
    near = (one for one in matches if len(one) == len(name) and sum(map(ne, one, name)) == 1)
    return f" (did you mean {next(near, matches[0])!r}?)"


def own_arguments(owner: type) -> list[str]:
    """Return the names of a constructor's arguments."""
    return [name for name, one in inspect.signature(owner).parameters.items() if one.kind not in _VARIABLE]


class UnknownArgument(ConfigError, TypeError):
    """An argument that a constructor does not have; a TypeError, as Python's own."""


class _SignatureOfInit:
    """Attribute `__signature__` of classes, since inspect would take the one of `ChecksKeywords.__new__` for some."""

    def __get__(self, instance: object, owner: type[object]) -> object:
        if instance is not None or owner.__new__ is not ChecksKeywords.__new__:
            return None  # inspect finds it
        if owner.__init__ is object.__init__:
            return inspect.Signature()
        of_init = inspect.signature(owner.__init__)
        return of_init.replace(parameters=list(of_init.parameters.values())[1:])


class ChecksKeywords:
    """Base of classes that users construct: a keyword that their constructor lacks is refused with the nearest name.

    Python's own error has it from 3.13 on. Constructors of users are left to Python.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # `__init__` is the signature
        __signature__ = _SignatureOfInit()

        def __new__(cls, *args, **kwargs):
            start, new = cls.__init__, super().__new__
            code = getattr(start, "__code__", None)
            is_ours = code is not None and start.__globals__["__name__"].partition(".")[0] == __package__
            if kwargs and is_ours and not code.co_flags & inspect.CO_VARKEYWORDS:
                known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
                unknown = [f"{name}={nearest(name, known)}" for name in kwargs if name not in known]
                if unknown:
                    what = f"{cls.__name__} has no argument{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}."
                    raise UnknownArgument(what, fix=f"it takes {', '.join(known)}.")
            if new is not object.__new__:
                return new(cls, *args, **kwargs)
            if (args or kwargs) and start is object.__init__:
                raise TypeError(f"{cls.__name__}() takes no arguments")
            return new(cls)


def names_nearest(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that an error about a keyword which it lacks names the nearest one; not for each step."""

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # not of a call within it
                _note_nearest(error, [function])
            raise

    return called


def add_nearest(error: BaseException) -> None:
    """Add a note to Python's error about a keyword that a method of Loopwright lacks: the nearest one, and all.

    It is called when an error ends a run or the program, so that no call of a method costs more. Python's own error
    names the nearest one from 3.13 on.
    """
    found = _UNKNOWN_KEYWORD.fullmatch(str(error)) if type(error) is TypeError else None
    if found is None:
        return
    name, *parts = found[1].split(".")
    methods = []  # the error names no module, and other libraries have a Trainer, too
    for module, names in [(key, vars(one)) for key, one in list(sys.modules.items())]:
        if parts and getattr(names.get(name), "__module__", None) == module:
            methods.append(reduce(lambda one, part: getattr(one, part, None), parts, names[name]))
    _note_nearest(error, list(dict.fromkeys(one for one in methods if callable(one))))  # a subclass may inherit it


def _note_nearest(error: BaseException, functions: Sequence[Callable[..., object]]) -> None:
    """Add the note if the error is about the only one of these functions, and that is Loopwright's."""
    found = _UNKNOWN_KEYWORD.fullmatch(str(error))
    start = getattr(functions[0], "__globals__", {}).get("__name__", "") if len(functions) == 1 else ""
    if found is None or start.partition(".")[0] != __package__:
        return
    name, keyword = found.groups()
    known = [one for one in inspect.signature(functions[0]).parameters if one != "self" and one[0] != "_"]
    note = f"{name} has no argument {keyword}={nearest(keyword, known)}; it takes {', '.join(known)}"
    if keyword not in known and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


class Clauses(list[tuple[str, str]]):
    """Problems of the arguments of one object with their remedies, as clauses of one message."""

    def add(self, what: str, fix: str) -> None:
        """Add a problem: what is wrong, and its remedy; both without a period."""
        self.append((what, fix))

    def refuse(self, where: str = "") -> None:
        """Raise one error that lists all problems, of the object `where`, and each remedy once; if there are any."""
        if self:
            whats, fixes = ("; ".join(dict.fromkeys(parts)) for parts in zip(*self, strict=True))
            raise ConfigError(f"{where}: {whats}." if where else f"{whats}.", fix=f"{fixes}.")


class Problems(list[ConfigError]):
    """Problems of a configuration, collected so that one error names all of them."""

    def add(self, what: str, *, fix: str) -> None:
        """Add a problem: what is wrong, and its remedy."""
        self.append(ConfigError(what, fix=fix))

    def refuse(self) -> None:
        """Raise one error that lists all problems, if there are any."""
        if self:
            raise join_errors(self)


def join_errors(errors: Sequence[ConfigError]) -> ConfigError:
    """Return one error that lists all problems, including problems of joined errors; a single error is unchanged."""
    single = [part for error in errors for part in getattr(error, "joined", (error,))]
    if len(single) == 1:
        return single[0]
    whats = "".join(f"\n  {number}. {error.what}" for number, error in enumerate(single, 1))
    numbers: dict[str, list[str]] = {}  # of the problems that a remedy is for
    for number, error in enumerate(single, 1):
        numbers.setdefault(error.fix, []).append(str(number))
    fixes = "".join(f"\n  {', '.join(places)}. {fix}" for fix, places in numbers.items())
    result = ConfigError(f"Expected a valid configuration, got {len(single)} problems:{whats}", fix=fixes)
    result.__dict__["joined"] = tuple(single)
    return result
