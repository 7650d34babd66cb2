"""rich's progress display, fitted to the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from .fit_width import MIN_BAR, fold

_WIDEST_BAR = 40
_NARROWEST_BAR = 6  # where the time or the speed would not fit otherwise
_ECHO = 2  # columns that a terminal writes for Ctrl-C, "^C": on a full line they would move the cursor to the next


class YieldingColumn(TextColumn):
    """A text that is left out on a narrow terminal, where the bar needs its room.

    Attributes:
        is_shown: Whether there is room for it.
    """

    is_shown = True

    def render(self, task: Task) -> Text:
        """Return the text."""
        return super().render(task) if self.is_shown else Text("")


class MetricsColumn(YieldingColumn):
    """Metrics beside the bar; if they are not shown there, they are on a line below."""


class FittingProgress(Progress):
    """rich's Progress that fits the terminal: metrics that leave too little for the bar stand below it.

    Attributes:
        delimiter: Text between two metrics.
    """

    delimiter = " "

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bars, and below them the metrics."""
        column = next((one for one in self.columns if isinstance(one, MetricsColumn)), None)
        tasks = [task for task in self.tasks if task.visible]
        if column is None or not tasks:
            yield from super().get_renderables()
            return
        parts: list[str] = next((task.fields["parts"] for task in reversed(tasks) if task.fields.get("parts")), [])
        width = self.console.width - _ECHO
        yielding = [one for one in self.columns if isinstance(one, YieldingColumn) and one is not column]
        for text in yielding:
            text.is_shown = True
        used = len(self.columns)
        for one in self.columns:
            if isinstance(one, ProgressColumn) and not isinstance(one, BarColumn | MetricsColumn):
                used += self._width_of(one, tasks)
        for text in yielding:
            if used + _NARROWEST_BAR > width:
                used -= self._width_of(text, tasks)
                text.is_shown = False
        beside = len(self.delimiter.join(parts))
        column.is_shown = used + MIN_BAR + beside <= width
        room = width - used - (beside if column.is_shown else 0)
        for one in self.columns:
            if isinstance(one, BarColumn):
                one.bar_width = max(1, min(_WIDEST_BAR, room))
        yield from super().get_renderables()
        if not column.is_shown:
            for line in fold(parts, self.delimiter, width - 3):
                yield Text(f"  {line}", style=column.style, no_wrap=True, overflow="crop")

    def _width_of(self, column: ProgressColumn, tasks: list[Task]) -> int:
        options = self.console.options
        return max(Measurement.get(self.console, options, column(task)).maximum for task in tasks)
