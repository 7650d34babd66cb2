"""Readers of loggers' files: metrics.csv, metrics.jsonl, TensorBoard's event files.

A source can be read repeatedly while the run continues, and reads only what is new. A file that was rewritten (a new
column, a resumed run that dropped rows) is read again from its start.
"""

from __future__ import annotations

import csv
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import MissingDependency
from ..protocols import Tree
from .media import Media, Message, media_of_value

CSV_FILE = "metrics.csv"
JSON_LINES_FILE = "metrics.jsonl"
_EVENTS = ".tfevents."
EVENT_FILES = f"*{_EVENTS}*"
_CLOCK = "wall_s"
_UNIX_TIME = 1e8  # a clock above it counts from 1970, not from the start of the run: three years are 1e8 seconds


class NumberSource(ABC):
    """The numbers of one folder in one format.

    Attributes:
        folder: Where the files are.
        points: Metric's name -> {step: value}; the last value logged for a step counts.
        clock: Step -> seconds that the run had taken when the step was logged; without the time between a run's
            sessions.
        media: Images, texts and histograms.
        problems: What could not be read, in words.
    """

    kind: str
    precision: int  # if several sources have a point, the value of the one with the highest precision counts

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._forget()

    def _forget(self) -> None:
        self.points: dict[str, dict[int, float]] = {}
        self.clock: dict[int, float] = {}
        self.media: list[Media] = []
        self.problems: list[str] = []

    @abstractmethod
    def refresh(self) -> bool:
        """Read what is new and return whether there was anything."""

    def _add(self, name: str, step: int, value: float) -> None:
        self.points.setdefault(name, {})[step] = value


