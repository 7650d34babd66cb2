"""Profilers: where the time of a run goes, by activity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, nearest
from .base import PassThroughProfiler, Profiler

if TYPE_CHECKING:
    from .simple import SimpleProfiler

__all__ = ["PassThroughProfiler", "Profiler", "SimpleProfiler", "resolve_profiler"]

_LATER = ("advanced", "pytorch", "xla")


def resolve_profiler(value: Profiler | str | None) -> Profiler | None:
    """Return the profiler that the Trainer's `profiler=` argument means; None for none.

    Args:
        value: A profiler, "simple" in any case, or None.

    Raises:
        ConfigError: The value is neither, or names a profiler that this version does not have.
    """
    if value is None or isinstance(value, Profiler):
        return value
    name = value.lower() if isinstance(value, str) else None
    if name == "simple":
        from .simple import SimpleProfiler

        return SimpleProfiler()
    if name in _LATER:
        raise ConfigError(
            f"profiler={value!r} is not in this version, which has 'simple'.",
            fix="pass profiler='simple', or your own loopwright.profilers.Profiler.",
        )
    guess = nearest(name, ["simple", *_LATER]) if name is not None else ""
    raise ConfigError(
        f"profiler={value!r}{guess} is unknown; expected 'simple', a Profiler or None.",
        fix="pass profiler='simple', an instance of a Profiler, or leave it out.",
    )


def __getattr__(name: str) -> Any:  # Any: the type is that of the name asked for
    if name != "SimpleProfiler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .simple import SimpleProfiler

    return SimpleProfiler
