"""Types of the Trainer's parameters that accept names and objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..callbacks import Callback
from ..loggers import Logger
from ..profilers import Profiler

# Any in this file: annotations.


def _accelerator() -> Any:
    from ..accelerators import Accelerator

    return str | Accelerator


def _strategy() -> object:
    from ..strategies import Strategy

    return str | Strategy


def _precision() -> Any:
    from ..precision import Precision

    return str | int | Precision | None


def _logger() -> object:
    return bool | None | Logger | list[Logger]


def _callbacks() -> object:
    return None | list[Callback] | Callback


def _profiler() -> object:
    return None | Profiler | str


def _plugins() -> object:
    from ..checkpoint import CheckpointIO
    from ..fabric import ClusterEnvironment
    from ..precision import Precision
    from ..strategies import LayerSync

    one = Precision | CheckpointIO | ClusterEnvironment | LayerSync
    return None | one | list[one]


TRAINER_TYPES: dict[str, Callable[[], object]] = {
    "accelerator": _accelerator,
    "strategy": _strategy,
    "devices": lambda: int | str | list[int],
    "precision": _precision,
    "logger": _logger,
    "callbacks": _callbacks,
    "profiler": _profiler,
    "plugins": _plugins,
}
"""Parameter -> a function that returns its type and imports the classes."""
