"""Where logged numbers go: all loggers of a Trainer, none of which may stop the training. One per Trainer.

A logger with `writes_behind` gets its rows on a thread of its own, in order; anything else that it is told comes after
the rows before it. With several ranks only rank 0's loggers are told anything; the others know in which folder it
writes.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..loggers import Logger, share_version
from ..loggers.folder import FolderLogger

if TYPE_CHECKING:
    from ..loggers.write_behind import WriteBehind
    from ..strategies import Strategy

__all__ = ["LogOutput"]

log = logging.getLogger(__name__)


class LogOutput:
    """The loggers, and what was last sent to them.

    Args:
        logger: The Trainer's argument: True or None for TensorBoard, False for none, a logger, or several.
        root: Directory for the default logger.
        is_trial: Replace every logger by one that does nothing (`fast_dev_run`).

    Attributes:
        latest: Key -> value last sent; the same on every rank.
        is_silent: Whether another rank tells the loggers.

    Raises:
        ConfigError: Something given is no logger.
    """

    def __init__(self, logger: Any, *, root: str, is_trial: bool) -> None:  # Any: checked here
        self._broken: set[int] = set()
        self._queues: dict[int, WriteBehind] = {}
        self._is_running = False  # only then is there an end at which queues are drained
        self._clock_s = time.monotonic()
        self.is_silent = False
        self._loggers: list[Logger] = []
        self.latest: dict[str, float] = {}
        self.loggers = self._read(logger, root, is_trial=is_trial)

    @staticmethod
    def _read(logger: Any, root: str, *, is_trial: bool) -> list[Logger]:
        if logger is False:
            return []
        if logger is None or logger is True:
            if is_trial:
                return []
            if "://" in root:
                warnings.warn("no logger: TensorBoard writes local folders only; pass logger=...", stacklevel=5)
                return []
            from ..loggers import TensorBoardLogger

            return [TensorBoardLogger(root)]
        loggers = list(logger) if isinstance(logger, list | tuple) else [logger]
        for item in loggers:
            if not callable(getattr(item, "log_metrics", None)):
                raise ConfigError(
                    f"logger={type(item).__name__} has no log_metrics.",
                    fix="pass True, False, a Logger, or a list of Loggers.",
                )
        if not is_trial:
            return loggers
        from ..loggers import DummyLogger

        return [DummyLogger() for _ in loggers]

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._loggers

    @loggers.setter
    def loggers(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)
        share_version(self._loggers)

    def set_rank(self, rank: int) -> None:
        """Note this process's rank. Called by the Trainer once the processes are connected, before loggers are used."""
        self.is_silent = rank > 0
        for logger in self._loggers:
            if isinstance(logger, Logger):
                logger.set_rank(rank)

    def agree(self, strategy: Strategy) -> None:
        """Let every rank know in which folders rank 0 writes; there are folders from then on.

        Called by the Trainer on every rank when a verb begins, after a resumed run has taken its earlier folders back.
        With one process a folder is taken when something is written.
        """
        self._is_running = True
        self._clock_s = time.monotonic()
        if strategy.world_size == 1:
            return
        from ..callbacks.rank_zero import decided_on_rank_zero  # not imported where there is one process

        versions = decided_on_rank_zero(strategy, self._take_folders)
        if self.is_silent:
            self.join_versions(versions)

    def _take_folders(self) -> list[int | str | None]:
        for logger in self._loggers:
            self.tell(logger, lambda logger=logger: logger.version)  # type: ignore[misc]
        return self.versions()

    def versions(self) -> list[int | str | None]:
        """Return the version that each logger's folder has; None where it has none, or the logger writes no folder."""
        return [logger.taken_version if isinstance(logger, FolderLogger) else None for logger in self._loggers]

    def join_versions(self, versions: Sequence[int | str | None]) -> None:
        """Let loggers use the folders that `versions` named in another process."""
        for logger, version in zip(self._loggers, versions, strict=True):
            if version is not None and isinstance(logger, FolderLogger):
                logger.join_version(version)

    def tell(self, logger: Logger, action: Callable[[], Any]) -> None:
        """Let a logger do something, on rank 0, after the rows that it was given.

        One that fails is said once and left out from then on.
        """
        if not (self.is_silent or id(logger) in self._broken):
            self._try(logger, lambda: self._after_rows(logger, action))

    def _after_rows(self, logger: Logger, action: Callable[[], Any]) -> None:
        queue = self._queues.get(id(logger))
        if queue is not None:
            queue.settle()
        action()

    def _try(self, logger: Logger, action: Callable[[], Any]) -> None:
        try:
            action()
        # Loggers are other people's code and services: anything may come, and none of it is worth a training.
        except Exception as error:
            self._broken.add(id(logger))
            log.exception("%s failed and is left out from now on; training goes on", type(logger).__name__)
            warnings.warn(
                f"{type(logger).__name__} failed and is left out from now on: {type(error).__name__}: {error}",
                stacklevel=4,
            )

    def write(self, row: Mapping[str, float], step: int, *, samples: int = 0) -> None:
        """Send a row of host numbers to every logger.

        Args:
            row: Name to host number.
            step: The row's step.
            samples: Samples that all ranks have trained on.
        """
        self.latest.update(row)
        now = time.monotonic()
        passed_s, self._clock_s = now - self._clock_s, now
        if self.is_silent:
            return
        axes = {"samples": samples, **self.latest} if self._loggers else {}
        for logger in self._loggers:
            if id(logger) in self._broken:
                continue
            write = lambda logger=logger: _write(logger, row, step, axes, passed_s)  # noqa: E731
            if self._is_running and isinstance(logger, Logger) and logger.writes_behind:
                self._try(logger, lambda logger=logger, write=write: self._queue(logger).put(write))  # type: ignore[misc]
            else:
                self.tell(logger, write)

    def _queue(self, logger: Logger) -> WriteBehind:
        queue = self._queues.get(id(logger))
        if queue is None:
            from ..loggers.write_behind import WriteBehind  # not imported before the first row

            queue = logger.queue = self._queues[id(logger)] = WriteBehind()
        return queue

    def finalize(self, status: str) -> None:
        """Write what waits and close every logger: "success" or "failed"."""
        for logger in self._loggers:
            self.tell(logger, lambda logger=logger: logger.finalize(status))  # type: ignore[misc]
        self._is_running = False
        # Settled by now, but for loggers that have failed.
        queues, self._queues = self._queues, {}
        for logger in self._loggers:
            if isinstance(logger, Logger):
                logger.queue = None
        for queue in queues.values():
            queue.abandon()

    def write_hyperparameters(self, owners: Sequence[Any], graph_of: Any) -> None:
        """Send the hyperparameters of module and data module, and the module's graph.

        Args:
            owners: Module and data module, or None in their place.
            graph_of: The module for `log_graph`; None for none.

        Raises:
            ConfigError: Both have a hyperparameter of one name with different values.
        """
        merged: dict[str, Any] = {}
        for owner in owners:
            if owner is None or not getattr(owner, "_log_hyperparams", False):
                continue
            for key, value in dict(owner.hparams_initial).items():
                if key in merged and merged[key] is not value and merged[key] != value:
                    raise ConfigError(
                        f"module and data module have the hyperparameter {key!r} with the values {merged[key]!r} and "
                        f"{value!r}.",
                        fix="rename one, or pass logger=False to one of the save_hyperparameters calls.",
                    )
                merged[key] = value
        for logger in self._loggers:
            if merged:
                self.tell(logger, lambda logger=logger: logger.log_hyperparams(merged))  # type: ignore[misc]
            if graph_of is not None:
                self.tell(logger, lambda logger=logger: logger.log_graph(graph_of))  # type: ignore[misc]


def _write(logger: Logger, row: Mapping[str, float], step: int, axes: Mapping[str, float], passed_s: float) -> None:
    if isinstance(logger, Logger):
        logger.wall_s += passed_s
        logger.log_row(dict(row), step, axes)
    else:
        logger.log_metrics(dict(row), step=step)
    logger.save()
