"""Where logged numbers go: all loggers of a Trainer, none of which may stop the training. One per Trainer.

With several ranks only rank 0's loggers are told anything; the others know in which folder it writes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..loggers import Logger, share_version
from ..loggers.folder import FolderLogger

if TYPE_CHECKING:
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

        Called by the Trainer on every rank, after a resumed run has taken its earlier folders back. Nothing with one
        process: there a folder is taken when something is written.
        """
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
        """Let a logger do something, on rank 0. One that fails is said once and left out from then on."""
        if self.is_silent or id(logger) in self._broken:
            return
        try:
            action()
        # Loggers are other people's code and services: anything may come, and none of it is worth a training.
        except Exception as error:
            self._broken.add(id(logger))
            log.exception("%s failed and is left out from now on; training goes on", type(logger).__name__)
            warnings.warn(
                f"{type(logger).__name__} failed and is left out from now on: {type(error).__name__}: {error}",
                stacklevel=3,
            )

    def write(self, row: Mapping[str, float], step: int) -> None:
        """Send a row of host numbers to every logger."""
        self.latest.update(row)
        for logger in self._loggers:
            self.tell(logger, lambda logger=logger: _write(logger, row, step))  # type: ignore[misc]

    def finalize(self, status: str) -> None:
        """Close every logger: "success" or "failed"."""
        for logger in self._loggers:
            self.tell(logger, lambda logger=logger: logger.finalize(status))  # type: ignore[misc]

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


def _write(logger: Logger, row: Mapping[str, float], step: int) -> None:
    logger.log_metrics(dict(row), step=step)
    logger.save()
