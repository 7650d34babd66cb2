"""`PyTorchProfiler` as programs for Lightning expect it: names of its records, and the records themselves."""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction

from ... import profilers
from ...profilers.pytorch import Session

__all__ = ["PyTorchProfiler"]

_KINDS = {"fit": "train", "validate": "validation"}


def _record_always(step: int) -> ProfilerAction:
    return ProfilerAction.RECORD


class PyTorchProfiler(profilers.PyTorchProfiler):
    """`lw.PyTorchProfiler`, whose `schedule=None` records an entire run.

    Args:
        args: See `lw.PyTorchProfiler`.
        kwargs: See `lw.PyTorchProfiler`; `schedule=None`, if it is passed, records everything from `setup` to the end.

    Attributes:
        function_events: Records of the last window that was finished; None before.
    """

    action_prefix = "[pl][profile]"
    module_prefix = "[pl][module]"

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: see the base class
        self._records_all = "schedule" in kwargs and kwargs["schedule"] is None
        if self._records_all:
            kwargs["schedule"] = _record_always
        super().__init__(*args, **kwargs)
        self.function_events: EventList | None = None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a run, and the window where that is the run itself.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: Rank; None if there is one process.
            log_dir: The run's log directory.
        """
        super().setup(stage, local_rank, log_dir)
        self.function_events = None
        if self._records_all and not self.emit_nvtx:
            self._session = Session(self, _KINDS.get(stage, stage), 0)

    def keep(self, session: Session) -> None:
        """Keep the records and the table of a finished window, and write its files."""
        self.function_events = session.profile.events()
        super().keep(session)

    def name_of_module(self, path: str, module: object) -> str:
        """Return the name of a submodule's records.

        Args:
            path: Its path.
            module: The submodule.
        """
        kind = type(module)
        return f"{self.module_prefix}{kind.__module__}.{kind.__name__}: {path}"
