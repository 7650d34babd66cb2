"""JSONLinesLogger: one JSON object per line in metrics.jsonl, appended, exact after a resume."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..files import append_whole
from ..remote import absolute_place
from .base import Metrics, scalars
from .folder import DEFAULT_NAME, FolderLogger, keep_old_file

if TYPE_CHECKING:
    from ..protocols import StateDict

_AXES = ("step", "epoch", "samples", "wall_s")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JSONLinesLogger(FolderLogger):
    """Write metrics to `save_dir/name/version_N/metrics.jsonl` and hyperparameters to `hparams.yaml` beside it.

    Each `log_metrics` call writes one line: `{"step": 50, "epoch": 0, "samples": 1600, "wall_s": 3.2, "loss": 0.25}`.
    It contains the progress of training, from which a reader chooses the x axis, and then the metrics in the order of
    logging. Numbers keep all digits. JSON lacks NaN: non-finite numbers are the texts "NaN", "Infinity" and
    "-Infinity", which `read_json_lines` converts to numbers. A line is passed to the system when `log_metrics` returns.

    Args:
        save_dir: Directory of all runs, or a URL that fsspec supports.
        name: Name of the experiment; None or "" for no directory of the experiment.
        version: Number N for `version_N`, or a text that is used unchanged; None is the next free number.
        prefix: Text before each metric's name, joined by "-".
        root_dir: Alias of `save_dir`.
    """

    writes_behind = True

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = DEFAULT_NAME,
        version: int | str | None = None,
        prefix: str = "",
        *,
        root_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(save_dir, name, version, prefix=prefix, root_dir=root_dir)
        self._lw_made_at = time.monotonic()
        self._lw_has_trainer_time = False

    @property
    def experiment(self) -> LineWriter:
        """The object that appends to the file."""
        return self._lw_opened(lambda: LineWriter(self.files_dir))

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Append one line.

        Args:
            metrics: Name -> number (or a tensor of one element, which is copied to the host). `step`, `epoch`,
                `samples` and `wall_s` are written under these names, without the prefix.
            step: The line's step. None is `metrics["step"]` if present, otherwise the last line's step plus one.

        Raises:
            ConfigError: A value is not a number; the message names its key. No line is written.
            OSError: The disk is full, or the file is missing; it keeps complete lines.
        """
        if self.is_silent:
            return
        self._lw_send_if_due()  # before the line: where this fails, the line is written again later
        with self._lw_lock:
            places = scalars({key: metrics[key] for key in _AXES if key in metrics})
            others = {key: value for key, value in metrics.items() if key not in _AXES}
            row = scalars(others, prefix=self._prefix, group_separator=self.group_separator)
            if not self._lw_has_trainer_time:  # without a Trainer, which knows when training began
                now = time.monotonic()
                self.wall_s, self._lw_made_at = self.wall_s + now - self._lw_made_at, now
            places["step"] = self._lw_next_step(metrics.get("step") if step is None else step)
            places.setdefault("wall_s", round(self.wall_s, 3))
            self.experiment.write({**{key: places[key] for key in _AXES if key in places}, **row})

    def log_row(self, metrics: Metrics, step: int, axes: Mapping[str, float]) -> None:
        """Append one line with the progress of training."""
        self._lw_has_trainer_time = True
        self.log_metrics({"samples": int(axes.get("samples", 0)), "wall_s": round(self.wall_s, 3), **metrics}, step)

    def save(self) -> None:
        """Send new lines to a URL if it is time; a local file already has every line."""
        if not self.is_silent:
            self._lw_send_if_due()

    def finalize(self, status: str) -> None:
        """Send the remaining lines to a URL; a local file already has every line."""
        if not self.is_silent:
            self.send_files(is_end=True)
            self._lw_end_session()

    def state_dict(self) -> StateDict:
        """Write the lines to disk durably, and return the end of the file, from which a resumed run continues."""
        if self.is_silent:
            return {}
        with self._lw_lock:
            state = {
                "log_dir": absolute_place(self.log_dir),
                "version": self.version,
                "step": self._lw_step,
                "wall_s": self.wall_s,
                **self.experiment.position(),
            }
            self.send_files()
            return state

    def _lw_close(self) -> None:
        self._experiment = None

    def _lw_recognizes(self, log_dir: str, state: StateDict, is_same_place: bool) -> bool:
        path = os.path.join(log_dir, LineWriter.NAME_METRICS_FILE)
        size: int = state["size"]
        if not size:
            return is_same_place
        checksum = _checksum(path, size)
        return checksum is not None and checksum == state["checksum"]

    def _lw_restore(self, state: StateDict) -> None:
        self._lw_step = state["step"]
        self.wall_s, self._lw_made_at = state["wall_s"], time.monotonic()
        self._experiment = LineWriter(self.files_dir, resume_from=state)


