"""A logger that records nothing: the Trainer uses it in fast_dev_run and for trial runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .base import DummyExperiment, Logger, Metrics, Params


class DummyLogger(Logger):
    """Accept every call, record nothing, and write no file.

    Methods of other loggers (`watch`, `log_image`, ...) exist too and do nothing, so a trial run of a program does not
    fail there.
    """

    @property
    def name(self) -> str:
        """Empty: there is no experiment."""
        return ""

    @property
    def version(self) -> str:
        """Empty: there is no run."""
        return ""

    def log_metrics(self, metrics: Metrics, step: int | None = None, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""
        return

    def log_hyperparams(self, params: Params, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""
        return

    def __getitem__(self, index: int) -> DummyLogger:
        """Return itself, as the only one of a list of loggers."""
        return self

    def __iter__(self) -> Iterator[DummyLogger]:
        """Yield itself, once."""
        yield self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):  # copy and pickle ask for these, and must hear that they are absent
            raise AttributeError(name)
        return DummyExperiment().__getattr__(name)
