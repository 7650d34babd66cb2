"""`Profiler`, the base class of profilers, which is notified when an activity of the run starts and stops."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import ChecksKeywords, ConfigError, nearest
from ..remote import is_url

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger(__name__)


class Profiler(ChecksKeywords):
    """Receive the start and the stop of every activity, and report at the end of the run.

    A subclass defines `start` and `stop`, and `summary` for the report. Activities nest, and an activity may start
    again inside itself. All calls come from the thread that trains.

    Args:
        dirpath: Directory of the report file; None is the run's log directory.
        filename: Middle of the report file's name, `<stage>-<filename>[-<rank>].txt`; None logs the report instead.
        steps: First and last training step of a fit to profile, as (10, 15) or "10-15", both included and counted from
            0 at the beginning of the fit. Steps of an evaluation outside fit are counted in the same way. None profiles
            everything.
        ranks: Ranks to profile; None for all.

    Raises:
        ConfigError: `steps` or `ranks` is invalid, or `dirpath` is a URL.
    """

    STEP_ACTION = "run_training_step"
    """The activity that is one training step: a window of micro-batches."""

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        *,
        steps: tuple[int, int] | str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        if dirpath is not None and is_url(dirpath):
            raise ConfigError(
                f"{type(self).__name__}: dirpath={os.fspath(dirpath)!r} is a URL, and reports are local files.",
                fix="pass a local directory, or leave dirpath out: reports are then sent with the logs to their URL.",
            )
        self._lw_dirpath = dirpath
        self.filename = filename
        self.steps = None if steps is None else _read_steps(steps)
        self.ranks = None if ranks is None else _read_ranks(ranks)
        # With neither of the two, profile() is as short as it can be.
        self._lw_is_choosing = self.steps is not None or self.ranks is not None
        self._lw_steps_seen = 0
        self._stage: str | None = None
        self._local_rank: int | None = None
        self._lw_log_dir: str | None = None

    @property
    def dirpath(self) -> str | os.PathLike[str] | None:
        """Directory of the report file: the argument, else the run's log directory; None without either."""
        return self._lw_dirpath if self._lw_dirpath is not None else self._lw_log_dir

    @dirpath.setter
    def dirpath(self, dirpath: str | os.PathLike[str] | None) -> None:
        self._lw_dirpath = dirpath

    @property
    def stage(self) -> str | None:
        """The stage that was passed to the last `setup`; None before."""
        return self._stage

    @property
    def rank_in_names(self) -> int | None:
        """Rank in file names; None with one process, whose file names contain none."""
        return self._local_rank

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node, as passed to `setup`; 0 before."""
        return self._local_rank or 0

    def start(self, action_name: str) -> None:
        """Record the start of an activity.

        Args:
            action_name: Name of the activity.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define start(action_name)")

    def stop(self, action_name: str) -> None:
        """Record the end of the activity of this name that began last.

        Args:
            action_name: Name of the activity.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define stop(action_name)")

    def profile(self, action_name: str) -> AbstractContextManager[str]:
        """Return a context that starts the activity at entry and stops it at exit, also after an exception.

        Args:
            action_name: Name of the activity; also the value of `with ... as`.
        """
        if self._lw_is_choosing and not self._lw_is_chosen(action_name):
            return nullcontext(action_name)
        return _Activity(self, action_name)

    def _lw_is_chosen(self, action_name: str) -> bool:
        """Whether the activity is to be profiled. Called once for each activity, before it."""
        if self.ranks is not None and self.local_rank not in self.ranks:
            return False
        if self.steps is None:
            return True
        if self.is_step(action_name):
            self._lw_steps_seen += 1
        now = self._lw_steps_seen - 1
        return self.steps[0] <= now <= self.steps[1]

    def is_step(self, action_name: str) -> bool:
        """Whether the activity is one step of the current stage: an optimizer step in fit, else a batch.

        Args:
            action_name: Name of the activity.
        """
        if self._stage in (None, "fit"):
            return action_name == self.STEP_ACTION
        return action_name.endswith((".validation_step", ".test_step", ".predict_step"))

    def watch(self, module: nn.Module) -> None:
        """Receive the module of the run. Called before `setup`.

        Args:
            module: The user's module.
        """
        return

    def summary(self) -> str:
        """Return the report as text; empty without a report."""
        return ""

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a run.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: Rank among the processes of this node; None with one process, whose file names have no rank.
            log_dir: The run's log directory, used for the report without a `dirpath`.
        """
        self._stage = stage
        self._local_rank = local_rank
        self._lw_log_dir = None if log_dir is None or is_url(log_dir) else log_dir
        self._lw_steps_seen = 0

    def teardown(self, stage: str | None = None) -> None:
        """End a run; the records stay readable until the next `setup`.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        return

    def describe(self) -> None:
        """Write the report to the file if there is a `filename` and a directory, else to the log on local rank 0.

        The report is appended to an existing file. Ends the run (`teardown`).
        """
        report = self.summary()
        path = self._lw_report_path()
        if report and path is not None:
            from ..files import only_describes

            with only_describes(f"The profiler's report {path}"):
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                with open(path, "a", encoding="utf-8") as file:
                    file.write(report.rstrip("\n") + "\n")
        elif report and self.local_rank == 0:
            _log.info("%s", report)
        self.teardown(self._stage)

    def _lw_report_path(self) -> str | None:
        return None if self.filename is None else self.path_of("txt")

    def path_of(self, extension: str, *names: str) -> str | None:
        """Return the path of a file of this rank; None if no directory is known.

        Args:
            extension: Extension of the file.
            names: Further parts of the file's name: `<stage>-<filename>[-<rank>][-<name>].<extension>`.
        """
        directory = self.dirpath
        if directory is None:
            return None
        parts = [self._stage, self.filename, None if self._local_rank is None else str(self._local_rank), *names]
        name = "-".join(part for part in parts if part)
        return os.path.join(directory, re.sub(r'[<>:"/\\|?*\x00-\x1f]', "_", name) + f".{extension}")


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


def _read_steps(steps: tuple[int, int] | str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", steps) if isinstance(steps, str) else None
    pair = (match[1], match[2] or match[1]) if match else steps
    wrong = ConfigError(
        f"profiler: steps={steps!r} is not a window of steps.",
        fix='pass the first and the last step to profile, both included: steps=(10, 15) or steps="10-15".',
    )
    try:
        first, last = (int(one) for one in pair)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if not 0 <= first <= last:
        raise wrong
    return first, last


def _read_ranks(ranks: Sequence[int]) -> frozenset[int]:
    chosen = [ranks] if isinstance(ranks, int) else list(ranks)
    if not chosen or not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in chosen):
        raise ConfigError(
            f"profiler: ranks={ranks!r} holds no ranks.", fix="pass a list of numbers from 0, such as ranks=[0]."
        )
    return frozenset(chosen)


def not_started(action_name: str, open_names: list[str]) -> ConfigError:
    """Return the error for a stop of an activity that is not open."""
    return ConfigError(
        f"profiler.stop({action_name!r}) without a start{nearest(action_name, open_names)}; open are: {open_names}.",
        fix="call start first, or use `with profiler.profile(name):`, which does both.",
    )
