"""Tracebacks of errors that end a program: the user's frames, without Loopwright's; one line where there is no more."""

from __future__ import annotations

import os
import sys
from types import FrameType, TracebackType

from .errors import LoopwrightError
from .messages import is_of_library, is_of_loopwright

__all__ = ["end_in_silence", "end_with_line", "show_trimmed", "trimmed"]

_LINE = "_loopwright_line"
_IN_TORCH = tuple(
    os.path.join("torch", *parts)
    for parts in (("nn", "modules", "module.py"), ("nn", "parallel", "distributed.py"), ("utils", "_contextlib.py"))
)
_NOTE = "(frames of Loopwright are left out; LOOPWRIGHT_FULL_TRACEBACK=1 shows them)\n"


def show_trimmed() -> None:
    """Let uncaught errors be printed without frames of Loopwright, unless the program has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print


def end_with_line(error: BaseException, line: str) -> None:
    """Let an error be printed as one line if nothing catches it."""
    vars(error)[_LINE] = line


def end_in_silence(error: BaseException) -> None:
    """Let nothing be printed of an error that nothing catches: what there is to say was said."""
    vars(error)[_LINE] = ""


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    line = vars(error).get(_LINE)
    if line is not None:
        if line:
            sys.stderr.write(line + "\n")
        return
    is_trimmed, seen, one = False, set(), error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        is_trimmed |= _trim(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)  # type: ignore[assignment]
    sys.__excepthook__(kind, error, error.__traceback__)
    if is_trimmed:
        sys.stderr.write(_NOTE)


def _trim(error: BaseException) -> bool:
    """Take Loopwright's frames out of the traceback of an error; return whether there were any."""
    kept = trimmed(error)
    is_shorter, error.__traceback__ = kept is not error.__traceback__, kept
    return is_shorter


def trimmed(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error without frames of Loopwright, and without those of torch that call modules.

    An error that Loopwright's own code raises without meaning to keeps them: who reports it needs them.
    """
    steps = []
    step = error.__traceback__
    while step is not None:
        steps.append(step)
        step = step.tb_next
    mine = [one for one in steps if _is_internal(one.tb_frame)]
    is_ours = bool(steps) and is_of_loopwright(steps[-1].tb_frame)
    has_ours = any(is_of_loopwright(one.tb_frame) for one in mine)
    if os.environ.get("LOOPWRIGHT_FULL_TRACEBACK"):
        return error.__traceback__
    if not has_ours or len(mine) == len(steps) or (is_ours and not isinstance(error, LoopwrightError)):
        return error.__traceback__
    kept: TracebackType | None = None
    for one in reversed(steps):
        if one not in mine:
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def _is_internal(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if is_of_loopwright(frame):
        return True
    return is_of_library(frame) and (file.endswith(_IN_TORCH) or os.path.basename(file) == "contextlib.py")
