"""`trainer.timeline`: where the time of a fit went, phase by phase, at almost no cost. The Trainer makes one.

Between two measured steps the training step is exactly the bare one: the fit loop compares two integers. A measured
step runs the same code with a plan, a lifecycle and a stream whose functions note the time (`open` swaps them in,
`close` takes them out). What is rare (validation, checkpoints, logging, the two ends of an epoch) is always measured.

The first step is kept apart: it pays for compilation, tuning and lazy allocation. Then a few steps are measured in a
row, and after these every step where steps are long, else one in `every`, at random distances, so that nothing periodic
(a log interval, a worker's turn) is always met or always missed. Memory is bounded: sums, and the last `MAX_RECORDS`
measured steps.

On a CUDA device events in the stream note when the device, not the host, passed from phase to phase; nothing waits for
them. `synchronize` makes the host wait instead, for devices without events.
"""

from __future__ import annotations

import copy
import json
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from time import perf_counter_ns
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...accelerators.usage import synchronize
from ...files import replace_file
from .optimizer_trial import OptimizerTrial, try_fused
from .phases import STEP_PHASES, WHOLE_PHASES, StepRecord
from .report import TimelineReport, make_report
from .roofline import OperationCounter, OperationCounts
from .stragglers import RankTimes, Straggler, find_stragglers, most_steps

if TYPE_CHECKING:
    from ...data.stream import BatchStream
    from ...protocols import Batch
    from ...strategies import Strategy
    from ..lifecycle import Lifecycle
    from ..run import FitRun, StepPlan
    from ..state import Progress

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["STEP_PHASES", "WHOLE_PHASES", "StepRecord", "Timeline"]

