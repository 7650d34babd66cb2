"""Cost and gain of compiling in a run: the time of the first and of later steps, graphs, and recompilations."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from ...messages import counted
from ..timeline.phases import StepRecord, readable_time

if TYPE_CHECKING:
    from ...fabric.recompiles import RecompileWatch
    from ..timeline import Timeline

logger = logging.getLogger(__name__)

_MEASURED = 3  # steps after the first compiled one


class CompileReport:
    """Follows the steps that the timeline measures, and logs once what compiling cost and gains.

    It reads nothing from the device, and between measured steps it does nothing.

    Args:
        watch: Counts compilations.
        timeline: Measures steps.
        compare: Number of steps that run uncompiled first.
        is_rank_zero: Whether to log it.
    """

    def __init__(self, watch: RecompileWatch, timeline: Timeline, *, compare: int, is_rank_zero: bool) -> None:
        self._watch, self._timeline = watch, timeline
        self._compare, self._is_rank_zero = compare, is_rank_zero
        self._closed = 0
        self._switched_at = -1
        self._first_s: float | None = None
        self._has_said = False

    def start(self, stack: ExitStack) -> None:
        """Follow until the stack is closed, then log what is left."""
        timeline = self._timeline
        timeline.follower, timeline.in_a_row = self.follow, self._compare + 1 + _MEASURED
        stack.callback(self._end)
        if self._compare:
            torch.compiler.set_stance("force_eager")
            stack.callback(torch.compiler.set_stance, "default")

    def follow(self, record: StepRecord) -> None:
        """Record a measured step."""
        self._closed += 1
        if self._closed == self._compare:
            torch.compiler.set_stance("default")
            self._timeline.is_next_apart = True
        elif self._closed == self._compare + 1:
            self._switched_at = record.step
            self._first_s = _own_s(record)
        elif self._closed == self._compare + 1 + _MEASURED:
            self._say()

    def _end(self) -> None:
        self._watch.look()
        self._timeline.follower, self._timeline.in_a_row = None, None
        if not self._has_said and self._first_s is not None:
            self._say()
        elif self._watch.num_recompiled and self._is_rank_zero and self._first_s is not None:
            self._timeline.compiled = self.text()
            logger.info("%s", self.text())

    def _say(self) -> None:
        self._has_said = True
        self._watch.look()
        if not (self._watch.num_compiled or self._compare):  # an earlier run of this process has compiled everything
            return
        self._timeline.compiled = self.text()
        if self._is_rank_zero:
            logger.info("%s", self._timeline.compiled)

    def text(self) -> str:
        """Return what is known so far, as one line."""
        watch = self._watch
        graphs = counted(watch.num_compiled, "graph")
        cached = ""
        if watch.num_cached:
            parts_of = watch.num_cached + watch.num_uncached
            cached = f" ({watch.num_cached} of {parts_of} parts from the cache in {_cache_dir()})"
        took = f"{graphs} in {readable_time(watch.seconds)}{cached}"
        parts = [f"torch.compile: {took if watch.num_compiled else 'an earlier run of this process has compiled it'}"]
        if watch.num_recompiled:
            cause = f"; the last because: {watch.last_cause}" if watch.last_cause else ""
            parts[0] += f", {watch.num_recompiled} of them recompilations{cause}"
        assert self._first_s is not None
        parts.append(f"the first compiled step took {readable_time(self._first_s)}")
        later = self._times(lambda step: step > self._switched_at)
        eager = self._times(lambda step: step < self._switched_at)
        if later:
            parts.append(f"later ones {readable_time(later)}")
        if later and eager:
            text = f"uncompiled {readable_time(eager)}: {eager / later:.2f} times as fast"
            if eager > later:
                text += f", which pays off after {int((self._first_s - eager) / (eager - later)) + 1} steps"
            parts.append(text)
        elif later and not self._compare:
            parts.append("compile={'compare': 5} measures the gain")
        return "; ".join(parts)

    def _times(self, is_meant: Callable[[int], bool]) -> float | None:
        """Return the median seconds of measured steps without the waiting for data; None without any."""
        times = [_own_s(one) for one in self._timeline.records if is_meant(one.step)]
        return statistics.median(times) if times else None


def _own_s(record: StepRecord) -> float:
    return record.duration_s - record.phases.get("data", 0.0) - record.phases.get("hooks", 0.0)


def _cache_dir() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
