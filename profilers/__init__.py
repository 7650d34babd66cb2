"""Profilers: the time of a run, by activity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError, nearest
from ..lazy import attach
from .base import PassThroughProfiler, Profiler

if TYPE_CHECKING:
    from .advanced import AdvancedProfiler
    from .pytorch import PyTorchProfiler
    from .simple import SimpleProfiler
    from .xla import XLAProfiler

__all__ = [
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
    "XLAProfiler",
    "resolve_profiler",
]

# A run without a profiler needs none of these, and does not import them.
_HOME = {"AdvancedProfiler": "advanced", "PyTorchProfiler": "pytorch", "SimpleProfiler": "simple", "XLAProfiler": "xla"}
__getattr__, __dir__ = attach(__name__, _HOME)
_BY_NAME = {home: name for name, home in _HOME.items()}


def resolve_profiler(value: Profiler | str | None) -> Profiler | None:
    """Return the profiler for a value of the Trainer's `profiler=` argument; None for None.

    Args:
        value: A profiler, "simple", "advanced", "pytorch" or "xla" in any case, or None.

    Raises:
        ConfigError: The value is none of these.
        MissingDependency: The value is "xla", and torch_xla is not installed.
    """
    if value is None or isinstance(value, Profiler):
        return value
    name = value.lower() if isinstance(value, str) else None
    if name in _BY_NAME:
        profiler: Profiler = __getattr__(_BY_NAME[name])()
        return profiler
    guess = nearest(name, _BY_NAME) if name is not None else ""
    known = ", ".join(repr(one) for one in _BY_NAME)
    raise ConfigError(
        f"profiler={value!r}{guess} is unknown; expected {known}, a Profiler or None.",
        fix="pass profiler='simple', an instance of a Profiler, or leave it out.",
    )