_STEP_EVENTS = (
    "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
_IN_A_ROW = 3  # measured right after the first step
# Measuring a step costs about 25 us on the host, and 100 us more with device events. Each pair: minimum duration of the
# shortest step, and steps per measured step. Measuring then adds below 0.3 %, or 0.3 us per step.
_EVERY_BY_NS = ((10_000_000, 1), (3_000_000, 10), (0, 100))
_COMMUNICATION_NS = 4_000  # what measuring costs for each method in which a sharded model communicates
_DEVICE_FACTOR = 5
_NS_PER_S = 1e9
_COLLECTIVES = (
    "all_gather", "all_reduce", "barrier", "broadcast", "gather_objects", "gather_state",
    "reduce_boolean_decision", "sync_buffers",
)  # fmt: skip


class Timeline:
    """Measures the phases of a fit; `report()` explains them. Each fit starts from zero.

    Set the attributes before `fit`. With several ranks, each has a separate timeline.

    Attributes:
        is_enabled: Whether `fit` measures; False under `barebones=True`.
        every: Average number of steps per measured step; 1 measures each. None: each step if steps take 10 ms, one in
            10 if they take 3 ms, else one in 100.
        synchronize: Whether a measured step waits for the device between phases. Phases are then true on any device,
            but that step loses the overlap of host and device.
        counts_operations: Whether one step, which is not timed, counts the floating-point operations and the bytes
            of each operator, so that the report can distinguish a compute-bound from a memory-bound step.
        records: The last `MAX_RECORDS` measured steps, oldest first, without the first step of the fit.
        due: Total number of batches at which the next measured step is due; read by the fit loop.
        is_open: Whether a step is being measured.
        follower: Function called with each measured step, including the first; None calls nothing.
        in_a_row: Number of consecutive steps to measure at the beginning; None for a few.
        is_next_apart: Whether the next step differs from the following ones, as the first step does.
        compiled: Cost and gain of compiling; None if nothing was compiled.
        ranks: What each rank has measured of itself; empty until the fit is over, and with one rank.
    """

    MAX_RECORDS = 1000

    def __init__(self) -> None:
        self.is_enabled = True
        self.every: int | None = None
        self.synchronize = False
        self.counts_operations = False
        self.follower: Callable[[StepRecord], None] | None = None
        self.in_a_row: int | None = None
        self._clock: Callable[[], int] = perf_counter_ns
        # What notes the time in a device's stream; None where the host's clock is the one that counts.
        self._make_event: Callable[[], torch.Event] | None = None
        self._reset()

    def _reset(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=self.MAX_RECORDS)
        self.due: int | float = math.inf
        self.is_open = self.is_next_apart = False
        self.compiled: str | None = None
        self.operations: OperationCounts | None = None
        self._counter: OperationCounter | None = None
        self._spent = dict.fromkeys(("steps", *STEP_PHASES, *WHOLE_PHASES), 0)
        self._sums = dict.fromkeys(STEP_PHASES, 0.0)  # seconds, over measured steps
        self._phase = "steps"
        self._outer: list[str] = []
        self._began_ns = self._since = self._clock()
        self._is_over = True
        self._num_measured = 0
        self._windows_opened = 0
        self._first: StepRecord | None = None
        self._measured_ns = 0
        self.ranks: list[RankTimes] = []
        self._own: dict[str, list[float]] = {}  # seconds of each save and validation without waiting for other ranks
        self._own_depth = 0
        self._waited_ns = 0
        self._shortest_ns = 0
        self._opened_ns = 0
        self._begin_steps = self._end_steps = 0
        self._progress: Progress | None = None  # while the fit is under way, also after an error in it
        self._marks: list[tuple[str, torch.Event]] | None = None
        self._pending: deque[tuple[int, float, list[tuple[str, torch.Event]]]] = deque(maxlen=64)
        self._num_idle = 0
        self._num_asked = 0
        self._rest = "loop"
        self._next_batch: Callable[[], Batch] | None = None
        self._communication: list[tuple[nn.Module, str]] = []  # methods of a sharded model that are measured
        self._num_communicating = 0
        self._plan: StepPlan | None = None
        self._bare: tuple[StepPlan, Lifecycle] | None = None
        self._timed: tuple[StepPlan, Lifecycle] | None = None
        # Of the fit that is over. They are tried when a report asks, once.
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._trial: OptimizerTrial | None = None
        self._is_tried = False

    def __getstate__(self) -> dict[str, object]:
        state = {**self.__dict__, "_bare": None, "_timed": None, "_plan": None, "_marks": None, "_counter": None}
        state["_communication"], state["_optimizers"], state["follower"] = [], [], None
        return {**state, "_pending": deque(maxlen=64), "_make_event": None}

    # --- called by the fit loop and the trainer ----------------------------------------------------------------------

    def begin(self, run: FitRun, *, rest: str = "loop") -> None:
        """Begin to measure a fit, and forget the one before.

        Args:
            run: The run.
            rest: Phase of the time in a step that belongs to no other: "optimizer" where that one runs the step.
        """
        self._reset()
        if not self.is_enabled:
            return
        self._is_over = False
        self._rest = rest
        self._device = run.device
        if self._make_event is None and run.device.type == "cuda" and not self.synchronize:
            self._make_event = lambda: torch.cuda.Event(enable_timing=True)
        self._begin_steps = run.progress.steps
        self._progress = run.progress
        self.due = run.progress.total_batches
        self._began_ns = self._since = self._clock()

    def end(self, run: FitRun | None) -> None:
        """End the fit, also after an error; what was measured stays."""
        if self._is_over:
            return
        if run is not None and self.is_open:
            self.drop(run)
        self._turn_to()
        self._is_over = True
        self.due = math.inf
        self._outer.clear()
        self._bare = self._timed = self._plan = None
        if run is None:
            return
        self._end_steps, self._progress = run.progress.steps, None
        if self._pending:
            self._pending[-1][2][-1][1].synchronize()  # the fit is over: waiting costs nothing
            self._read_events()
        self._optimizers = [weakref.ref(one) for one in run.optimizers if isinstance(one, Optimizer)]

    def enter(self, phase: str) -> None:
        """Note that a phase begins, within the one that is under way."""
        self._outer.append(self._phase)
        self._turn_to(phase)

    def leave(self) -> None:
        """Note that the phase that began last ends."""
        self._turn_to(self._outer.pop())

    def open(self, run: FitRun) -> None:
        """Measure the step that follows: swap in the functions that note the time."""
        self._turn_to()
        number = self._windows_opened
        self._windows_opened += 1
        self.is_open = True
        self._phase = self._rest
        self._opened_ns = self._since
        self._bare = (run.plan, run.lifecycle)
        if self._timed is None or self._plan is not run.plan:
            self._plan = run.plan
            self._timed = (
                self._timed_plan(run.plan, run.model),
                self._timed_lifecycle(run.lifecycle, is_manual=not run.is_automatic),
            )
        run.plan, run.lifecycle = self._timed
        self._swap_stream(run.stream)
        self._swap_communication(run.model)
        if self._make_event is not None and number:
            self._marks = []
            self._mark("")
        if self.counts_operations and number == 2:
            self._counter = OperationCounter(run.device, lambda: self._phase)
            self._counter.start()

    def close(self, run: FitRun) -> None:
        """End the measured step, and keep what it took."""
        self._turn_to()
        spent, phases, total = self._spent, {}, 0
        for phase in STEP_PHASES:
            taken = spent[phase]
            if taken:
                phases[phase] = taken / _NS_PER_S
                total += taken
                spent[phase] = 0
        is_counted = self._counter is not None
        marks = self._marks
        self._swap_out(run)
        record = StepRecord(
            max(run.progress.steps - run.has_stepped, 0), (self._opened_ns - self._began_ns) / _NS_PER_S, phases
        )
        if self._first is None or is_counted or self.is_next_apart:
            # Not like the steps that follow: the first of a fit, one that compiles, or one slowed down by counting.
            self.is_next_apart = False
            self._first = self._first or record
            spent["first step"] += total
        else:
            self._measured_ns += total
            self._shortest_ns = min(self._shortest_ns or total, total)
            if marks is not None:
                self._num_asked += 1
                self._num_idle += bool(marks[-1][1].query())
                self._pending.append((record.step, record.start_s, marks))
                self._read_events()
            else:
                self._keep(record)
        self._plan_next(run)
        if self.follower is not None:
            self.follower(record)

    def drop(self, run: FitRun) -> None:
        """End the measured step without keeping it: the epoch was over, or the step failed."""
        self._turn_to()
        for phase in STEP_PHASES:
            self._spent["steps"] += self._spent[phase]
            self._spent[phase] = 0
        self._swap_out(run)
        self.due = run.progress.total_batches

    def timed(self, phase: str, function: Callable[P, T]) -> Callable[P, T]:
        """Return the function, its time counted as the phase."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            outer = self._phase
            self._turn_to(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn_to(outer)

        return timed

    @contextmanager
    def own_time(self, phase: str, strategy: Strategy, model: nn.Module | None = None) -> Iterator[None]:
        """Note the seconds that this rank itself takes, without those in which it waits for others in a collective.

        Args:
            phase: "checkpoint" or "validation".
            strategy: Connects the ranks; with one rank, nothing is noted.
            model: A model that communicates in its forward pass, if any does.
        """
        if self._is_over or strategy.world_size == 1:
            yield
            return
        is_outer, self._own_depth = not self._own_depth, self._own_depth + 1
        swapped: list[tuple[object, str]] = []
        if is_outer:
            swapped += [(strategy, name) for name in _COLLECTIVES]
            swapped += getattr(model, "communication_calls", list)()
        for owner, name in swapped:
            vars(owner)[name] = self._waiting(getattr(owner, name))
        began, waited = self._clock(), self._waited_ns
        try:
            yield
        finally:
            took = self._clock() - began - (self._waited_ns - waited)
            self._own.setdefault(phase, []).append(took / _NS_PER_S)
            self._own_depth -= 1
            for owner, name in swapped:
                vars(owner).pop(name)

    def _waiting(self, collective: Callable[P, T]) -> Callable[P, T]:
        def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
            began, before = self._clock(), self._waited_ns
            try:
                return collective(*args, **kwargs)
            finally:
                self._waited_ns = before + self._clock() - began  # one that calls another counts once

        return waiting

    def times_of_rank(self, world_size: int) -> RankTimes:
        """Return what this rank has measured of itself, for the others."""
        last = list(self.records)[-most_steps(world_size) :]
        return RankTimes({one.step: one.phases for one in last}, self._own)

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _turn_to(self, phase: str | None = None) -> None:
        """Count the time until now as the present phase's, then switch to this one; None: the same."""
        if self.is_open:
            if self.synchronize:
                synchronize(self._device)
            if self._marks is not None:
                self._mark(self._phase)
        now = self._clock()
        if not self._is_over:
            self._spent[self._phase] += now - self._since
        self._since = now
        if phase is not None:
            self._phase = phase

    def _mark(self, ended: str) -> None:
        assert self._make_event is not None
        assert self._marks is not None
        event = self._make_event()
        event.record()
        self._marks.append((ended, event))

    def _read_events(self) -> None:
        """Take over the steps that the device has finished."""
        while self._pending and self._pending[0][2][-1][1].query():
            step, start_s, marks = self._pending.popleft()
            seconds = dict.fromkeys(STEP_PHASES, 0.0)
            for (_, before), (phase, event) in pairwise(marks):
                if phase in seconds:
                    seconds[phase] += before.elapsed_time(event) / 1e3
            self._keep(StepRecord(step, start_s, {phase: taken for phase, taken in seconds.items() if taken > 0}))

    def _keep(self, record: StepRecord) -> None:
        self._num_measured += 1
        self.records.append(record)
        for phase, taken in record.phases.items():
            self._sums[phase] += taken

    def _plan_next(self, run: FitRun) -> None:
        now = run.progress.total_batches
        if self._windows_opened <= (self.in_a_row or _IN_A_ROW):
            self.due = now
            return
        every = self.every
        if every is None:
            shortest = self._shortest_ns // (1 if self._make_event is None else _DEVICE_FACTOR)
            cost = self._num_communicating * _COMMUNICATION_NS
            fits = [count for least, count in _EVERY_BY_NS if shortest >= least and cost <= 0.003 * count * shortest]
            every = fits[0] if fits else _EVERY_BY_NS[-1][1]
        size = max(run.trainer.accumulate_grad_batches, 1)
        self.due = next_measured(-(-now // size), every) * size

    def rebind(self) -> None:
        """Take the functions of a step again: they have been replaced."""
        self._timed = None

    # --- the functions of a measured step ----------------------------------------------------------------------------

    def _timed_plan(self, plan: StepPlan, model: nn.Module | None) -> StepPlan:
        timed, backward = self.timed, plan.backward
        if isinstance(model, nn.parallel.DistributedDataParallel):
            backward = self._apart_from_waiting(backward)
        return replace(
            plan,
            transfer=timed("transfer", plan.transfer),
            training_step=timed("forward", plan.training_step),
            backward=timed("backward", backward),
            zero_grad=timed("optimizer", plan.zero_grad),
            unscale=plan.unscale and timed("clip", plan.unscale),
            clip=plan.clip and timed("clip", plan.clip),
            take_step=timed("optimizer", plan.take_step),
            step_by_module=plan.step_by_module and timed("optimizer", plan.step_by_module),
            step_schedules=timed("schedule", plan.step_schedules),
        )

    def _apart_from_waiting(self, backward: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Return a backward pass whose time, after its gradients are computed, is counted as communication.

        DistributedDataParallel waits for the other ranks in a callback of the engine, which it queues when the last
        gradient is there. One that is queued as the pass begins is called right before it.
        """
        engine = torch.autograd.Variable._execution_engine

        def begin(_: Tensor) -> None:
            engine.queue_callback(lambda: self._turn_to("communication"))

        def apart(loss: Tensor) -> None:
            if loss.requires_grad:
                loss.register_hook(begin)
            backward(loss)

        return apart

    def _timed_lifecycle(self, life: Lifecycle, *, is_manual: bool) -> Lifecycle:
        twin = copy.copy(life)
        for name in _STEP_EVENTS:
            if life.does_anything(name):
                setattr(twin, name, self.timed("hooks", getattr(life, name)))
        if is_manual:
            # Within the module's own training_step these two events stand around each backward pass.
            before, after = twin.on_before_backward, twin.on_after_backward

            def begin_backward(*args: object) -> None:
                before(*args)
                self.enter("backward")

            def end_backward(*args: object) -> None:
                self.leave()
                after(*args)

            vars(twin).update(on_before_backward=begin_backward, on_after_backward=end_backward)
        return twin

    def _swap_stream(self, stream: BatchStream) -> None:
        # Reading may happen in any of the three: where the length is unknown, asking for more means to read ahead.
        self._next_batch = stream.next_batch
        for name in ("next_batch", "has_next", "remaining"):
            vars(stream)[name] = self.timed("data", getattr(stream, name))

    def _swap_communication(self, model: nn.Module | None) -> None:
        calls = getattr(model, "communication_calls", None)
        self._communication = [] if calls is None else calls()
        self._num_communicating = len(self._communication)
        for owner, name in self._communication:
            vars(owner)[name] = self.timed("communication", getattr(owner, name))

    def _swap_out(self, run: FitRun) -> None:
        self.is_open = False
        self._marks = None
        self._phase = "steps"
        for owner, name in self._communication:
            vars(owner).pop(name, None)
        self._communication = []
        if self._counter is not None:
            self._counter.stop()
            self.operations = self._counter.counts()
            self._counter = None
        assert self._bare is not None
        run.plan, run.lifecycle = self._bare
        self._bare = None
        if run.stream is not None:
            own = vars(run.stream)
            own["next_batch"] = self._next_batch
            self._next_batch = None
            own.pop("has_next", None)
            own.pop("remaining", None)

    # --- what was measured -------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the fit, measured or not."""
        end = self._end_steps if self._progress is None else self._progress.steps
        return end - self._begin_steps

    @property
    def num_measured(self) -> int:
        """Steps that were measured, the first of the fit not among them."""
        return self._num_measured

    @property
    def first_step(self) -> StepRecord | None:
        """The first step, by the host's clock; None before there was one."""
        return self._first

    @property
    def clock(self) -> str:
        """Whose time it is: "host", "device" (events in its stream), or "synchronized"."""
        if self.synchronize:
            return "synchronized"
        return "host" if self._num_asked == 0 else "device"

    @property
    def idle_fraction(self) -> float | None:
        """In how many of the measured steps the device had nothing left to do when the host was done; None: unknown."""
        return self._num_idle / self._num_asked if self._num_asked else None

    def try_optimizer(self) -> tuple[bool, OptimizerTrial | None]:
        """Return whether the optimizers of the fit are known, and what the largest takes with fused steps.

        They are known when the fit is over. The trial takes some milliseconds, once; None where nothing can be fused.
        """
        optimizers = [one for reference in self._optimizers if (one := reference()) is not None]
        if optimizers and not self._is_tried:
            self._trial, self._is_tried = try_fused(optimizers), True
        return self._is_tried, self._trial

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase over the whole fit; their sum is the time that the fit's loop took.

        What was measured in some steps is extended to all of them. "communication" is what gradients took after the
        backward pass was computed; with sharded parameters, what forward and backward waited for.
        """
        spent = {phase: self._spent[phase] / _NS_PER_S for phase in WHOLE_PHASES}
        in_steps = (self._spent["steps"] + self._measured_ns) / _NS_PER_S
        sums = dict(self._sums)
        if not self._num_measured:  # a fit of one step, or too short: the first is all there is
            first = self._first.phases if self._first is not None else {}
            sums.update({phase: first.get(phase, 0.0) for phase in STEP_PHASES})
            in_steps, spent["first step"] = in_steps + spent["first step"], 0.0
        total = sum(sums.values())
        if not total:
            sums["loop"] = total = 1.0
        return {**{phase: in_steps * taken / total for phase, taken in sums.items()}, **spent}

    def report(self) -> TimelineReport:
        """Return what the phases mean: fractions, bottleneck, what binds the step, and what to do; `str()` is a table.

        May be asked for during a fit, too, between two steps.
        """
        return make_report(self)

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that the others waited for; known on each rank after the fit."""
        return find_stragglers(self.ranks, sum(self.seconds().values()))

    def as_dict(self) -> dict[str, object]:
        """Return the report and the measured steps as plain values, for JSON."""
        records = [{"step": one.step, "start_s": one.start_s, "phases": one.phases} for one in self.records]
        return {"version": 1, **self.report().as_dict(), "records": records}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `as_dict()` as JSON; folders are made.

        Args:
            path: Of the file, such as `<log_dir>/timeline.json`, where `loopwright report` looks for it.
        """
        os.makedirs(os.path.dirname(os.fspath(path)) or ".", exist_ok=True)
        replace_file(path, json.dumps(self.as_dict()))


def next_measured(window: int, every: int) -> int:
    """Return the first window from this one on that is measured, of one in `every`.

    Ranks that measure equally often measure the same windows, whatever came before, and those that measure less often
    measure some of these: one of each ten at random, and of these one of each ten.
    """
    block = window // every
    while (found := _measured_in(block, every)) < window:
        block += 1
    return found


def _measured_in(block: int, every: int) -> int:
    while every > 1:
        size = 10 if every % 10 == 0 else every
        block = block * size + crc32(f"{every} {block}".encode()) % size
        every //= size
    return block
