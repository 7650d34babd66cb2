"""PyTorchProfiler: the time of operators and kernels in some steps, by torch.profiler, with traces for Chrome."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, profile, record_function

from ..errors import ConfigError, nearest
from ..fabric.compiling import compiled_parts
from ..files import only_describes
from ..protocols import Options, StateDict
from .base import Profiler

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger(__name__)

# Names that users know, and what torch calls them now.
_RENAMED = {
    "cuda_time": "device_time",
    "cuda_time_total": "device_time_total",
    "cuda_memory_usage": "device_memory_usage",
    "self_cuda_memory_usage": "self_device_memory_usage",
}
_EVALUATION = "[EvalLoop].validation"
_RESERVED = ("schedule", "on_trace_ready", "use_cuda")


class PyTorchProfiler(Profiler):
    """Record a window of steps with torch.profiler, separately for training and each kind of evaluation.

    A window has no cost before it begins and after it ends: its profile is closed, and only its table is kept. A window
    of training continues through a validation; a window of validation ends with the validation at the latest. Without
    `steps` and `schedule`, a window skips one step, warms up for one, and records three.

    Args:
        dirpath: Directory of the files; None is the run's log directory.
        filename: Middle of the files' names, `<stage>-<filename>[-<rank>].txt`; None logs the table.
        group_by_input_shapes: Whether the table has a row for each combination of input shapes.
        emit_nvtx: Whether to mark operators for `nsys profile` instead of recording; requires CUDA. There is no table.
        export_to_chrome: Whether to write `<stage>[-<filename>][-<rank>]-<kind>.<step>.pt.trace.json` for each window,
            which chrome://tracing, Perfetto and TensorBoard open.
        row_limit: Maximum number of rows in the table; -1 for all.
        sort_by_key: Column to sort the table by, one of AVAILABLE_SORT_KEYS; None is the time on the device, or on the
            CPU without one.
        record_module_names: Whether the trace names the submodule that each operator belongs to.
        table_kwargs: Further arguments of torch's `table()`.
        memory_timeline: Whether to also write `....memory.json` for each trace: for each device, times in microseconds
            and the bytes allocated at these times.
        export_to_flame_graph: Whether to write a `.stack` file for each window; requires with_stack=True.
        metric: Quantity in the flame graph: "self_cpu_time_total" or "self_cuda_time_total".
        schedule: Function step -> torch.profiler.ProfilerAction; each kind of step is counted separately, from 0.
        on_trace_ready: Function called with each finished profile, after the files are written.
        steps: First and last step to record, both included, as (10, 15) or "10-15"; the step before them warms up.
            Replaces `schedule`.
        ranks: Ranks to profile; None for all.
        profiler_kwargs: Arguments of torch.profiler.profile: activities, record_shapes, profile_memory, with_stack, ...

    Attributes:
        averages: Kind of step ("train", "validation", ...) -> torch's `key_averages()` of its last window.

    Raises:
        ConfigError: Arguments are unknown or invalid; all are named.
    """

    AVAILABLE_SORT_KEYS = frozenset(
        {
            "cpu_time", "cuda_time", "cpu_time_total", "cuda_time_total", "cpu_memory_usage", "cuda_memory_usage",
            "self_cpu_memory_usage", "self_cuda_memory_usage", "count",
        }
    )  # fmt: skip
    action_prefix = "[action]"
    """Beginning of the names of an activity's records."""
    STEP_FUNCTIONS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: Mapping[str, Any] | None = None,
        *,
        memory_timeline: bool = False,
        export_to_flame_graph: bool = False,
        metric: str = "self_cpu_time_total",
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[[profile], object] | None = None,
        steps: tuple[int, int] | str | None = None,
        ranks: Sequence[int] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename, steps=steps, ranks=ranks)
        window, self.steps = self.steps, None  # a window needs a step to warm up, which Profiler would leave out
        self._lw_is_choosing = self.ranks is not None
        has_cuda = torch.cuda.is_available()
        sort_by_key = sort_by_key or ("cuda_time_total" if has_cuda else "cpu_time_total")
        _check(
            sort_by_key=(sort_by_key, self.AVAILABLE_SORT_KEYS),
            metric=(metric, {"self_cpu_time_total", "self_cuda_time_total"}),
            table_kwargs=dict(table_kwargs or {}),
            profiler_kwargs=profiler_kwargs,
            schedule=schedule,
            has_both=window is not None and schedule is not None,
            lacks_cuda=emit_nvtx and not has_cuda,
            lacks_stack=export_to_flame_graph and not profiler_kwargs.get("with_stack"),
        )
        self.group_by_input_shapes = group_by_input_shapes
        self.emit_nvtx = emit_nvtx
        self.export_to_chrome = export_to_chrome
        self.row_limit = row_limit
        self.sort_by_key = sort_by_key
        self.record_module_names = record_module_names
        self.table_kwargs = dict(table_kwargs or {})
        self.memory_timeline = memory_timeline
        self.export_to_flame_graph = export_to_flame_graph
        self.metric = metric
        self.on_trace_ready = on_trace_ready
        self.profiler_kwargs = profiler_kwargs
        if group_by_input_shapes:
            profiler_kwargs.setdefault("record_shapes", True)
        if memory_timeline or "memory" in sort_by_key:
            profiler_kwargs.setdefault("profile_memory", True)
        self._lw_window = window if window is not None else (2, 4)
        self.schedule = schedule if schedule is not None else self._lw_action_at
        self.averages: dict[str, Any] = {}
        self._lw_tables: dict[str, str] = {}
        self._lw_counts: dict[str, int] = {}
        self._lw_module: nn.Module | None = None
        self._lw_session: ProfilerSession | None = None
        self._lw_is_evaluating = False
        self._lw_nvtx: AbstractContextManager[object] | None = None

    def watch(self, module: nn.Module) -> None:
        """Receive the module whose submodules the trace names.

        Args:
            module: The user's module.
        """
        self._lw_module = module

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a run, and discard the records of an earlier one.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: Rank of this process; None with one process.
            log_dir: The run's log directory.
        """
        super().setup(stage, local_rank, log_dir)
        self.averages, self._lw_tables, self._lw_counts = {}, {}, {}

    def teardown(self, stage: str | None = None) -> None:
        """End a run and its profiles. A window that is being recorded ends early.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        self._lw_finish_session()
        self._lw_module = None
        self._lw_is_evaluating = False
        if self._lw_nvtx is not None:
            self._lw_nvtx.__exit__(None, None, None)
            self._lw_nvtx = None

    def start(self, action_name: str) -> None:
        """Record the start of an activity; a step may begin a window.

        Args:
            action_name: Name of the activity.
        """
        if self.emit_nvtx:
            if self._lw_nvtx is None:
                self._lw_nvtx = torch.autograd.profiler.emit_nvtx()
                self._lw_nvtx.__enter__()
            torch.cuda.nvtx.range_push(action_name)
            return
        self._lw_is_evaluating = self._lw_is_evaluating or action_name == _EVALUATION
        kind = self._lw_kind_of(action_name)
        if kind is not None and self._lw_session is None:
            number = self._lw_counts.setdefault(kind, 0)
            if self._lw_action(number) is not ProfilerAction.NONE:
                self._lw_session = ProfilerSession(self, kind, number)
        if self._lw_session is not None:
            self._lw_session.enter(action_name)

    def stop(self, action_name: str) -> None:
        """Record the end of an activity; a step may end a window.

        Args:
            action_name: Name of the activity.
        """
        if self.emit_nvtx:
            if self._lw_nvtx is not None:
                torch.cuda.nvtx.range_pop()
            return
        session, kind = self._lw_session, self._lw_kind_of(action_name)
        if session is not None:
            session.leave(action_name)
        if action_name == _EVALUATION:
            self._lw_is_evaluating = False
            if session is not None and session.kind != "train":
                self._lw_finish_session()  # or training would continue inside of it
        if kind is None or (session is not None and session.kind != kind):
            return  # steps of another kind within a window belong to it, and are not counted
        number = self._lw_counts.get(kind, 0)
        self._lw_counts[kind] = number + 1
        if session is not None:
            is_last = self._lw_action(number) is ProfilerAction.RECORD_AND_SAVE
            if is_last or self._lw_action(number + 1) is ProfilerAction.NONE:
                self._lw_finish_session()
            else:
                session.profile.step()

    def summary(self) -> str:
        """Return the table of the last window of each kind of step. Ends a window that is being recorded."""
        self._lw_finish_session()
        if self.emit_nvtx:
            return ""
        parts = [f"{kind} steps\n{table}" for kind, table in self._lw_tables.items()]
        if not parts and self._lw_counts:
            seen = ", ".join(f"{count} {kind}" for kind, count in self._lw_counts.items())
            parts = [
                f"nothing was recorded: there were {seen} steps, and the window begins at step {self._lw_window[0]}. "
                'Pass steps="0-2" to record from the first step on.'
            ]
        return "\n".join([f"{(self._stage or '').upper()} Profiler Report".strip(), *parts]) if parts else ""

    # --- windows -----------------------------------------------------------------------------------------------------

    def _lw_kind_of(self, action_name: str) -> str | None:
        """Return the kind of step that the activity is; None if it is not a step."""
        if action_name == self.STEP_ACTION:
            return "train"
        if self._stage == "fit" and not self._lw_is_evaluating:
            return None  # the trial validation before training
        function = action_name.rpartition(".")[2]
        is_step = function in self.STEP_FUNCTIONS and function != "training_step"
        return function.removesuffix("_step") if is_step else None

    def _lw_action_at(self, number: int) -> ProfilerAction:
        first, last = self._lw_window
        if number < first - 1 or number > last:
            return ProfilerAction.NONE
        if number < first:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD if number < last else ProfilerAction.RECORD_AND_SAVE

    def _lw_action(self, number: int) -> ProfilerAction:
        action = self.schedule(number)
        if not isinstance(action, ProfilerAction):
            raise ConfigError(
                f"PyTorchProfiler: schedule({number}) returned {action!r}, expected a torch.profiler.ProfilerAction.",
                fix="pass torch.profiler.schedule(wait=..., warmup=..., active=..., repeat=1), or steps=(first, last).",
            )
        return action

    def _lw_finish_session(self) -> None:
        session, self._lw_session = self._lw_session, None
        if session is not None:
            session.finish()

    def keep(self, session: ProfilerSession) -> None:
        """Keep the table of a finished window and write its files."""
        recorded = session.profile
        averages = self.averages[session.kind] = recorded.key_averages(group_by_input_shape=self.group_by_input_shapes)
        options = {"sort_by": _RENAMED.get(self.sort_by_key, self.sort_by_key), "row_limit": self.row_limit}
        self._lw_tables[session.kind] = averages.table(**{**options, **self.table_kwargs})
        path = self.path_of(f"{session.first}.pt.trace.json", session.kind)
        if path is None and (self.export_to_chrome or self.memory_timeline or self.export_to_flame_graph):
            _log.warning("PyTorchProfiler writes no files: it has no dirpath, and there is no log directory")
        elif path is not None:
            with only_describes(f"The profiler's trace {path}"):
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                self._lw_write(recorded, path)
        if self.on_trace_ready is not None:
            self.on_trace_ready(recorded)

    def _lw_write(self, recorded: Any, path: str) -> None:
        stem = path.removesuffix(".pt.trace.json")
        if self.export_to_flame_graph:
            recorded.export_stacks(f"{stem}.stack", self.metric)
        if not (self.export_to_chrome or self.memory_timeline):
            return
        recorded.export_chrome_trace(path)
        if self.memory_timeline:
            with open(path, encoding="utf-8") as file:
                events = json.load(file)["traceEvents"]
            with open(f"{stem}.memory.json", "w", encoding="utf-8") as file:
                json.dump(_memory_of(events), file)
            if not self.export_to_chrome:
                os.remove(path)

    def name_modules(self, stack: ExitStack) -> None:
        """Let the trace name the parts of the module until the stack is closed."""
        module = self._lw_module
        if module is None or not self.record_module_names:
            return
        compiled = compiled_parts(module)
        for path, child in module.named_modules():
            if path and not any(path == one or path.startswith(f"{one}.") or not one for one in compiled):
                _name_module(stack, child, self.name_of_module(path, child))

    def name_of_module(self, path: str, module: nn.Module) -> str:
        """Return the name of a submodule's records.

        Args:
            path: Its path.
            module: The submodule.
        """
        return f"[module]{type(module).__name__}: {path}"

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_lw_session": None, "_lw_nvtx": None, "_lw_module": None, "averages": {}}