class LineWriter:
    """Appends JSON objects to one metrics.jsonl.

    Args:
        log_dir: Directory of the run; made when the first line is written.
        resume_from: Result of `position()`: the first write truncates the file there.
    """

    NAME_METRICS_FILE = "metrics.jsonl"

    def __init__(self, log_dir: str, *, resume_from: StateDict | None = None) -> None:
        self.log_dir = log_dir
        self.path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        self._size: int = resume_from["size"] if resume_from else 0
        self._checksum: int = resume_from["checksum"] if resume_from else 0
        self._is_resumed = resume_from is not None
        self._is_begun = False

    def write(self, row: Mapping[str, int | float]) -> None:
        """Append one line; on a failure the file keeps complete lines.

        Raises:
            OSError: The disk is full, or the file is not writable.
            TypeError: The row contains a value that JSON does not support.
        """
        data = f"{_line(row)}\n".encode()
        if not self._is_begun:
            self._begin()
        # Opened for each line, at 20 us: nothing to close, and to lose, in a process that ends as it likes.
        append_whole(self.path, data, creates=True)
        self._size += len(data)
        self._checksum = zlib.crc32(data, self._checksum)

    def position(self) -> StateDict:
        """Return the end of the file, written durably, and a checksum that identifies the file."""
        if self._is_begun and self._size:
            with open(self.path, "r+b") as file:
                os.fsync(file.fileno())  # the checkpoint that holds this position must not outlive the lines
        return {"size": self._size, "checksum": self._checksum}

    def _begin(self) -> None:
        os.makedirs(self.log_dir, exist_ok=True)
        if os.path.exists(self.path):
            if self._is_resumed:
                os.truncate(self.path, self._size)
            else:
                keep_old_file(self.path)
        self._is_begun = True


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl; non-finite numbers are converted to floats.

    An incomplete last line, unfinished or truncated by a crash, is ignored.

    Args:
        path: The file.

    Raises:
        DataError: A line before the last is not a JSON object; the message names it.
        OSError: The file does not exist.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise DataError(
                    f"line {number} of {os.fspath(path)!r} is not a JSON object: {line[:60]!r}.",
                    fix="remove the line; each line is one row.",
                )
            yield {
                key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in row.items()
            }


def _line(row: Mapping[str, int | float]) -> str:
    try:
        return json.dumps(row, allow_nan=False, ensure_ascii=False, separators=(", ", ": "))
    except ValueError:  # the rare row with a number that is not finite
        return json.dumps({key: _finite(value) for key, value in row.items()}, ensure_ascii=False)


def _finite(value: int | float) -> int | float | str:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _checksum(path: str, size: int) -> int | None:
    """Return the checksum of the file's first bytes; None where it is shorter, or there is none."""
    checksum, left = 0, size
    try:
        with open(path, "rb") as file:
            while left:
                data = file.read(min(left, 1 << 20))
                if not data:
                    return None
                checksum, left = zlib.crc32(data, checksum), left - len(data)
    except OSError:
        return None
    return checksum
