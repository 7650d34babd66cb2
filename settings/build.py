"""Objects created from plans."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import ConfigError, LoopwrightError
from ..tracebacks import where_raised
from .tree import WRONG, Settings
from .typed import ObjectPlan

# Any in this file: created objects.


class Building:
    """Creates objects; a failed constructor does not prevent the others, so that all failures are reported at once.

    Args:
        settings: Where arguments came from.
        collects: Whether failures are collected. Otherwise the first one is raised as it is, with a note of its place.
    """

    def __init__(self, settings: Settings, *, collects: bool) -> None:
        self.problems: list[str] = []
        self._settings = settings
        self._collects = collects

    def made(self, value: object) -> Any:
        """Return a value whose plans are replaced by objects; WRONG where one failed."""
        try:
            return _built(value)
        except _NotMade as failure:
            if not self._collects:
                raise failure.error  # noqa: B904  # it was raised before, and has its own cause
            self.problems.append(self._said(failure))
            return WRONG

    def finish(self) -> None:
        """Raise one error for all failures.

        Raises:
            ConfigError: There are some.
        """
        if self.problems:
            lines = "".join(f"\n  - {line}" for line in self.problems)
            raise ConfigError(
                f"Expected a configuration whose objects can be created, got:{lines}", fix="correct the named settings."
            )

    def _said(self, failure: _NotMade) -> str:
        error, path = failure.error, failure.path.removesuffix(".init_args")
        shown = f"{self._settings.named(path)}: {failure.name}"
        if isinstance(error, LoopwrightError):
            return f"{shown}: {error.what.removeprefix(f'{failure.name}: ')} {error.fix}"
        place = where_raised(error)
        return f"{shown} raised {type(error).__name__}: {error}{f' ({place})' if place else ''}"


class _NotMade(Exception):
    """The failure of a constructor.

    Args:
        path: Where its arguments stand in the settings.
        name: Of the class.
        error: What it raised.
    """

    def __init__(self, path: str, name: str, error: Exception) -> None:
        super().__init__(path)
        self.path = path
        self.name = name
        self.error = error


def _built(value: object) -> Any:
    """Return a value whose plans are replaced by objects, innermost first."""
    if isinstance(value, ObjectPlan):
        arguments = {name: _built(one) for name, one in value.arguments.items()}
        if value.is_partial:
            return functools.partial(value.target, **arguments)
        try:
            return value.target(**arguments)
        except Exception as error:
            where = value.path.replace(".init_args", "") or "the configuration"
            error.add_note(f"while creating {where} ({value.target.__qualname__})")
            raise _NotMade(value.path, value.target.__qualname__, error) from error
    if isinstance(value, dict):
        return {key: _built(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_built(one) for one in value]
    return value
