"""Loggers: where the numbers of a run are kept. Each is imported when its name is first used.

Nothing here imports TensorBoard before a metric is written.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import Logger, rank_zero_experiment
from .folder import share_version

if TYPE_CHECKING:
    from .csv_logger import CSVLogger
    from .dummy import DummyLogger
    from .tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "DummyLogger", "Logger", "TensorBoardLogger", "rank_zero_experiment", "share_version"]

_LATER = {"CSVLogger": "csv_logger", "DummyLogger": "dummy", "TensorBoardLogger": "tensorboard"}


def __getattr__(name: str) -> Any:  # Any: the type is that of the name asked for
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value
