"""XLAProfiler: names of a run's activities in TPU traces, by torch_xla's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from ..errors import ConfigError, MissingDependency
from .base import Profiler


class XLAProfiler(Profiler):
    """Serve traces of this process, with names for steps and backward passes.

    The server starts with the first activity that is recorded. Capture with TensorBoard's profile plugin, or with
    `torch_xla.debug.profiler.trace(f"localhost:{port}", folder)`. There is no report.

    Args:
        port: Port of the profiler's server.

    Raises:
        ConfigError: `port` is not a port number.
        MissingDependency: torch_xla is not installed.
    """

    STEP_FUNCTIONS = frozenset({"validation_step", "test_step", "predict_step"})
    RECORD_FUNCTIONS = frozenset({"training_step", "backward", "validation_step", "test_step", "predict_step"})

    def __init__(self, port: int = 9012) -> None:
        super().__init__()
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
            raise ConfigError(f"XLAProfiler: port={port!r} is not a port.", fix="pass a number from 1 to 65535.")
        try:
            self._lw_xla: Any = import_module("torch_xla.debug.profiler")
        except ImportError as error:
            raise MissingDependency("torch_xla", needed_for="profiler='xla'", extra="xla") from error
        self.port = port
        self._lw_server: object = None
        self._lw_open: list[tuple[str, AbstractContextManager[object]]] = []
        self._lw_steps: dict[str, int] = {}

    def start(self, action_name: str) -> None:
        """Begin a named range, if the activity is a step or a backward pass.

        Args:
            action_name: Name of the activity.
        """
        function = action_name.rpartition(".")[2]
        is_step = function in self.STEP_FUNCTIONS or action_name == self.STEP_ACTION
        if function not in self.RECORD_FUNCTIONS and not is_step:
            return
        if self._lw_server is None:
            self._lw_server = self._lw_xla.start_server(self.port)
        if is_step:
            number = self._lw_steps.get(function, 0)
            self._lw_steps[function] = number + 1
            context = self._lw_xla.StepTrace(function, step_num=number)
        else:
            context = self._lw_xla.Trace(function)
        context.__enter__()
        self._lw_open.append((action_name, context))

    def stop(self, action_name: str) -> None:
        """End the activity's named range, if it has one.

        Args:
            action_name: Name of the activity.
        """
        for index in range(len(self._lw_open) - 1, -1, -1):
            if self._lw_open[index][0] == action_name:
                self._lw_open.pop(index)[1].__exit__(None, None, None)
                return

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_lw_xla": None, "_lw_server": None, "_lw_open": []}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lw_xla=import_module("torch_xla.debug.profiler"))
