"""Lightning's helpers for what only rank 0 does. Their rank is that of the environment, until something assigns it."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

__all__ = [
    "LightningDeprecationWarning",
    "WarningCache",
    "get_rank",
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_module",
    "rank_zero_only",
    "rank_zero_warn",
]

from ..errors import LightningDeprecationWarning

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


class _RankZeroOnly:
    """`rank_zero_only`: a decorator whose function runs on rank 0 alone, with the rank as its attribute.

    Attributes:
        rank: Rank of this process.
    """

    def __init__(self) -> None:
        self._assigned: int | None = None

    @property
    def rank(self) -> int:
        """Rank of this process: what was assigned, else that of the environment, else 0."""
        if self._assigned is not None:
            return self._assigned
        return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)

    @rank.setter
    def rank(self, rank: int) -> None:
        self._assigned = rank

    @rank.deleter
    def rank(self) -> None:
        self._assigned = None

    @overload
    def __call__(self, fn: Callable[P, T]) -> Callable[P, T | None]: ...

    @overload
    def __call__(self, fn: Callable[P, T], default: T) -> Callable[P, T]: ...

    def __call__(self, fn: Callable[P, T], default: T | None = None) -> Callable[P, T | None]:
        """Return the function, which returns `default` on the other ranks."""

        @functools.wraps(fn)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = _RankZeroOnly()


def get_rank() -> int | None:
    """Return the rank that the environment names; None if it names none."""
    found = (os.environ.get(name) for name in _RANK_VARIABLES)
    return next((int(rank) for rank in found if rank is not None), None)


def rank_zero_debug(*args: object, stacklevel: int = 2, **kwargs: Any) -> None:  # Any: as logging's
    """Log at level DEBUG on rank 0."""
    log.debug(*args, stacklevel=stacklevel + 1, **kwargs)


@rank_zero_only
def rank_zero_info(*args: object, stacklevel: int = 2, **kwargs: Any) -> None:  # Any: as logging's
    """Log at level INFO on rank 0."""
    log.info(*args, stacklevel=stacklevel + 1, **kwargs)


@rank_zero_only
def rank_zero_warn(message: str | Warning, stacklevel: int = 2, **kwargs: Any) -> None:  # Any: as warnings'
    """Warn on rank 0."""
    warnings.warn(message, stacklevel=stacklevel + 2, **kwargs)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 2, **kwargs: object) -> None:
    """Warn on rank 0 of a deprecation."""
    rank_zero_warn(message, stacklevel=stacklevel + 1, **{"category": LightningDeprecationWarning, **kwargs})


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return the message with its rank in front, if there is one."""
    return message if rank is None else f"[rank: {rank}] {message}"


class WarningCache(set[str]):
    """Messages that were already logged."""

    def warn(self, message: str, stacklevel: int = 2, **kwargs: Any) -> None:  # Any: as warnings'
        """Warn once."""
        if message not in self:
            self.add(message)
            rank_zero_warn(message, stacklevel=stacklevel + 1, **kwargs)

    def deprecation(self, message: str, stacklevel: int = 2, **kwargs: object) -> None:  # as warnings'
        """Warn once of a deprecation."""
        if message not in self:
            self.add(message)
            rank_zero_deprecation(message, stacklevel=stacklevel + 1, **kwargs)

    def info(self, message: str, stacklevel: int = 2, **kwargs: Any) -> None:  # Any: as logging's
        """Log once."""
        if message not in self:
            self.add(message)
            rank_zero_info(message, stacklevel=stacklevel + 1, **kwargs)


rank_zero_module = log
