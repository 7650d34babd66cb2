"""A logger that records nothing: the Trainer uses it in fast_dev_run and for trial runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .base import DummyExperiment, Logger

__all__ = ["DummyLogger"]


class DummyLogger(Logger):
    """Take every call, record nothing, and write no file.

    Methods that other loggers have (`watch`, `log_image`, ...) exist too and do nothing, so that a trial run of a
    program does not stop at them.
    """

    def __init__(self) -> None:
        self._experiment = DummyExperiment()

    @property
    def name(self) -> str:
        """Empty: there is no experiment."""
        return ""

    @property
    def version(self) -> str:
        """Empty: there is no run."""
        return ""

    @property
    def experiment(self) -> DummyExperiment:
        """An object whose every attribute is a function that does nothing."""
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Do nothing."""
        return

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""
        return

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):  # copy and pickle ask for these, and must hear that they are absent
            raise AttributeError(name)
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Take anything, do nothing."""
