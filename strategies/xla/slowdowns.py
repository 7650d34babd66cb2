"""Warnings about slow steps of XLA: steps that read tensors, and graphs that never repeat.

Both are silent otherwise, and can take most of the time. Each step compares torch_xla's counters of executed and
compiled graphs; they are on the host, so that no device is waited for.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType

import torch.distributed as dist
from torch import Tensor

from ...accelerators.xla import import_xla
from ...protocols import StepOutput
from ..tree import leaves

logger = logging.getLogger(__name__)

Trace = Callable[[FrameType, str, object], "Trace | None"]

_WARM_UP = 10  # steps: every run compiles some graphs at first (optimizer state begins, numbers are logged)
_WINDOW = 20  # steps that are counted: rare reads, and a last batch of another shape, are normal
_NS_PER_S = 1e9
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
)
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "")
_OUR_PARTS = ("callbacks", "data", "fabric", "loggers", "precision", "profilers", "strategies", "trainer")


class StepWatch:
    """Runs the user's step and warns, once each, when most steps read a tensor or compile a graph.

    It counts during the first steps; then `run` is the user's step itself.

    Args:
        name: The step's name, for messages.
        step: The step.
        own_graphs: Returns the number of graphs that the strategy itself has executed.
        finds_reads: Whether only the user's code executes graphs within a step.

    Attributes:
        run: The function to call; it may change with each call.
    """

    def __init__(
        self, name: str, step: Callable[..., StepOutput], *, own_graphs: Callable[[], int], finds_reads: bool = True
    ) -> None:
        self.run: Callable[..., StepOutput] = self._watch
        self._name = name
        self._step = step
        self._own_graphs = own_graphs
        self._value: Callable[[str], int | None] = import_xla()._XLAC._xla_counter_value
        self._steps = -_WARM_UP
        self._reads = 0
        self._new_forms = 0
        self._compiled = 0
        self._shapes: list[tuple[int, ...]] = []  # of the last batch
        self._new_shapes: list[tuple[tuple[int, ...], ...]] = []  # of batches whose graphs were compiled
        self._finds_reads = finds_reads

    def _watch(self, *args: object, **kwargs: object) -> StepOutput:
        """Return the step's output, and count the graphs that it executed."""
        value = self._value
        compiled = value("UncachedCompile") or 0
        before = compiled + (value("CachedCompile") or 0) - self._own_graphs()
        if compiled != self._compiled:
            self._compiled = compiled
            self._new_forms += 1
            self._new_shapes.append(tuple(self._shapes))  # a step's graph is executed after it
        self._shapes = [tuple(leaf.shape) for _, leaf in leaves(args) if isinstance(leaf, Tensor)]
        output = self._step(*args, **kwargs)
        if self._executed() > before:
            self._reads += 1
        self._steps += 1
        if self._steps == 0:
            self._reads = self._new_forms = 0
            self._new_shapes = []
        elif self._steps == _WINDOW:
            self._judge()
        return output

    def _judge(self) -> None:
        """Warn of what was counted, and stop counting."""
        self.run = self._locate if self._finds_reads and self._reads * 2 >= _WINDOW else self._step
        if self._new_forms * 2 >= _WINDOW:
            self._warn_of_forms()

    def _warn_of_forms(self) -> None:
        data = import_xla("torch_xla.debug.metrics").metric_data("CompileTime")
        forms = list(dict.fromkeys(self._new_shapes))
        if len(forms) > 1:
            some = ", ".join(" ".join(map(str, shapes)) for shapes in forms[:3])
            cause = f"batches have different shapes: {some}"
            remedy = "pad them to a few sizes, and pass drop_last=True"
        else:
            cause = "batches have equal shapes: a Python number or branch in the step changes"
            remedy = "pass numbers as tensors, and choose with torch.where"
        _warn(
            "XLA compiled again in %d of %d calls of %s (%d graphs and %.1f s in this process): %s. To fix it: "
            "%s; XLAStatsMonitor logs the counts.",
            self._new_forms, _WINDOW, self._name, data[0], data[1] / _NS_PER_S, cause, remedy,
        )  # fmt: skip

    def _locate(self, *args: object, **kwargs: object) -> StepOutput:
        """Run the step once line by line, and name the user's lines that executed a graph."""
        self.run = self._step
        places = _Places(self._executed)
        output = places.run(self._step, args, kwargs)
        where = ", ".join(places.found[:5])
        _warn(
            "%s reads a tensor in every step%s, so that the host waits for the device and the graph ends. .item(), "
            "float(), print(), .cpu() and an `if` on a tensor read it. To fix it: pass tensors to self.log, and use "
            "torch.where instead of `if`.",
            self._name, f", at {where}" if where else "",
        )  # fmt: skip
        return output

    def _executed(self) -> int:
        return (self._value("UncachedCompile") or 0) + (self._value("CachedCompile") or 0) - self._own_graphs()


class _Places:
    """Runs a function, and finds the lines of the user's files at which a number grew."""

    def __init__(self, number: Callable[[], int]) -> None:
        self.found: list[str] = []
        self._number = number
        self._last = 0
        self._frame: FrameType | None = None
        self._line = 0

    def run(
        self, function: Callable[..., StepOutput], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> StepOutput:
        """Return the function's result; no lines are found while a debugger traces the thread."""
        if sys.gettrace() is not None:
            return function(*args, **kwargs)
        self._last = self._number()
        sys.settrace(self._called)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(None)
            self._note()
            self._frame = None

    def _called(self, frame: FrameType, event: str, argument: object) -> Trace | None:
        if _is_library(frame.f_code.co_filename):
            return None
        self._moved(frame)
        return self._traced

    def _traced(self, frame: FrameType, event: str, argument: object) -> Trace | None:
        self._moved(frame.f_back if event == "return" else frame)
        return self._traced

    def _moved(self, frame: FrameType | None) -> None:
        self._note()
        if frame is not None and not _is_library(frame.f_code.co_filename):
            self._frame, self._line = frame, frame.f_lineno

    def _note(self) -> None:
        number = self._number()
        if number > self._last and self._frame is not None:
            place = f"{self._frame.f_code.co_filename}:{self._line}"
            if place not in self.found:
                self.found.append(place)
        self._last = number


def _warn(message: str, *values: object) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message, *values)


def _is_library(file: str) -> bool:
    """Return whether a file is Python's, an installed package's, or one of Loopwright's own."""
    if file.startswith(("<", *_LIBRARIES)):
        return True
    path = os.path.realpath(file)
    return path.startswith(_OURS) and path[len(_OURS) :].split(os.sep, 1)[0] in _OUR_PARTS
