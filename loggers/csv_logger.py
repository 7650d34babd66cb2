"""CSVLogger: metrics in one metrics.csv file, exact after a resume."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..files import append_whole, replacing
from ..remote import absolute_place
from .base import Lock, Metrics, scalars
from .folder import DEFAULT_NAME, FolderLogger, keep_old_file

if TYPE_CHECKING:
    from ..protocols import StateDict


class CSVLogger(FolderLogger):
    """Write metrics to `save_dir/name/version_N/metrics.csv` and hyperparameters to `hparams.yaml` beside it.

    Each `log_metrics` call writes one row. Columns are sorted, including `step`. Numbers have all digits (and `nan` and
    `inf`); missing values are empty cells. Rows are appended. For a metric with a new name, the file is rewritten
    atomically.

    Args:
        save_dir: Directory of all runs, or a URL that fsspec supports.
        name: Name of the experiment; None or "" for no directory of the experiment.
        version: Number N for `version_N`, or a text that is used unchanged; None is the next free number.
        prefix: Text before each metric's name, joined by "-".
        flush_logs_every_n_steps: Number of steps, or rows, between writes; rows wait in memory until then.
        root_dir: Alias of `save_dir`.
    """

    writes_behind = True

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = DEFAULT_NAME,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
        *,
        root_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(save_dir, name, version, prefix=prefix, root_dir=root_dir)
        if not isinstance(flush_logs_every_n_steps, int) or flush_logs_every_n_steps < 1:
            raise ConfigError(
                f"flush_logs_every_n_steps={flush_logs_every_n_steps!r}; expected an integer from 1.",
                fix="pass flush_logs_every_n_steps=1 to write every row at once, or a larger number.",
            )
        self._lw_flush_every = flush_logs_every_n_steps
        self._lw_flushed_step = -1

    @property
    def experiment(self) -> ExperimentWriter:
        """The writer of the file, which holds the rows that were not written yet."""
        return self._lw_opened(lambda: ExperimentWriter(self.files_dir))

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Add one row; it reaches the disk at the next write.

        Args:
            metrics: Name -> number (or a tensor of one element, which is copied to the host).
            step: The row's step. None is `metrics["step"]` if present, else the last row's step plus one.

        Raises:
            ConfigError: A value is not a number; the message names its key. No row is added.
        """
        if self.is_silent:
            return
        self._lw_send_if_due()  # before the row: where this fails, the row is logged again later
        row = scalars(metrics, prefix=self._prefix, group_separator=self.group_separator)
        with self._lw_lock:
            row["step"] = chosen = self._lw_next_step(metrics.get("step") if step is None else step)
            writer = self.experiment
            writer.log_metrics(row)
            if self._lw_is_flush_due(chosen) or len(writer.metrics) >= self._lw_flush_every:
                self.save()

    def _lw_is_flush_due(self, step: int) -> bool:
        """Whether the row of this step is to reach the disk: the first one, and then at each interval."""
        return step // self._lw_flush_every != self._lw_flushed_step // self._lw_flush_every

    def save(self) -> None:
        """Append the pending rows to the file."""
        with self._lw_lock:
            if not self.is_silent and self._experiment is not None and self._experiment.metrics:
                self._experiment.save()
                self._lw_flushed_step = self._lw_step
        if not self.is_silent:
            self._lw_send_if_due()

    def finalize(self, status: str) -> None:
        """Write the pending rows."""
        if not self.is_silent:
            self.save()
            self.send_files(is_end=True)
            self._lw_end_session()

    def state_dict(self) -> StateDict:
        """Write the pending rows durably, and return the end of the file, from which a resumed run continues."""
        if self.is_silent:
            return {}
        self.save()
        position = self.experiment.position()
        self.send_files()
        return {"log_dir": absolute_place(self.log_dir), "version": self.version, "step": self._lw_step, **position}

    def _lw_close(self) -> None:
        self.save()
        self._experiment = None

    def _lw_recognizes(self, log_dir: str, state: StateDict, is_same_place: bool) -> bool:
        return _holds(os.path.join(log_dir, ExperimentWriter.NAME_METRICS_FILE), state) or (
            is_same_place and state["rows"] == 0
        )

    def _lw_restore(self, state: StateDict) -> None:
        self._lw_step = self._lw_flushed_step = state["step"]
        self._experiment = ExperimentWriter(self.files_dir, resume_from=state)


