"""`LearningRateCurve`: losses by learning rate, a suggestion, and a plot; the result of a learning-rate search."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from ..errors import ConfigError
from .plots import open_axes, show_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..protocols import StateDict

SMOOTHING = 0.98
"""Share of the earlier losses in a smoothed one."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LearningRateCurve:
    """The loss as the learning rate rises: the result of `Tuner.lr_find`.

    Attributes:
        mode: Spacing of the rates: "exponential" (even on a logarithmic scale) or "linear".
        lr_min: First rate.
        lr_max: Last rate, if the search does not stop before.
        num_training: Planned number of steps.
        results: "lr" and "loss": one value per step taken. Losses are smoothed; NaN for a step without a loss.
        raw_losses: The losses without smoothing.
        num_without_loss: Number of steps in which every training_step returned None.
    """

    mode: str
    lr_min: float
    lr_max: float
    num_training: int
    results: dict[str, list[float]] = field(default_factory=lambda: {"lr": [], "loss": []})
    raw_losses: list[float] = field(default_factory=list)
    num_without_loss: int = 0
    _average: float = field(default=0.0, repr=False, compare=False)
    _best: float = field(default=math.inf, repr=False, compare=False)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        share = step / max(1, self.num_training - 1)
        if self.mode == "linear":
            return self.lr_min + (self.lr_max - self.lr_min) * share
        return float(self.lr_min * (self.lr_max / self.lr_min) ** share)

    def add(self, loss: float, threshold: float | None) -> bool:
        """Add the loss of the next step, and return whether the search is over.

        A subclass may smooth losses, choose rates (`lr_at`) and end the search by other rules.

        Args:
            loss: The loss without smoothing.
            threshold: The search ends when the smoothed loss exceeds this multiple of the lowest; None for never.
        """
        self.results["lr"].append(self.lr_at(len(self.raw_losses)))
        self.raw_losses.append(loss)
        count = len(self.raw_losses) - self.num_without_loss
        self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
        smoothed = self._average / (1 - SMOOTHING**count)
        self.results["loss"].append(smoothed)
        # The first losses of small batches scatter: an average of so few neither is the lowest nor ends the search.
        is_settled = count >= min(10, self.num_training // 5)
        has_exploded = threshold is not None and is_settled and smoothed > threshold * self._best
        if not math.isfinite(loss) or has_exploded or len(self.raw_losses) >= self.num_training:
            return True
        if is_settled:
            self._best = min(self._best, smoothed)
        return False

    def add_nothing(self) -> bool:
        """Add a step without a loss, which the suggestion ignores, and return whether the search is over."""
        self.results["lr"].append(self.lr_at(len(self.raw_losses)))
        self.results["loss"].append(math.nan)
        self.raw_losses.append(math.nan)
        self.num_without_loss += 1
        return len(self.raw_losses) >= self.num_training

    def suggestion(
        self, skip_begin: int = 10, skip_end: int = 1, *, method: Literal["steepest", "minimum"] = "steepest"
    ) -> float | None:
        """Return the learning rate to train with.

        Args:
            skip_begin: Number of steps at the beginning to ignore.
            skip_end: Number of steps at the end to ignore.
            method: "steepest": the rate at which the loss falls fastest. "minimum": a tenth of the rate with the lowest
                loss.

        Returns:
            The rate; None, with a log message, if fewer than two finite losses remain.

        Source: Smith 2017, section 3.3 (the range test); both rules are common practice in reading its curve.
        """
        if method not in ("steepest", "minimum"):
            raise ConfigError(f"method={method!r}, expected 'steepest' or 'minimum'.", fix="choose one of them.")
        index = self.index_of_rate(skip_begin, skip_end, method)
        if index is None:
            _log.error("there are too few finite losses to suggest a learning rate; try a wider range or more steps")
            return None
        return self.results["lr"][index] / (10.0 if method == "minimum" else 1.0)

    def index_of_rate(self, skip_begin: int, skip_end: int, method: str) -> int | None:
        """Return the index of the step on which `suggestion` is based; None with fewer than two finite losses."""
        losses = self.results["loss"]
        kept = [i for i in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[i])]
        if len(kept) < 2:
            return None
        if method == "minimum":
            return min(kept, key=lambda i: losses[i])
        # Neighbors differ by the noise of one batch; over a twentieth of the curve the slope shows.
        reach = max(1, len(kept) // 20)
        slopes = []
        for at, i in enumerate(kept):  # central differences inside, one-sided at both ends
            before, after = kept[max(at - reach, 0)], kept[min(at + reach, len(kept) - 1)]
            # The first averages are of few losses and move with each of them; this weighs all steps alike.
            weight = 1 - SMOOTHING ** (i + 1)
            slopes.append((weight * (losses[after] - losses[before]) / (after - before), i))
        return min(slopes)[1]

    def plot(self, suggest: bool = False, show: bool = False, ax: Axes | None = None) -> Figure:
        """Draw the losses over the learning rate; the plot is cut off above for exploding losses.

        Args:
            suggest: Whether to mark the suggestion.
            show: Whether to open a window.
            ax: matplotlib axes to draw on; None creates a figure.

        Returns:
            The matplotlib figure.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure, axes = open_axes(ax, needed_for="LearningRateCurve.plot", show=show)
        axes.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            axes.set_xscale("log")
        finite = [loss for loss in self.results["loss"] if math.isfinite(loss)]
        if finite:
            lowest = finite.index(min(finite))
            low, high = finite[lowest], max(finite[: lowest + 1])
            top = high + 0.5 * max(high - low, 0.1 * abs(high))
            if max(finite) > top:
                axes.set_ylim(top=top, bottom=low - 0.05 * (top - low))
        axes.set_xlabel("Learning rate")
        axes.set_ylabel("Loss (smoothed)")
        index = self.index_of_rate(10, 1, "steepest") if suggest else None
        if index is not None:
            lr = self.results["lr"][index]
            axes.plot(lr, self.results["loss"][index], "o", color="tab:red", label=f"suggestion: {lr:.3g}")
            axes.legend()
        show_figure(show=show)
        return figure

    def state_dict(self) -> StateDict:
        """Return the curve as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: StateDict) -> LearningRateCurve:
        """Return the curve of a `state_dict`."""
        return cls(**state)
