"""Plots of the tuner, with matplotlib, which is imported when a plot is requested."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ..errors import MissingDependency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def open_axes(ax: Axes | None, *, needed_for: str, show: bool) -> tuple[Figure, Axes]:
    """Return a figure and its axes: those given, or new ones.

    Without `show` the figure is not registered anywhere, so that a notebook or a later `plt.show()` does not find it.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    if ax is not None:
        return cast("Figure", ax.figure), ax
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("matplotlib", needed_for=needed_for, extra="plots") from None
    if show:
        import matplotlib.pyplot as plt

        return plt.subplots(layout="constrained")
    figure = Figure(layout="constrained")
    return figure, figure.add_subplot()


def show_figure(*, show: bool) -> None:
    """Open the window, if requested."""
    if show:
        import matplotlib.pyplot as plt

        plt.show()
