"""`RichProgressBar`: the progress bar of `rich`, on terminals and in notebooks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, MissingDependency
from ...protocols import Options
from .live import LiveProgressBar

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, Task, TaskID

    from ...trainer import Trainer


@dataclass(frozen=True, slots=True)
class RichProgressBarTheme:
    """Styles of rich for the parts of the bar.

    Attributes:
        description: Text before the bar.
        progress_bar: The completed part of the bar.
        progress_bar_finished: A full bar.
        progress_bar_pulse: A bar of unknown length.
        batch_progress: Number of completed batches, and the total.
        time: Elapsed and remaining time.
        processing_speed: Batches per second.
        metrics: Names and values of metrics.
        metrics_text_delimiter: Text between two metrics.
        metrics_format: Format of their values.
    """

    description: str = ""
    progress_bar: str = "#6206E0"
    progress_bar_finished: str = "#6206E0"
    progress_bar_pulse: str = "#6206E0"
    batch_progress: str = ""
    time: str = "dim"
    processing_speed: str = "dim underline"
    metrics: str = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class RichProgressBar(LiveProgressBar):
    """Draw with rich. If the output is not a terminal, write lines, and update the bars without drawing them.

    The main thread draws.

    Args:
        refresh_rate: Number of redraws per second, at most ten; 0 for none.
        leave: Whether the bar of each epoch stays on the screen.
        theme: Styles of the columns.
        console_kwargs: Arguments for rich's Console.
        plain_interval_s: Seconds between two lines if the output is not a terminal.

    Raises:
        MissingDependency: rich is not installed.
        ConfigError: `refresh_rate` is negative.
    """

    def __init__(
        self,
        refresh_rate: int = 10,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
        *,
        plain_interval_s: float = 30.0,
    ) -> None:
        if find_spec("rich") is None:
            raise MissingDependency("rich", needed_for="RichProgressBar")
        super().__init__(plain_interval_s=plain_interval_s)
        if not refresh_rate >= 0:
            raise ConfigError(
                f"RichProgressBar: refresh_rate={refresh_rate!r}, expected 0 or more.", fix="pass drawings per second."
            )
        self._refresh_rate = refresh_rate
        self._leave = leave
        self.theme = theme or RichProgressBarTheme()
        self._console_kwargs = console_kwargs or {}
        self._lw_progress: Progress | None = None
        self._lw_has_stopped = False
        self._lw_tasks: dict[str, TaskID] = {}
        self._lw_ended: set[str] = set()
        self._lw_kept: list[Any] = []
        if not refresh_rate:
            self.disable()
        else:
            self._lw_draw_interval_s = max(0.1, 1.0 / refresh_rate)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {
            "_lw_progress": None,
            "_lw_tasks": {},
            "_lw_kept": [],
            "_lw_open": set(),
            "_trainer": None,
        }

    @property
    def refresh_rate(self) -> int:
        """Maximum number of redraws per second."""
        return self._refresh_rate

    @property
    def progress(self) -> Progress | None:
        """rich's Progress with the bars; None before the first run, and if the bar is disabled."""
        if self._trainer is not None and self._lw_is_enabled:
            if self._lw_progress is None:
                self._lw_started()
            if self._lw_waits_for_reader:
                for stage in (*self._lw_past, *self._lw_under_way):
                    self._lw_make_bar(stage)
        return self._lw_progress

    @progress.setter
    def progress(self, progress: Progress | None) -> None:
        self._lw_progress = progress

    @property
    def train_progress_bar(self) -> Task | None:
        """rich's task of training; None before the first."""
        return self._lw_task("train")

    @property
    def val_progress_bar(self) -> Task | None:
        """rich's task of a validation; None before the first."""
        return self._lw_task("validation")

    @property
    def val_sanity_check_bar(self) -> Task | None:
        """rich's task of the sanity check; None before the first."""
        return self._lw_task("sanity")

    @property
    def test_progress_bar(self) -> Task | None:
        """rich's task of a test; None before the first."""
        return self._lw_task("test")

    def enable(self) -> None:
        """Draw again, unless `refresh_rate` is 0."""
        if self._refresh_rate:
            super().enable()

    def refresh(self, hard: bool = False) -> None:
        """Draw now. `hard` is accepted for compatibility and has no effect."""
        if self._lw_progress is not None:
            self._lw_progress.refresh()

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return rich's columns; may be overridden. The task's fields are `metrics` (text) and `speed` (text)."""
        from rich.progress import BarColumn, TextColumn

        from .rich_fitting import MetricsColumn, YieldingColumn

        theme = self.theme
        return [
            TextColumn("{task.description}", style=theme.description),
            BarColumn(
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            TextColumn("{task.fields[batches]}", style=theme.batch_progress),
            YieldingColumn("{task.fields[clock]}", style=theme.time),
            YieldingColumn("{task.fields[speed]}", style=theme.processing_speed),
            MetricsColumn("{task.fields[metrics]}", style=theme.metrics, markup=False),
        ]

    @property
    def _lw_leaves(self) -> bool:
        return self._leave

    def _lw_task(self, stage: str) -> Task | None:
        self._lw_make_bar(stage)
        if self._lw_progress is None or stage not in self._lw_tasks:
            return None
        return next((task for task in self._lw_progress.tasks if task.id == self._lw_tasks[stage]), None)

    def _lw_started(self) -> Progress:
        if self._lw_progress is None or self._lw_has_stopped:
            from rich.console import Console

            from .rich_fitting import FittingProgress

            console = Console(**self._console_kwargs)
            columns = self.configure_columns(self.trainer)
            is_drawn = self._lw_is_drawn
            self._lw_progress = FittingProgress(
                *columns, console=console, auto_refresh=False, expand=False, disable=not is_drawn
            )
            self._lw_progress.delimiter = self.theme.metrics_text_delimiter
            self._lw_has_stopped, self._lw_tasks, self._lw_ended = False, {}, set()
            if is_drawn:
                self._lw_progress.start()
                console.show_cursor(True)  # rich hides it, and a process that is killed could not bring it back
        return self._lw_progress

    def _lw_make_bar(self, stage: str) -> None:
        if self._lw_is_enabled:
            super()._lw_make_bar(stage)

    def _lw_show(
        self, stage: str, description: str, done: int, total: int | None, metrics: dict[str, float | int | str]
    ) -> None:
        progress = self._lw_started()
        task = None if stage in self._lw_ended else self._lw_task(stage)
        self._lw_ended.discard(stage)
        is_new = task is None
        if task is not None and (done < task.completed or task.fields["title"] != description or not task.visible):
            is_new = True
            # It draws at once: nothing of what the bar was before may be left.
            fields = self._lw_empty_fields(description, first=done)
            progress.reset(task.id, completed=done, total=total, visible=True, description=description, **fields)
        if task is None:
            fields = self._lw_empty_fields(description, first=max(0, done - 1))
            self._lw_tasks[stage] = progress.add_task(description, total=total, **fields)
            task = self._lw_task(stage)
            assert task is not None
        first, elapsed_s = task.fields["first"], task.elapsed or 0.0
        if is_new and stage in self._lw_began:  # its clock begins now: the epoch may end with this drawing
            began_s, first = self._lw_began[stage]
            elapsed_s = time.monotonic() - began_s
        speed = (done - first) / elapsed_s if elapsed_s > 0 else 0.0
        pace: Options = {
            "clock": _clock(elapsed_s, None if total is None or not speed else (total - done) / speed),
            "speed": f"{speed:.2f}it/s" if speed else "",
        }
        progress.update(
            task.id,
            description=description,
            completed=done,
            total=total,
            batches=f"{done}/{'?' if total is None else total}",
            **({} if done == first and not is_new else pace),  # no batch since the bar was reset
            metrics=self.theme.metrics_text_delimiter.join(parts := self._lw_metric_texts(metrics)),
            parts=parts,
        )
        progress.refresh()

    @staticmethod
    def _lw_empty_fields(title: str, *, first: int) -> Options:
        """Return the fields of a bar whose clock begins after `first` batches."""
        return {"batches": "", "clock": "", "speed": "", "metrics": "", "title": title, "first": first}

    def _lw_metric_texts(self, metrics: dict[str, float | int | str]) -> list[str]:
        return [
            f"{name}: {format(value, self.theme.metrics_format) if isinstance(value, float) else value}"
            for name, value in metrics.items()
        ]

    def _lw_close(self, stage: str, *, keep: bool) -> None:
        task = self._lw_task(stage)
        if self._lw_progress is None or task is None:
            return
        if stage == "validation" and "train" in self._lw_open:
            train = self._lw_task("train")
            if train is not None and train.start_time is not None:  # speed is that of training
                train.start_time += time.monotonic() - self._lw_eval_start_s
        if keep:
            self._lw_progress.stop_task(task.id)
            self._lw_ended.add(stage)
        else:
            self._lw_progress.update(task.id, visible=False)
        if not self._lw_open and not self._lw_progress.disable:
            self._lw_progress.refresh()
            self._lw_progress.stop()
            self._lw_has_stopped = True

    def _lw_write_above(self, text: str) -> None:
        # Through the console: rich clears the bars, writes, and draws them again.
        assert self._lw_progress is not None  # a bar is open
        self._lw_progress.console.out(text, end="", highlight=False)


def _clock(elapsed_s: float, left_s: float | None) -> str:
    return f"{_hms(elapsed_s)} < {'-:--:--' if left_s is None else _hms(left_s)}"


def _hms(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
