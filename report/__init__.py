"""Reports on runs: an HTML page, or curves in a terminal, from the files of loggers and checkpoints.

It reads files only: the run may be finished, in progress, or written by another library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach

if TYPE_CHECKING:
    from .environment import describe_environment, write_environment
    from .evaluations import add_evaluated
    from .page import render_page, write_report
    from .runs import CheckpointFile, LoggedRun, Series, read_runs
    from .terminal import render_terminal, watch

__all__ = [
    "CheckpointFile",
    "LoggedRun",
    "Series",
    "add_evaluated",
    "describe_environment",
    "read_runs",
    "render_page",
    "render_terminal",
    "watch",
    "write_environment",
    "write_report",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "CheckpointFile": "runs",
        "LoggedRun": "runs",
        "Series": "runs",
        "add_evaluated": "evaluations",
        "describe_environment": "environment",
        "read_runs": "runs",
        "render_page": "page",
        "render_terminal": "terminal",
        "watch": "terminal",
        "write_environment": "environment",
        "write_report": "page",
    },
)