class ProfilerSession:
    """One window: torch's profile of it, and what it names.

    Args:
        owner: The profiler.
        kind: Kind of the steps.
        first: Number of the first of them.
    """

    def __init__(self, owner: PyTorchProfiler, kind: str, first: int) -> None:
        self.kind = kind
        self.first = first
        self._open: list[tuple[str, AbstractContextManager[object]]] = []
        self._hooks = ExitStack()
        self._prefix = owner.action_prefix
        self.profile = profile(
            schedule=lambda number: owner.schedule(first + number),
            on_trace_ready=lambda _: owner.keep(self),
            **owner.profiler_kwargs,
        )
        self.profile.start()
        owner.name_modules(self._hooks)

    def enter(self, action_name: str) -> None:
        """Name what follows, until `leave`."""
        named = record_function(f"{self._prefix}{action_name}")
        named.__enter__()
        self._open.append((action_name, named))

    def leave(self, action_name: str) -> None:
        """End the last action of this name, and those inside it."""
        if any(name == action_name for name, _ in self._open):
            while True:
                name, named = self._open.pop()
                named.__exit__(None, None, None)
                if name == action_name:
                    return

    def finish(self) -> None:
        """End all actions, and the profile."""
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)
        self._hooks.close()
        self.profile.stop()


def _name_module(stack: ExitStack, module: nn.Module, name: str) -> None:
    running: list[record_function] = []

    def before(*_: object) -> None:
        running.append(record_function(name))
        running[-1].__enter__()

    def after(*_: object) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after, always_call=True).remove)