class _LineSource(NumberSource):
    """A text file that grows by complete lines."""

    file_name: str

    def _forget(self) -> None:
        super()._forget()
        self._offset = self._line = self._unreadable = 0
        self._inode = -1
        self._base = self._latest = 0.0
        self._first: float | None = None
        self._tail = b""

    def refresh(self) -> bool:
        path = self.folder / self.file_name
        is_changed = False
        try:
            with open(path, "rb") as file:
                state = os.fstat(file.fileno())
                if self._offset and (state.st_ino != self._inode or not self._still_begins_as_read(file)):
                    self._forget()
                    is_changed = True
                self._inode = state.st_ino
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            self.problems = [f"{path} cannot be read: {error.strerror or error}"]
            return is_changed
        complete = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        if not complete:
            return is_changed
        self._offset += len(complete)
        self._tail = complete[-64:]
        for line in complete.decode("utf-8", errors="replace").splitlines():
            self._line += 1
            if line.strip() and not self._read_line(line):
                self._unreadable += 1
                if self._unreadable == 1:
                    self.problems.append(f"{path} has a line that cannot be read, number {self._line}.")
        return True

    def _still_begins_as_read(self, file: BinaryIO) -> bool:
        file.seek(max(0, self._offset - len(self._tail)))
        return bool(file.read(len(self._tail)) == self._tail)

    @abstractmethod
    def _read_line(self, line: str) -> bool:
        """Take one line; False if it is damaged."""

    def _take_row(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._add(name, step, value)
        seconds = values.get(_CLOCK)
        if seconds is None or not math.isfinite(seconds):
            return
        if self._first is None:
            self._first = seconds if seconds > _UNIX_TIME else 0.0
        elapsed = seconds - self._first
        if elapsed + self._base < self._latest:  # a session whose clock began at zero again
            self._base = self._latest - (elapsed if elapsed < 0 else 0.0)
        self._latest = elapsed + self._base
        self.clock[step] = self._latest


class _CSVSource(_LineSource):
    """`metrics.csv`: a header, then one row per log call, cells empty for what it does not have."""

    kind, precision, file_name = "CSV", 2, CSV_FILE

    def _forget(self) -> None:
        super()._forget()
        self._columns: list[str] = []
        self._row = 0

    def _read_line(self, line: str) -> bool:
        cells = next(csv.reader([line]))
        if not self._columns:
            self._columns = cells
            return True
        row = dict(zip(self._columns, cells, strict=False))
        values = {name: number for name, cell in row.items() if cell and (number := _number(cell)) is not None}
        step = values.pop("step", None)
        if len(cells) > len(self._columns) or (step is not None and not math.isfinite(step)):
            return False
        self._take_row(self._row if step is None else int(step), values)
        self._row += 1
        return True


class _JSONLinesSource(_LineSource):
    """`metrics.jsonl`: one JSON object per line, with `step`, perhaps `epoch` and `wall_s`, and metrics."""

    kind, precision, file_name = "JSON lines", 3, JSON_LINES_FILE

    def _read_line(self, line: str) -> bool:
        try:
            row = json.loads(line)
        except ValueError:
            return False
        if not isinstance(row, dict):
            return False
        values = {str(name): number for name, value in row.items() if (number := _number(value)) is not None}
        step = values.pop("step", None)
        if step is None:
            return "step" not in row  # a record of another kind, such as hyperparameters
        if not math.isfinite(step):
            return False
        self._take_row(int(step), values)
        return True


class _EventSource(NumberSource):
    """TensorBoard's event files: scalars with float32 precision, and the time of each."""

    kind, precision = "TensorBoard", 1

    def _forget(self) -> None:
        super()._forget()
        self._loaders: dict[str, Any] = {}  # Any: TensorBoard is not annotated
        self._sizes: dict[str, int] = {}
        self._begins: dict[str, float] = {}
        self._base = self._latest = 0.0

    def refresh(self) -> bool:
        sizes = _event_files(self.folder)
        if sizes == self._sizes:
            return False
        is_truncated = any(sizes.get(name, 0) < size for name, size in self._sizes.items())
        if is_truncated or any(name < max(self._sizes, default="") for name in sizes.keys() - self._sizes.keys()):
            self._forget()  # a resumed run removed the rows after its checkpoint
        for name in sorted(sizes):  # TensorBoard's own order: the names begin with the time
            if sizes[name] != self._sizes.get(name):
                self._read_file(name)
        self._sizes = sizes
        return True

    def _read_file(self, name: str) -> None:
        try:
            from google.protobuf.message import DecodeError
            from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        except ImportError as error:
            raise MissingDependency("tensorboard", needed_for="reading TensorBoard's event files") from error
        if name not in self._loaders:
            self._loaders[name] = LegacyEventFileLoader(str(self.folder / name))
            self._base = self._latest
        try:
            for event in self._loaders[name].Load():
                self._take_event(name, event)
        except (DecodeError, OSError) as error:
            self.problems.append(f"{self.folder / name} cannot be read to its end: {error}")

    def _take_event(self, name: str, event: Message) -> None:
        begin = self._begins.setdefault(name, event.wall_time)
        if not event.HasField("summary"):
            return
        for value in event.summary.value:
            number = _scalar_of(value)
            if number is None:
                if (item := media_of_value(value, event.step)) is not None:
                    self.media.append(item)
            else:
                self._add(value.tag, event.step, number)
                self._latest = max(self._latest, self._base + event.wall_time - begin)
                self.clock[event.step] = self._base + event.wall_time - begin


def find_sources(folder: Path) -> list[NumberSource]:
    """Return the sources in a folder, without its subfolders."""
    found: list[NumberSource] = []
    if (folder / JSON_LINES_FILE).is_file():
        found.append(_JSONLinesSource(folder))
    if (folder / CSV_FILE).is_file():
        found.append(_CSVSource(folder))
    if _event_files(folder):
        found.append(_EventSource(folder))
    return found


def _event_files(folder: Path) -> dict[str, int]:
    try:
        with os.scandir(folder) as entries:
            return {e.name: e.stat().st_size for e in entries if _EVENTS in e.name and e.is_file()}
    except OSError:
        return {}


def _number(value: Tree) -> float | None:
    """Return a logged value as a number; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _scalar_of(value: Message) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.metadata.plugin_data.plugin_name not in ("", "scalars"):
        return None
    tensor = value.tensor
    if any(dim.size != 1 for dim in tensor.tensor_shape.dim):
        return None
    return next(_values_of(tensor), None)


def _values_of(tensor: Message) -> Iterator[float]:
    from tensorboard.util.tensor_util import make_ndarray

    try:
        yield float(make_ndarray(tensor).reshape(-1)[0])
    except (TypeError, ValueError, IndexError):
        return
