"""`TQDMProgressBar`: the progress bar of `tqdm`, on terminals and in notebooks."""

from __future__ import annotations

import io
import math
import os
import sys
from typing import Any, NoReturn, TypeAlias

from tqdm.auto import tqdm

from ...errors import ConfigError
from ...protocols import Options
from .base import format_metrics, printed
from .fit_width import MIN_BAR, fold
from .live import LiveProgressBar

Bar: TypeAlias = "tqdm[NoReturn]"  # which iterates over nothing

_NARROW_FORMAT = "{desc}: {bar} {n_fmt}/{total_fmt} {rate_fmt}"
_LEAST_BAR = 4  # columns, beside which percents and times stay


class TQDMProgressBar(LiveProgressBar):
    """Draw with tqdm on standard output. If it is not a terminal, write lines, and update the bars without drawing.

    Args:
        refresh_rate: Minimum number of batches between two redraws, at most ten per second; 0 for no redraws.
            The environment variable TQDM_MINITERS sets a lower limit.
        process_position: Number of lines left free above, for several processes on one terminal.
        leave: Whether the bar of each epoch stays on the screen.
        plain_interval_s: Seconds between two lines if the output is not a terminal.

    Raises:
        ConfigError: An argument is negative.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

    def __init__(
        self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False, *, plain_interval_s: float = 30.0
    ) -> None:
        super().__init__(plain_interval_s=plain_interval_s)
        for name, value in (("refresh_rate", refresh_rate), ("process_position", process_position)):
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"TQDMProgressBar: {name}={value!r}, expected 0 or more.", fix="pass an integer.")
        self._refresh_rate = max(refresh_rate, int(float(os.environ.get("TQDM_MINITERS", "0"))))
        self._process_position = process_position
        self._leave = leave
        self._lw_bars: dict[str, Bar] = {}
        self._lw_closed: dict[str, Bar] = {}
        self._lw_below: list[Bar] = []  # lines of metrics that do not fit beside the bar of training
        if not self._refresh_rate:
            self.disable()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_lw_bars": {}, "_lw_closed": {}, "_lw_below": [], "_lw_open": set(), "_trainer": None}

    @property
    def refresh_rate(self) -> int:
        """Minimum number of batches between two redraws."""
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        """Number of lines left free above the bar."""
        return self._process_position

    @property
    def train_progress_bar(self) -> Bar | None:
        """tqdm's bar of training; None before the first."""
        bar = self._lw_bar_of("train")
        if bar is None and "sanity" in self._lw_under_way:
            bar = self._lw_closed["train"] = _bar_class()(disable=True)
        return bar

    @train_progress_bar.setter
    def train_progress_bar(self, bar: Bar) -> None:
        self._lw_put("train", bar)

    @property
    def val_progress_bar(self) -> Bar | None:
        """tqdm's bar of a validation; None before the first."""
        return self._lw_bar_of("validation", "sanity")

    @val_progress_bar.setter
    def val_progress_bar(self, bar: Bar) -> None:
        self._lw_put("validation", bar)

    @property
    def test_progress_bar(self) -> Bar | None:
        """tqdm's bar of a test; None before the first."""
        return self._lw_bar_of("test")

    @test_progress_bar.setter
    def test_progress_bar(self, bar: Bar) -> None:
        self._lw_put("test", bar)

    @property
    def predict_progress_bar(self) -> Bar | None:
        """tqdm's bar of a prediction; None before the first."""
        return self._lw_bar_of("predict")

    @predict_progress_bar.setter
    def predict_progress_bar(self, bar: Bar) -> None:
        self._lw_put("predict", bar)

    def enable(self) -> None:
        """Draw again, unless `refresh_rate` is 0."""
        if self._refresh_rate:
            super().enable()

    def init_sanity_tqdm(self) -> Bar:
        """Return the bar of the sanity check; may be overridden, like the other four."""
        return self._lw_bar(self.sanity_check_description, line=0, leave=False)

    def init_train_tqdm(self) -> Bar:
        """Return the bar of training."""
        return self._lw_bar(self.train_description, line=0, leave=True)

    def init_validation_tqdm(self) -> Bar:
        """Return the bar of a validation; inside fit, it is below the training bar."""
        inside_fit = "train" in self._lw_open
        line = 1 + len(self._lw_below) if inside_fit else 0
        return self._lw_bar(self.validation_description, line=line, leave=not inside_fit)

    def init_test_tqdm(self) -> Bar:
        """Return the bar of a test."""
        return self._lw_bar(self.test_description, line=0, leave=True)

    def init_predict_tqdm(self) -> Bar:
        """Return the bar of a prediction."""
        return self._lw_bar(self.predict_description, line=0, leave=True)

    @property
    def _lw_leaves(self) -> bool:
        return self._leave

    def print(self, *args: object, **kwargs: Any) -> None:  # Any: as print takes it
        """Write a line as `print` does, above the bars."""
        if not (self._lw_open or self._lw_under_way) or not self._lw_is_enabled:
            super().print(*args, **kwargs)
            return
        chosen = {name: kwargs[name] for name in ("file", "end") if kwargs.get(name) is not None}
        self._lw_safely(_bar_class().write, printed(*args, sep=kwargs.get("sep"), end=""), **chosen)
        if not self._lw_is_drawn:
            sys.stdout.flush()

    def _lw_bar_of(self, *stages: str) -> Bar | None:
        """Return the bar of the first of these stages that has one, else one that was closed."""
        for stage in stages:
            self._lw_make_bar(stage)
        bars = (found[stage] for found in (self._lw_bars, self._lw_closed) for stage in stages if stage in found)
        return next(bars, None)

    def _lw_put(self, stage: str, bar: Bar) -> None:
        self._lw_bars[stage] = bar
        self._lw_open.add(stage)

    def _lw_bar(self, description: str, *, line: int, leave: bool, form: str | None = None) -> Bar:
        if self._lw_is_drawn:
            drawing: Options = {**_size_arguments(), "file": sys.stdout, "mininterval": 0}
        else:
            drawing = {"ncols": 80, "file": _Nowhere(), "mininterval": math.inf, "disable": not self._lw_is_enabled}
        return _bar_class()(
            desc=description,
            position=2 * self._process_position + line,
            leave=leave,
            **drawing,
            miniters=1,
            bar_format=self.BAR_FORMAT if form is None else form,
        )

    def _lw_show(
        self, stage: str, description: str, done: int, total: int | None, metrics: dict[str, float | int | str]
    ) -> None:
        bar = self._lw_bars.get(stage)
        if bar is None:
            make = {
                "sanity": self.init_sanity_tqdm,
                "train": self.init_train_tqdm,
                "validation": self.init_validation_tqdm,
                "test": self.init_test_tqdm,
                "predict": self.init_predict_tqdm,
            }[stage]
            bar = self._lw_bars[stage] = make()
            bar.initial = max(0, done - 1)  # a run that resumes inside an epoch did not do the rest just now
            bar.n = bar.initial
        elif done < bar.n:
            bar.reset()  # the next epoch
        elif done - bar.n < self._refresh_rate and done != total:
            return
        bar.total = total
        bar.set_description_str(description, refresh=False)
        bar.set_postfix_str(self._lw_beside(stage, bar, format_metrics(metrics)), refresh=False)
        if not bar.update(done - bar.n) and self._lw_is_drawn:
            bar.refresh()

    def _lw_beside(self, stage: str, bar: Bar, parts: list[str]) -> str:
        """Return the metrics that stand beside the bar; where they leave no room for it, they go to a line below."""
        columns = 0 if hasattr(bar, "container") else bar.format_dict["ncols"] or 0
        beside = ", ".join(parts)
        if not (self._lw_is_drawn and columns):
            return beside
        form = self.BAR_FORMAT.replace("{bar}", "").replace("{postfix}", "")
        bare = bar.format_meter(**{**bar.format_dict, "bar_format": form, "ncols": None, "postfix": None})
        if bar.bar_format == TQDMProgressBar.BAR_FORMAT and len(bare) + _LEAST_BAR > columns:
            bar.bar_format = _NARROW_FORMAT  # tqdm would cut the speed off
        elif bar.bar_format == _NARROW_FORMAT and len(bare) + 2 * _LEAST_BAR <= columns:  # not to and fro
            bar.bar_format = TQDMProgressBar.BAR_FORMAT
        if not (stage == "train" and parts):
            return beside
        if not self._lw_below and len(f"{bare}, {beside}") + MIN_BAR <= columns:
            return beside
        lines = fold(parts, ", ", columns - 3)
        while len(self._lw_below) < len(lines):
            self._lw_below.append(self._lw_bar("", line=1 + len(self._lw_below), leave=True, form="{desc}"))
        for number, below in enumerate(self._lw_below):
            below.set_description_str(f"  {lines[number]}" if number < len(lines) else "")
        return ""

    def _lw_close(self, stage: str, *, keep: bool) -> None:
        bar = self._lw_bars.pop(stage, None)
        if bar is not None:
            self._lw_closed[stage] = bar
            bar.leave = keep
            bar.close()
            if stage == "train":
                for below in self._lw_below:
                    below.leave = keep
                    below.close()
                self._lw_below = []
        if stage == "validation" and "train" in self._lw_bars:
            self._lw_bars["train"].unpause()

    def _lw_write_above(self, text: str) -> None:
        _bar_class().write(text, file=sys.stdout, end="")


class _Nowhere(io.TextIOBase):
    """Takes what a bar writes that is not drawn."""

    def write(self, text: str) -> int:
        """Drop the text."""
        return len(text)


def _size_arguments() -> Options:
    """Return what tqdm has to know of the terminal's size: where a container or a CI job says 0, it draws nothing."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return {"dynamic_ncols": True}  # no terminal, a notebook perhaps: tqdm knows what to do
    if size.columns and size.lines:
        return {"dynamic_ncols": True}
    return {"ncols": size.columns or 80, "nrows": size.lines or 24}


def _bar_class() -> type[Bar]:
    global _Bar
    if _Bar is None:
        # tqdm would start a thread that redraws slow bars; here the loop draws the bars.
        _Bar = type("_Bar", (tqdm,), {"monitor_interval": 0, "__module__": __name__})
    return _Bar


_Bar: type[Bar] | None = None
