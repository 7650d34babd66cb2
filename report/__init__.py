"""Pictures of runs: one HTML page, or curves in a terminal, from the files that loggers and checkpoints leave.

`loopwright report` and `loopwright watch` (cli/) call it. It reads files only: the run may be over, or going on, or
have been written by another library. Nothing of it is imported with the Trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach

if TYPE_CHECKING:
    from .environment import describe_environment, write_environment
    from .page import render_page, write_report
    from .runs import CheckpointFile, LoggedRun, Series, read_runs
    from .terminal import render_terminal, watch

__all__ = [
    "CheckpointFile",
    "LoggedRun",
    "Series",
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
        "describe_environment": "environment",
        "read_runs": "runs",
        "render_page": "page",
        "render_terminal": "terminal",
        "watch": "terminal",
        "write_environment": "environment",
        "write_report": "page",
    },
)
