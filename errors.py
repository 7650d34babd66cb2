"""Every error that Loopwright raises for its user, as one tree.

    LoopwrightError                what happened, and what to do
    ├── ConfigError (ValueError)            an argument, or a pair of arguments, cannot work
    ├── ModuleError (TypeError)             the user's module, callback or data breaks its contract
    ├── LaunchError (RuntimeError)          processes could not be started
    ├── RankFailure (RuntimeError)          a rank failed: names rank, host, step and hook
    ├── CheckpointError (RuntimeError)      a checkpoint cannot be written, or is damaged
    ├── DataError (RuntimeError)            a loader gave something that training cannot go on with
    ├── NonFiniteError (ArithmeticError)    a loss is NaN or infinite
    └── MissingDependency (ImportError)     an optional package is not installed
    StopBySignal (SystemExit)      SIGTERM came; the run stopped between two optimizer steps

Raised as early as possible: in a constructor, or before processes start.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LaunchError",
    "LoopwrightError",
    "MissingDependency",
    "ModuleError",
    "NonFiniteError",
    "RankFailure",
    "StopBySignal",
]


class LoopwrightError(Exception):
    """Say what happened and what to do about it.

    Args:
        what: What happened: what was expected, what came, and where.
        fix: What the user can do, as a sentence without a capital.
    """

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  To fix it: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.fix))


def _rebuild(error_class: type[LoopwrightError], what: str, fix: str) -> LoopwrightError:
    return error_class(what, fix=fix)


class ConfigError(LoopwrightError, ValueError):
    """An argument, or a combination of arguments, cannot work."""


class ModuleError(LoopwrightError, TypeError):
    """The user's module, callback or data module breaks its contract."""


class LaunchError(LoopwrightError, RuntimeError):
    """Processes could not be started or joined."""


class RankFailure(LoopwrightError, RuntimeError):
    """A rank failed; the message names rank, host, step and hook."""


class CheckpointError(LoopwrightError, RuntimeError):
    """A checkpoint cannot be written, or what is on disk cannot be trusted."""


class DataError(LoopwrightError, RuntimeError):
    """A loader gave something that training cannot go on with."""


class NonFiniteError(LoopwrightError, ArithmeticError):
    """A loss is NaN or infinite and the policy says to stop."""


class MissingDependency(LoopwrightError, ImportError):
    """An optional package is needed and not installed.

    Args:
        package: Name of the package as pip knows it.
        needed_for: What the user asked for, as it was typed.
        extra: Loopwright's extra that brings the package, if there is one.
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
    """SIGTERM asked the run to end, and it ended between two optimizer steps; the exit code is 143."""

    def __init__(self) -> None:
        super().__init__(143)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest of the known names, or an empty string."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
