"""The loggers of a Trainer: they get what is logged, and their errors do not stop the training.

A logger with `writes_behind` gets its rows on its own thread, in order; other calls follow the rows before them. What a
logger cannot accept now waits (loggers/write_behind.py). With several ranks, only rank 0's loggers are called; the
others know in which folder it writes.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from ...checkpoint.to_plain import resolve_omegaconf
from ...errors import ConfigError, MissingDependency
from ...loggers import Logger, share_version
from ...loggers.base import RunLogger
from ...loggers.folder import FolderLogger
from ...messages import counted, current_rank, warn
from ...protocols import StateDict, Tree
from ...remote import is_url

if TYPE_CHECKING:
    from ...loggers.write_behind import WriteQueue
    from ...strategies import Strategy

log = logging.getLogger(__name__)

LoggerArgument: TypeAlias = "Logger | str | Sequence[Logger | str] | bool | None"
Row = tuple[dict[str, float], int, Mapping[str, float], float]
"""Values, the step, the other counts of training, and the seconds since the previous row."""


class LogOutput:
    """The loggers, and what was last sent to them.

    Args:
        logger: The Trainer's argument: True or None for TensorBoard (or CSV, without that package), False for
            none, a logger, or several.
        root: Directory for the default logger.
        is_trial: Replace every logger by one that does nothing (`fast_dev_run`).

    Attributes:
        latest: Key -> value last sent; the same on every rank.
        is_silent: Whether another rank calls the loggers.
        records_at: Steps and epochs that rows of an evaluation outside of fit belong to.
        told_here: Loggers that get rows on this rank also where it is silent; none by default.

    Raises:
        ConfigError: Something given is not a logger.
    """

    def __init__(self, logger: LoggerArgument, *, root: str, is_trial: bool) -> None:
        self._queues: dict[int, WriteQueue] = {}
        self._root = root
        self._is_running = False  # only then is there an end at which queues are drained
        self._clock_s = time.monotonic()
        self.is_silent = False
        self.told_here: list[Logger] = []
        self.records_at = (0, 0)
        self._loggers: list[Logger] = []
        self.latest: dict[str, float] = {}
        self.loggers = self._read(logger, root, is_trial=is_trial)

    @staticmethod
    def _read(logger: Any, root: str, *, is_trial: bool) -> list[Logger]:  # Any: checked here
        if logger is False:
            return []
        if logger is None or logger is True:
            if is_trial:
                from ...loggers import DummyLogger

                return [DummyLogger()]
            return [_default_logger(root)]
        loggers = list(logger) if isinstance(logger, list | tuple) else [logger]
        for index, item in enumerate(loggers):
            if isinstance(item, str):
                from ...loggers import DummyLogger
                from .logger_names import logger_named

                named = logger_named(item)
                loggers[index] = DummyLogger() if is_trial else named(root)
                continue
            if not callable(getattr(item, "log_metrics", None)):
                raise ConfigError(
                    f"logger={type(item).__name__} has no log_metrics.",
                    fix="pass True, False, a Logger, or a list of Loggers.",
                )
        if not is_trial:
            return loggers
        from ...loggers import DummyLogger

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

    def agree(self, strategy: Strategy, *, checks: bool = False) -> None:
        """Let every rank know in which folders rank 0 writes; there are folders from then on.

        Called by the Trainer on every rank when a verb begins, after a resumed run has chosen its earlier folders
        again. With one process, a folder is chosen when something is written.

        Args:
            strategy: Connects the ranks.
            checks: Whether a folder that cannot be written to is an error; else its rows wait until it can.

        Raises:
            ConfigError: A folder cannot be written to.
        """
        self._is_running = True
        self._clock_s = time.monotonic()
        if strategy.world_size == 1:
            if checks:
                self._check_targets()
            return
        from ...callbacks.rank_zero import decided_on_rank_zero

        versions = decided_on_rank_zero(strategy, lambda: self._take_folders(checks=checks))
        if self.is_silent:
            self.join_versions(versions)

    def _check_targets(self) -> None:
        for logger in self._loggers:
            if isinstance(logger, RunLogger):
                logger.check_target()

    def _take_folders(self, *, checks: bool) -> list[int | str | None]:
        if checks:
            self._check_targets()
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

    def tell(self, logger: Logger, action: Callable[[], Tree]) -> None:
        """Call an action of a logger, on rank 0, after the rows before it.

        If the rows cannot be written now, or the action fails for a transient reason, it is called later.
        """
        if self.is_silent:
            if any(logger is one for one in self.told_here):
                action()
            return
        queue = self._queue(logger)
        if queue.settle():
            failure = queue.try_now(action)
            if failure is not None:
                queue.put(action)
        else:
            queue.put(action)
        self._say(logger, queue)

    def ask(self, logger: Logger, action: Callable[[], Tree]) -> None:
        """Return the result of a call of a logger, on rank 0, if all its rows are written; otherwise skip the call."""
        if self.is_silent:
            return
        queue = self._queue(logger)
        failure = queue.try_now(action) if queue.settle() else None
        if failure is not None:
            warn(f"{type(logger).__name__} failed: {type(failure).__name__}: {failure}")
        self._say(logger, queue)

    def unwritten(self) -> list[Logger]:
        """Wait until all rows are written, with some more tries, and return the loggers that fail or hang."""
        found = []
        for logger, queue in [(one, self._queues.get(id(one))) for one in self.loggers]:
            if queue is not None:
                found += [] if queue.insist() else [logger]
                self._say(logger, queue)
        return found

    def _say(self, logger: Logger, queue: WriteQueue) -> None:
        for is_failure, text in queue.news():
            message = f"{type(logger).__name__} {text}"
            if is_failure:
                warn(f"{message}; training continues")
            else:
                log.warning("%s", message)

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
            for logger in self.told_here:
                logger.log_metrics(dict(row), step=step)
                logger.save()
            return
        axes = {"samples": samples, **self.latest} if self._loggers else {}
        for logger in self._loggers:
            queue = self._queue(logger)
            queue.put((dict(row), step, axes, passed_s))
            self._say(logger, queue)

    def _queue(self, logger: Logger) -> WriteQueue:
        queue = self._queues.get(id(logger))
        if queue is None:
            from ...loggers.write_behind import WriteBehind, WriteInPlace

            writer = RowWriter(logger)
            if self._is_running and isinstance(logger, Logger) and logger.writes_behind:
                queue = logger.queue = WriteBehind(perform=writer)
            else:
                queue = WriteInPlace(perform=writer)
            if self._is_running:
                self._queues[id(logger)] = queue
        return queue

    def finalize(self, status: str) -> None:
        """Write pending rows and close every logger: "success" or "failed". Rows that fail go to a file."""
        for logger in self._loggers:
            self.tell(logger, lambda logger=logger: logger.finalize(status))  # type: ignore[misc]
        self._is_running = False
        queues, self._queues = self._queues, {}
        for logger in self._loggers:
            queue = queues.get(id(logger))
            if queue is None:
                continue
            undone = queue.close()
            self._say(logger, queue)
            rows = [item for item in undone if not callable(item)]
            if rows:
                self._keep(logger, rows)
            if isinstance(logger, Logger):
                logger.queue = None

    def _keep(self, logger: Logger, rows: Sequence[Row]) -> None:
        """Write rows that a logger did not accept into a file."""
        name = type(logger).__name__
        start = f"unwritten_rows_{name}"
        path = os.path.join(self._root, f"{start}.jsonl")
        try:
            if is_url(self._root):
                descriptor, path = tempfile.mkstemp(prefix=f"{start}-", suffix=".jsonl")
                os.close(descriptor)
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps({"step": step, **row}) + "\n" for row, step, _, _ in rows)
        except (OSError, TypeError) as error:
            warn(f"{name} did not accept {counted(len(rows), 'row')}, and they could not be saved: {error}")
            with suppress(OSError):  # on a full disk the file is there, and empty
                if not os.path.getsize(path):
                    os.unlink(path)
            return
        warn(f"{name} did not accept {counted(len(rows), 'row')}: they are in {path}, as JSON lines")

    def files_dir(self, log_dir: str | None) -> str | None:
        """Return the directory on this machine for files beside the logs: `log_dir` unless that is a URL."""
        if log_dir is None or not is_url(log_dir):
            return log_dir
        first = self._loggers[0] if self._loggers else None
        return first.files_dir if isinstance(first, FolderLogger) else None

    def send_files(self) -> None:
        """Upload files that were written beside the logs after those were closed, if at a URL; on every rank."""
        for logger in self._loggers:
            if isinstance(logger, FolderLogger):
                try:
                    logger.send_files(is_end=True)
                except OSError as error:
                    warn(f"{type(logger).__name__}: {error}. A copy is in {logger.files_dir} until the process ends.")

    def write_hyperparameters(self, owners: Sequence[Any], graph_of: nn.Module | None) -> None:
        """Send the hyperparameters of module and data module, and the module's graph.

        Args:
            owners: Module and data module, or None in their place.
            graph_of: The module for `log_graph`; None for none.

        Raises:
            ConfigError: Both have a hyperparameter of one name with different values.
        """
        merged: StateDict = {}
        for owner in owners:
            if owner is None or not getattr(owner, "_lw_log_hyperparams", False):
                continue
            for key, value in dict(resolve_omegaconf(owner.hparams_initial)).items():
                if key == "_class_path":  # of the object that a command line made, where the user named its class
                    continue
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
            self.tell(logger, logger.save)


def _default_logger(root: str) -> Logger:
    from ...loggers import CSVLogger, TensorBoardLogger

    try:
        return TensorBoardLogger(root)
    except MissingDependency:
        if not current_rank():
            log.warning("tensorboard is not installed (`pip install tensorboard`): metrics are logged to CSV files")
        return CSVLogger(root)


class RowWriter:
    """Passes rows to a logger; a row that is retried continues with the part that failed.

    Args:
        logger: Any object with `log_metrics`, and further methods of a Logger.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._row: Row | None = None
        self._is_logged = False

    def __call__(self, item: Row) -> None:
        """Log the row and save."""
        row, step, axes, passed_s = item
        logger = self._logger
        if item is not self._row:
            self._row, self._is_logged = item, False
            if isinstance(logger, Logger):
                logger.wall_s += passed_s
        if not self._is_logged:
            if isinstance(logger, Logger):
                logger.log_row(dict(row), step, axes)
            else:
                logger.log_metrics(dict(row), step=step)
            self._is_logged = True
        logger.save()
        self._row = None


def by_loader(
    metrics: Mapping[str, float], num_loaders: int, loaders_of: Mapping[str, set[int]]
) -> list[Mapping[str, float]]:
    """Return the metrics of each loader: metrics that its batches logged, and metrics that belong to no loader."""
    if num_loaders <= 1:
        return [dict(metrics)]
    everywhere = set(range(num_loaders))
    return [
        {key: value for key, value in metrics.items() if index in loaders_of.get(key, everywhere)}
        for index in range(num_loaders)
    ]


def tables_of(verb: str, results: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the metrics of each loader as a readable table, in the order of the loaders."""
    tables = []
    for index, metrics in enumerate(results):
        title = f"{verb} metrics" + (f", loader {index}" if len(results) > 1 else "")
        width = max([len(title), *(len(key) for key in metrics)], default=len(title))
        rows = [f"{key:<{width}}  {value:.6g}" for key, value in metrics.items()]
        tables.append("\n".join([f"{title:<{width}}", "-" * (width + 14), *rows]))
    return tables