class ExperimentWriter:
    """Holds the pending rows of one metrics.csv, and appends them to it.

    Args:
        log_dir: Directory of the run; made when the first row is written.
        resume_from: Result of `position()`: the first write keeps its rows and columns only.
    """

    NAME_METRICS_FILE = "metrics.csv"

    def __init__(self, log_dir: str, *, resume_from: StateDict | None = None) -> None:
        self.log_dir = log_dir
        self._lock = Lock()
        self.metrics: list[dict[str, int | float]] = []
        self.metrics_keys: list[str] = list(resume_from["columns"]) if resume_from else []
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        self._rows: int = resume_from["rows"] if resume_from else 0
        self._last_row: dict[str, str] = dict(resume_from["last_row"]) if resume_from else {}
        self._has_rows_to_drop = resume_from is not None
        self._is_begun = resume_from is not None

    def log_metrics(self, metrics: Mapping[str, int | float]) -> None:
        """Add one row of numbers; `step` is among them."""
        with self._lock:
            self.metrics.append(dict(metrics))

    def save(self) -> None:
        """Append the pending rows; on a failure the file keeps complete rows, and the pending ones stay pending.

        Raises:
            OSError: The disk is full, or the file is missing or not writable.
        """
        with self._lock:
            if not self.metrics:
                return
            if not self._is_begun:
                os.makedirs(self.log_dir, exist_ok=True)
                if os.path.exists(self.metrics_file_path):
                    keep_old_file(self.metrics_file_path)
                self._is_begun = True
            columns = sorted(set(self.metrics_keys).union(*self.metrics))
            if columns != self.metrics_keys or self._has_rows_to_drop:
                self._rewrite(columns)
            cells = [{key: repr(value) for key, value in row.items()} for row in self.metrics]
            append_whole(self.metrics_file_path, _text(cells, columns).encode(), creates=False)
            self._rows += len(cells)
            self._last_row = cells[-1]
            self.metrics.clear()

    def position(self) -> StateDict:
        """Return the end of the file: rows, columns, and the last row, which identifies the file."""
        if self._rows and not self._has_rows_to_drop:
            with open(self.metrics_file_path, "r+b") as file:
                os.fsync(file.fileno())  # the checkpoint that holds this position must not outlive the rows
        return {"rows": self._rows, "columns": list(self.metrics_keys), "last_row": dict(self._last_row)}

    def _rewrite(self, columns: list[str]) -> None:
        os.makedirs(self.log_dir, exist_ok=True)  # resumed from before the first row: it may not be there
        with replacing(self.metrics_file_path) as raw:
            file = io.TextIOWrapper(raw, encoding="utf-8", newline="")
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            if self._rows:
                with open(self.metrics_file_path, encoding="utf-8", newline="") as old:
                    for _, row in zip(range(self._rows), csv.DictReader(old), strict=False):
                        writer.writerow(row)
            file.flush()
            os.fsync(file.fileno())
            file.detach()
        self.metrics_keys = columns
        self._has_rows_to_drop = False


def _text(cells: list[dict[str, str]], columns: list[str]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(cells)
    return text.getvalue()


def _holds(path: str, state: StateDict) -> bool:
    """Whether the file has the rows that the checkpoint counted, the last of them with the same content."""
    rows: int = state["rows"]
    try:
        for number, row in enumerate(_rows(path), start=1):
            if number == rows:
                last_row: dict[str, str] = state["last_row"]
                return {key: cell for key, cell in row.items() if cell} == last_row
    except (OSError, UnicodeDecodeError, csv.Error):
        pass  # no file, or not one that this logger wrote: it is not the checkpoint's
    return False


def _rows(path: str) -> Iterator[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
