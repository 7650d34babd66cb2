"""What runs tell their user: lines on standard error, from the logger `loopwright`, unless logging is configured."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from .messages import current_rank, warn

_logger = logging.getLogger(__name__.partition(".")[0])
# `extra=` of a record that the line at the end of a run says as well: only configured logging gets it.
ONLY_LOGS = {"loopwright_only_logs": True}
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "off": 100}
_COLORS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}


def is_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; imports nothing.

    That ipykernel is imported says nothing: ipywidgets imports it, and plotly imports ipywidgets, in plain programs.
    """
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return find is not None and hasattr(find(), "kernel")


class LogLines(logging.Handler):
    """Writes records to standard error: all of rank 0, of other ranks those from WARNING on.

    It writes nothing, and is removed, as soon as the root logger or `loopwright` has a handler of the program's.

    Attributes:
        above: Writes a text above the progress bar that is drawn; None while there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.above: Callable[[str], None] | None = None
        self.level_set = logging.NOTSET
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record as a line."""
        if is_configured():
            withdraw()
            return
        if getattr(record, "loopwright_only_logs", False) or (record.levelno < logging.WARNING and current_rank()):
            return
        try:
            self._write(self._text(record) + "\n")
        except Exception:  # as logging's own handlers: a line is not worth a training
            self.handleError(record)

    def _text(self, record: logging.LogRecord) -> str:
        text = self.format(record)
        if record.levelno < logging.WARNING:
            return text
        label = f"{record.levelname.lower()}:"
        if wants_color(sys.stderr):
            label = f"\x1b[{_COLORS.get(record.levelno, '33')}m{label}\x1b[0m"
        return f"{label} {text}"

    def _write(self, text: str) -> None:
        stream = sys.stderr
        if stream is None:  # a program without a console
            return
        if self.above is not None and stream.isatty():
            self.above(text)
        else:
            stream.write(text)
            stream.flush()


LINES = LogLines()


def show_logs() -> None:
    """Let the logger `loopwright` write to standard error from level INFO on, unless the program configures logging.

    The program does where the root logger or `loopwright` has a handler. A level that is set on `loopwright` stays. The
    environment variable LOOPWRIGHT_LOG_LEVEL is another level: debug, info, warning, error or off.
    """
    if is_configured():
        withdraw()
        return
    if LINES in _logger.handlers:
        return
    if _logger.level == logging.NOTSET:
        name = os.environ.get("LOOPWRIGHT_LOG_LEVEL", "info").lower()
        if name not in _LEVELS:
            warn(f"LOOPWRIGHT_LOG_LEVEL is {name!r}, which is none of {', '.join(_LEVELS)}: it is taken as info.")
        LINES.level_set = _LEVELS.get(name, logging.INFO)
        _logger.setLevel(LINES.level_set)
    _logger.addHandler(LINES)


def is_configured() -> bool:
    """Whether the program has its own handler at the root logger or at `loopwright`."""
    return any(one is not LINES for one in _handlers())


def _handlers() -> list[logging.Handler]:
    return [*logging.getLogger().handlers, *_logger.handlers]


def withdraw() -> None:
    """Leave logging as it was before `show_logs`."""
    if LINES not in _logger.handlers:
        return
    _logger.removeHandler(LINES)
    if _logger.level == LINES.level_set:
        _logger.setLevel(logging.NOTSET)
    LINES.level_set = logging.NOTSET


def wants_color(stream: object) -> bool:
    """Whether a stream is a terminal that shows colors, and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        return False
