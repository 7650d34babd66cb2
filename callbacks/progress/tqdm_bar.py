"""`TQDMProgressBar`: the progress bar of `tqdm`, on terminals and in notebooks."""

from __future__ import annotations

import os
import sys
from typing import Any

from tqdm.auto import tqdm

from ...errors import ConfigError
from .base import format_metrics
from .live import LiveProgressBar

__all__ = ["TQDMProgressBar"]


class TQDMProgressBar(LiveProgressBar):
    """Draw with tqdm on standard output; write lines if that is not a terminal.

    tqdm is imported when the first bar is drawn, after the first batches.

    Args:
        refresh_rate: Minimum number of batches between two redraws; 0: none. There are at most ten redraws per second.
            The environment variable TQDM_MINITERS sets a lower limit.
        process_position: Number of lines left free above, for several processes on one terminal.
        leave: Whether the bar of each epoch stays on the screen.
        plain_interval_s: Seconds between two lines if the output is not a terminal.

    Raises:
        ConfigError: An argument is negative.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

    def __init__(
        self,
        refresh_rate: int = 1,
        process_position: int = 0,
        leave: bool = False,
        *,
        plain_interval_s: float = 30.0,
    ) -> None:
        super().__init__(plain_interval_s=plain_interval_s)
        for name, value in (("refresh_rate", refresh_rate), ("process_position", process_position)):
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"TQDMProgressBar: {name}={value!r}, expected 0 or more.", fix="pass an integer.")
        self._refresh_rate = max(refresh_rate, int(os.environ.get("TQDM_MINITERS", "0"))) if refresh_rate else 0
        self._process_position = process_position
        self._leave = leave
        self._bars: dict[str, tqdm[Any]] = {}  # Any: a bar that iterates over nothing
        self._stage = "train"
        if not refresh_rate:
            self.disable()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_bars": {}, "_open": set(), "_trainer": None}

    @property
    def refresh_rate(self) -> int:
        """Batches between two drawings, at least."""
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        """Lines left free above."""
        return self._process_position

    @property
    def train_progress_bar(self) -> Any:
        """tqdm's bar of training; None if none is drawn."""
        return self._bars.get("train")

    @train_progress_bar.setter
    def train_progress_bar(self, bar: tqdm[Any]) -> None:
        self._bars["train"] = bar

    @property
    def val_progress_bar(self) -> Any:
        """tqdm's bar of a validation; None if none is drawn."""
        return self._bars.get("validation", self._bars.get("sanity"))

    @val_progress_bar.setter
    def val_progress_bar(self, bar: tqdm[Any]) -> None:
        self._bars["validation"] = bar

    @property
    def test_progress_bar(self) -> Any:
        """tqdm's bar of a test; None if none is drawn."""
        return self._bars.get("test")

    @test_progress_bar.setter
    def test_progress_bar(self, bar: tqdm[Any]) -> None:
        self._bars["test"] = bar

    @property
    def predict_progress_bar(self) -> Any:
        """tqdm's bar of a prediction; None if none is drawn."""
        return self._bars.get("predict")

    @predict_progress_bar.setter
    def predict_progress_bar(self, bar: tqdm[Any]) -> None:
        self._bars["predict"] = bar

    def enable(self) -> None:
        """Draw again, unless `refresh_rate` is 0."""
        if self._refresh_rate:
            super().enable()

    def init_sanity_tqdm(self) -> tqdm[Any]:
        """Return the bar of the trial validation; may be overridden, as the other four."""
        return self._bar(self.sanity_check_description, line=0, leave=False)

    def init_train_tqdm(self) -> tqdm[Any]:
        """Return the bar of training."""
        return self._bar(self.train_description, line=0, leave=True)

    def init_validation_tqdm(self) -> tqdm[Any]:
        """Return the bar of a validation; inside fit it stands below that of training."""
        inside_fit = "train" in self._bars
        return self._bar(self.validation_description, line=1 if inside_fit else 0, leave=not inside_fit)

    def init_test_tqdm(self) -> tqdm[Any]:
        """Return the bar of a test."""
        return self._bar(self.test_description, line=0, leave=True)

    def init_predict_tqdm(self) -> tqdm[Any]:
        """Return the bar of a prediction."""
        return self._bar(self.predict_description, line=0, leave=True)

    @property
    def _leaves(self) -> bool:
        return self._leave

    def _bar(self, description: str, *, line: int, leave: bool) -> tqdm[Any]:
        bar: tqdm[Any] = _bar_class()(
            desc=description,
            position=2 * self._process_position + line,
            leave=leave,
            **_size_arguments(),
            file=sys.stdout,
            mininterval=0,
            miniters=1,
            bar_format=self.BAR_FORMAT,
        )
        return bar

    def _show(
        self, stage: str, description: str, done: int, total: int | None, metrics: dict[str, float | int | str]
    ) -> None:
        bar = self._bars.get(stage)
        if bar is None:
            make = {
                "sanity": self.init_sanity_tqdm,
                "train": self.init_train_tqdm,
                "validation": self.init_validation_tqdm,
                "test": self.init_test_tqdm,
                "predict": self.init_predict_tqdm,
            }[stage]
            bar = self._bars[stage] = make()
            bar.initial = max(0, done - 1)  # a run that resumes inside an epoch did not do the rest just now
            bar.n = bar.initial
        elif done < bar.n:
            bar.reset()  # the next epoch
        elif done - bar.n < self._refresh_rate and done != total:
            return
        bar.total = total
        bar.set_description_str(description, refresh=False)
        bar.set_postfix_str(", ".join(format_metrics(metrics)), refresh=False)
        if not bar.update(done - bar.n):
            bar.refresh()

    def _close(self, stage: str, *, keep: bool) -> None:
        bar = self._bars.pop(stage, None)
        if bar is not None:
            bar.leave = keep
            bar.close()
        if stage == "validation" and "train" in self._bars:
            self._bars["train"].unpause()

    def _write_above(self, text: str) -> None:
        _bar_class().write(text, file=sys.stdout, end="")


def _size_arguments() -> dict[str, object]:
    """Return what tqdm has to know of the terminal's size: where a container or a CI job says 0, it draws nothing."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return {"dynamic_ncols": True}  # no terminal, a notebook perhaps: tqdm knows what to do
    if size.columns and size.lines:
        return {"dynamic_ncols": True}
    return {"ncols": size.columns or 80, "nrows": size.lines or 24}


def _bar_class() -> Any:  # Any: tqdm's class for terminals or for notebooks, chosen by tqdm
    global _Bar
    if _Bar is None:
        # tqdm would start a thread that redraws slow bars; here the loop draws the bars.
        _Bar = type("_Bar", (tqdm,), {"monitor_interval": 0, "__module__": __name__})
    return _Bar


_Bar: object = None
