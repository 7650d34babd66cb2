"""What a profiler is: it hears when an activity of the run starts and stops. The lifecycle calls it."""

from __future__ import annotations

import logging
import os
import re
from contextlib import AbstractContextManager
from types import TracebackType

__all__ = ["PassThroughProfiler", "Profiler"]

_log = logging.getLogger(__name__)


class Profiler:
    """Hear the start and the stop of every activity, and report at the end of the run.

    A subclass defines `start` and `stop`, and `summary` for the report. Activities nest, and an activity may start
    again inside itself. All calls come from the thread that trains.

    Args:
        dirpath: Directory of the report file; None takes the run's log directory.
        filename: Middle of the report file's name, `<stage>-<filename>[-<rank>].txt`; None logs the report instead.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        self.dirpath = None if dirpath is None else os.fspath(dirpath)
        self.filename = filename
        self._stage: str | None = None
        self._local_rank: int | None = None
        self._log_dir: str | None = None

    @property
    def local_rank(self) -> int:
        """Rank on this machine, as given to `setup`; 0 before."""
        return self._local_rank or 0

    def start(self, action_name: str) -> None:
        """Note that an activity begins.

        Args:
            action_name: Name of the activity.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define start(action_name)")

    def stop(self, action_name: str) -> None:
        """Note that the activity that began last under this name ends.

        Args:
            action_name: Name of the activity.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define stop(action_name)")

    def profile(self, action_name: str) -> AbstractContextManager[str]:
        """Return a context that is the activity: it starts at entry and stops at exit, also by an exception.

        Args:
            action_name: Name of the activity; also what `with ... as` gives.
        """
        return _Activity(self, action_name)

    def summary(self) -> str:
        """Return the report as text; empty if there is nothing to say."""
        return ""

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a run.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: Rank on this machine; None if there is one process, whose report has no rank in its name.
            log_dir: The run's log directory, where the report goes without a `dirpath`.
        """
        self._stage = stage
        self._local_rank = local_rank
        self._log_dir = log_dir

    def teardown(self, stage: str | None = None) -> None:
        """End a run; what was recorded stays readable until the next `setup`.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        return

    def describe(self) -> None:
        """Write the report: to the file if there is a `filename` and a directory, else to the log, on local rank 0.

        A file that is there already is added to. Ends the run (`teardown`).
        """
        report = self.summary()
        path = self._report_path()
        if report and path is not None:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(report.rstrip("\n") + "\n")
        elif report and self.local_rank == 0:
            _log.info("%s", report)
        self.teardown(self._stage)

    def _report_path(self) -> str | None:
        directory = self.dirpath if self.dirpath is not None else self._log_dir
        if self.filename is None or directory is None:
            return None
        parts = [self._stage, self.filename, None if self._local_rank is None else str(self._local_rank)]
        name = "-".join(part for part in parts if part)
        return os.path.join(directory, re.sub(r'[<>:"/\\|?*\x00-\x1f]', "_", name) + ".txt")


class PassThroughProfiler(Profiler):
    """Record nothing."""

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""


class _Activity(AbstractContextManager[str]):
    __slots__ = ("_name", "_profiler")

    def __init__(self, profiler: Profiler, name: str) -> None:
        self._profiler = profiler
        self._name = name

    def __enter__(self) -> str:
        self._profiler.start(self._name)
        return self._name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._profiler.stop(self._name)
