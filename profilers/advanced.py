"""AdvancedProfiler: the time of Python functions in each activity, measured by the standard library's cProfile."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
from collections.abc import Sequence

from ..errors import ConfigError
from ..files import only_describes
from .base import Profiler, not_started


class AdvancedProfiler(Profiler):
    """Run one cProfile per activity, and report the functions of each by cumulative time.

    Python allows one profiler at a time. While an activity runs inside another, the outer profiler is paused, so that
    every call belongs to the innermost activity. Every Python call becomes slower: compare functions, not runs.

    Args:
        dirpath: Directory of the files; None is the run's log directory.
        filename: Middle of the report file's name, `<stage>-<filename>[-<rank>].txt`; None logs the report instead.
        line_count_restriction: Number of functions to report for each activity, or a fraction of them from 0.0 to 1.0.
        dump_stats: Whether to also write `<stage>-<filename>[-<rank>]-<activity>.prof` for each activity, which
            `python -m pstats`, snakeviz and others open.
        steps: Training steps to profile; see `Profiler`.
        ranks: Ranks to profile; see `Profiler`.

    Raises:
        ConfigError: `line_count_restriction` is negative or a fraction above 1.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: int | float = 1.0,
        dump_stats: bool = False,
        *,
        steps: tuple[int, int] | str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(dirpath, filename, steps=steps, ranks=ranks)
        is_fraction = isinstance(line_count_restriction, float)
        if line_count_restriction < 0 or (is_fraction and line_count_restriction > 1):
            raise ConfigError(
                f"line_count_restriction={line_count_restriction!r} is neither a number of lines nor a fraction.",
                fix="pass an int such as 20, or a float from 0.0 to 1.0.",
            )
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._lw_open: list[str] = []  # the innermost last
        self._lw_is_over = False

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a run, and discard the records of an earlier run that has ended.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: Rank of this process; None with one process.
            log_dir: The run's log directory.
        """
        super().setup(stage, local_rank, log_dir)
        if self._lw_is_over:
            self.profiled_actions = {}
            self._lw_is_over = False

    def teardown(self, stage: str | None = None) -> None:
        """End a run and its profiles; the records stay readable until the next `setup`.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        if self._lw_open:
            self.profiled_actions[self._lw_open[-1]].disable()
            self._lw_open.clear()
        self._lw_is_over = True

    def start(self, action_name: str) -> None:
        """Record the start of an activity, inside the open one.

        Args:
            action_name: Name of the activity.

        Raises:
            ConfigError: Another tool profiles this process, and this Python allows only one.
        """
        if self._lw_open:
            self.profiled_actions[self._lw_open[-1]].disable()
        profile = self.profiled_actions.setdefault(action_name, cProfile.Profile())
        self._lw_open.append(action_name)
        self._lw_enable(profile)

    def stop(self, action_name: str) -> None:
        """Record the end of the activity of this name that began last.

        Args:
            action_name: Name of the activity.

        Raises:
            ConfigError: No activity of this name is open.
        """
        if action_name not in self._lw_open:
            raise not_started(action_name, self._lw_open)
        self.profiled_actions[self._lw_open[-1]].disable()
        last = len(self._lw_open) - 1 - self._lw_open[::-1].index(action_name)
        del self._lw_open[last]
        if self._lw_open:
            self._lw_enable(self.profiled_actions[self._lw_open[-1]])

    def summary(self) -> str:
        """Return the functions of each activity by cumulative time, in the order of their first start."""
        parts = []
        for name, profile in self.profiled_actions.items():
            out = io.StringIO()
            stats = self._lw_stats(profile, out)
            if stats is not None:
                stats.strip_dirs().sort_stats("cumulative").print_stats(self.line_count_restriction)
                parts.append(f"Profile stats for: {name}\n{out.getvalue().strip()}\n")
        return "\n".join([f"{(self._stage or '').upper()} Profiler Report".strip(), "", *parts]) if parts else ""

    def describe(self) -> None:
        """Write the report and, with `dump_stats`, a file for each activity; ends the run."""
        if self.dump_stats:
            for name, profile in self.profiled_actions.items():
                stats = self._lw_stats(profile, io.StringIO())
                path = self.path_of("prof", name)
                if stats is not None and path is not None:
                    with only_describes(f"The profiler's file {path}"):
                        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                        stats.dump_stats(path)
        super().describe()

    def _lw_enable(self, profile: cProfile.Profile) -> None:
        try:
            profile.enable()
        except ValueError as error:  # from Python 3.12 on
            raise ConfigError(
                f"profiler='advanced' cannot run: {error}.",
                fix="do not run under another profiler (python -m cProfile, coverage, a debugger).",
            ) from error

    @staticmethod
    def _lw_stats(profile: cProfile.Profile, out: io.StringIO) -> pstats.Stats | None:
        """Return the statistics; None if nothing was called, which pstats refuses."""
        profile.create_stats()
        return pstats.Stats(profile, stream=out) if profile.stats else None
