"""Profilers as programs for Lightning expect them: what subclasses call, and the records of `PyTorchProfiler`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction

from ... import profilers
from ...messages import warn
from ...profilers.pytorch import ProfilerSession
from .imports.served import Served

__all__ = ["AdvancedProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"]

_KINDS = {"fit": "train", "validate": "validation"}
# The default window is over after this number of steps.
_STEPS_OF_WINDOW = 5
_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


def _report_of(profiler: profilers.Profiler, stats: Mapping[str, str]) -> str:
    """Return a report of several parts: name of each -> its text."""
    rank = "" if profiler.rank_in_names is None else f" rank: {profiler.rank_in_names}"
    stage = "" if profiler.stage is None else f"{profiler.stage.upper()} "
    parts = [f"Profile stats for: {name}{rank}\n{text}" for name, text in stats.items()]
    return "\n".join([f"{stage}Profiler Report", *parts])


def _name_of_file(profiler: profilers.Profiler, action_name: str | None, extension: str) -> str:
    """Return the name of a file of this rank."""
    rank = None if profiler.rank_in_names is None else str(profiler.rank_in_names)
    parts = [part for part in (profiler.stage, profiler.filename, rank, action_name) if part]
    return (re.sub(r"[\\/:*?\"<>|\n\r\t_]+", "_", "-".join(parts)).strip() or "profile") + extension


class Profiler(profilers.Profiler, metaclass=Served):
    """`lw.Profiler` with what profilers of programs call.

    `_output_file` is what Lightning's hold open while they write; here no file is held.
    """

    _output_file = None

    def _stats_to_str(self, stats: Mapping[str, str]) -> str:
        return _report_of(self, stats)

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        return _name_of_file(self, action_name, extension)


class SimpleProfiler(profilers.SimpleProfiler, metaclass=Served):
    """`lw.SimpleProfiler` with what profilers of programs call."""

    _output_file = None

    def _stats_to_str(self, stats: Mapping[str, str]) -> str:
        return _report_of(self, stats)

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        return _name_of_file(self, action_name, extension)


class AdvancedProfiler(profilers.AdvancedProfiler, metaclass=Served):
    """`lw.AdvancedProfiler` with what profilers of programs call."""

    _output_file = None

    def _stats_to_str(self, stats: Mapping[str, str]) -> str:
        return _report_of(self, stats)

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        return _name_of_file(self, action_name, extension)


def _record_always(step: int) -> ProfilerAction:
    return ProfilerAction.RECORD


class PyTorchProfiler(profilers.PyTorchProfiler):
    """`lw.PyTorchProfiler`, whose `schedule=None` records an entire run.

    So does the default in a run whose limits end it before the default window does.

    Args:
        args: See `lw.PyTorchProfiler`.
        kwargs: See `lw.PyTorchProfiler`; `schedule=None`, if it is passed, records everything from `setup` to the end.

    Attributes:
        function_events: Records of the last window that was finished; None before.
    """

    _output_file = None
    action_prefix = "[pl][profile]"
    module_prefix = "[pl][module]"

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: see the base class
        self._lw_records_all = "schedule" in kwargs and kwargs["schedule"] is None
        self._lw_is_default = "schedule" not in kwargs and kwargs.get("steps") is None
        if self._lw_records_all:
            kwargs["schedule"] = _record_always
        super().__init__(*args, **kwargs)
        self.function_events: EventList | None = None

    def _stats_to_str(self, stats: Mapping[str, str]) -> str:
        return _report_of(self, stats)

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        return _name_of_file(self, action_name, extension)

    @property
    def _schedule(self) -> object:  # None, or what says which steps are recorded
        return None if self._lw_records_all else self.schedule

    def watch(self, module: nn.Module) -> None:
        """Know the module of the run, and whether its Trainer takes enough steps for the default window.

        Args:
            module: The user's module.
        """
        super().watch(module)
        trainer = getattr(module, "_lw_trainer", None)
        if trainer is None or not self._lw_is_default:
            return
        stages = _STAGES.get(str(trainer.state.fn), ())
        limits = [getattr(trainer, f"limit_{stage}_batches") for stage in stages]
        self._lw_records_all = any(type(limit) is int and 0 < limit < _STEPS_OF_WINDOW for limit in limits)
        self.schedule = _record_always if self._lw_records_all else self._lw_action_at
        if self._lw_records_all:
            warn("PyTorchProfiler: there are not enough steps for its default window; the entire run is recorded")

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a run, and the window where that is the run itself.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: Rank; None if there is one process.
            log_dir: The run's log directory.
        """
        super().setup(stage, local_rank, log_dir)
        self.function_events = None
        if self._lw_records_all and not self.emit_nvtx:
            self._lw_session = ProfilerSession(self, _KINDS.get(stage, stage), 0)

    def start(self, action_name: str) -> None:
        """Note that an activity begins; outside of a run, the first one begins a window with `schedule=None`.

        Args:
            action_name: Name of the activity.
        """
        if self._lw_records_all and self._lw_session is None and self._stage is None and not self.emit_nvtx:
            self._lw_session = ProfilerSession(self, "train", 0)
        super().start(action_name)

    def keep(self, session: ProfilerSession) -> None:
        """Keep the records and the table of a finished window, and write its files."""
        events = session.profile.events()
        if self._stage is None:  # there are no steps
            events[:] = [event for event in events if not event.name.startswith("ProfilerStep")]
        self.function_events = events
        super().keep(session)

    def name_of_module(self, path: str, module: object) -> str:
        """Return the name of a submodule's records.

        Args:
            path: Its path.
            module: The submodule.
        """
        kind = type(module)
        return f"{self.module_prefix}{kind.__module__}.{kind.__name__}: {path}"