def _memory_of(events: list[StateDict]) -> dict[str, list[tuple[float, int]]]:
    """Return device -> (microseconds, bytes allocated) in the order of time."""
    found: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event.get("name") == "[memory]":
            args = event["args"]
            device = "cpu" if args.get("Device Type") == 0 else f"device:{args.get('Device Id', 0)}"
            found.setdefault(device, []).append((float(event["ts"]), int(args["Total Allocated"])))
    return {device: sorted(points) for device, points in found.items()}


def _check(
    *,
    sort_by_key: tuple[str, Collection[str]],
    metric: tuple[str, Collection[str]],
    table_kwargs: Options,
    profiler_kwargs: Options,
    schedule: object,
    has_both: bool,
    lacks_cuda: bool,
    lacks_stack: bool,
) -> None:
    problems: list[tuple[str, str]] = []
    for name, (value, known) in {"sort_by_key": sort_by_key, "metric": metric}.items():
        if value not in known:
            guess = nearest(str(value), known)
            problems.append((f"{name}={value!r}{guess} is unknown", f"pass one of {', '.join(sorted(known))}"))
    allowed = set(inspect.signature(torch.autograd.profiler_util.EventList.table).parameters) - {"self"}
    for name in table_kwargs:
        if name in ("sort_by", "row_limit"):
            own = "sort_by_key" if name == "sort_by" else name
            problems.append((f"table_kwargs has {name!r}, which is an argument of the profiler itself", f"pass {own}="))
        elif name not in allowed:
            problems.append((f"table_kwargs has {name!r}{nearest(name, allowed)}", f"pass some of {sorted(allowed)}"))
    taken = set(inspect.signature(profile.__init__).parameters) - {"self", *_RESERVED}
    for name in profiler_kwargs:
        if name not in taken:
            problems.append((f"{name}={nearest(name, taken)} is unknown", f"pass some of {', '.join(sorted(taken))}"))
    if schedule is not None and not callable(schedule):
        problems.append((f"schedule={schedule!r} is not a function", "pass torch.profiler.schedule(...)"))
    if has_both:
        problems.append(("both steps and schedule are given", "pass one of them"))
    if lacks_cuda:
        problems.append(("emit_nvtx=True, and there is no CUDA device", "leave emit_nvtx out"))
    if lacks_stack:
        problems.append(("export_to_flame_graph=True without stacks", "pass with_stack=True, too"))
    if problems:
        whats, fixes = zip(*problems, strict=True)
        raise ConfigError(f"PyTorchProfiler: {'; '.join(whats)}.", fix=f"{'; '.join(dict.fromkeys(fixes))}.")
