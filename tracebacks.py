"""Tracebacks of errors that end a program: the user's frames, without Loopwright's; one line where there is no more."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from .console import is_notebook
from .errors import LoopwrightError, add_nearest
from .messages import is_of_library, is_of_loopwright

_LINE = "_loopwright_line"
# Files of torch that call modules, graphs and data sets: their frames say nothing about the user's.
_IN_TORCH = tuple(
    os.path.join("torch", *name.split("/"))
    for name in (
        "nn/modules/module.py", "nn/parallel/distributed.py", "utils/_contextlib.py", "_tensor.py",
        "autograd/__init__.py", "autograd/graph.py", "utils/data/dataloader.py", "utils/data/_utils/fetch.py",
        "_utils.py",
    )
)  # fmt: skip
_NOTE = "(frames of Loopwright are left out; LOOPWRIGHT_FULL_TRACEBACK=1 shows them)\n"


def show_trimmed() -> None:
    """Let uncaught errors be printed without frames of Loopwright, unless the program has set an exception hook."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print
    if is_notebook():
        shell = sys.modules["IPython"].get_ipython()
        if not shell.custom_exceptions:
            shell.set_custom_exc((Exception, KeyboardInterrupt), _show_in_notebook)


def end_with_line(error: BaseException, line: str) -> None:
    """Let an error be printed as one line if nothing catches it."""
    vars(error)[_LINE] = line


def end_in_silence(error: BaseException) -> None:
    """Let nothing be printed of an error that nothing catches: what there is to say was said."""
    vars(error)[_LINE] = ""


def _show_in_notebook(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:  # Any: IPython is not a dependency
    """Show an error of a cell as IPython does, without frames of Loopwright."""
    line = vars(error).get(_LINE)
    if line is not None:
        if line:
            sys.stderr.write(line + "\n")
        return
    is_trimmed = _trim_all(error)
    shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset)
    if is_trimmed:
        sys.stderr.write(_NOTE)


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    line = vars(error).get(_LINE)
    if line is not None:
        if line:
            sys.stderr.write(line + "\n")
        return
    is_trimmed = _trim_all(error)
    sys.__excepthook__(kind, error, error.__traceback__)
    if is_trimmed:
        sys.stderr.write(_NOTE)


def _trim_all(error: BaseException) -> bool:
    """Take Loopwright's frames out of an error and its causes; return whether anything was left out.

    An error about a misspelled keyword names the nearest one.
    """
    add_nearest(error)
    is_trimmed, seen = False, set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        is_trimmed |= _trim(one) | _drop_own_cause(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return is_trimmed


def _trim(error: BaseException) -> bool:
    """Take Loopwright's frames out of the traceback of an error; return whether there were any."""
    kept = trimmed(error)
    is_shorter, error.__traceback__ = kept is not error.__traceback__, kept
    return is_shorter


def _drop_own_cause(error: BaseException) -> bool:
    """Leave out the cause that an error of Loopwright's repeats in its message, where no code of the user's met it."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if not isinstance(error, LoopwrightError) or os.environ.get("LOOPWRIGHT_FULL_TRACEBACK", "0") not in ("", "0"):
        return False
    if cause is None:
        return False
    is_missing = isinstance(cause, FileNotFoundError) or (
        isinstance(cause, ModuleNotFoundError) and cause.name == getattr(error, "package", None)
    )
    text = getattr(cause, "strerror", None) or str(cause)
    if not (is_missing or (text and text in str(error))):
        return False
    step = cause.__traceback__
    while step is not None:
        if not (is_of_loopwright(step.tb_frame) or is_of_library(step.tb_frame)):
            return False
        step = step.tb_next
    error.__cause__, error.__suppress_context__ = None, True
    return True


def trimmed(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error without frames of Loopwright, and without torch's frames that only call others.

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
    if os.environ.get("LOOPWRIGHT_FULL_TRACEBACK", "0") not in ("", "0"):
        return error.__traceback__
    if not has_ours or len(mine) == len(steps) or (is_ours and not isinstance(error, LoopwrightError)):
        return error.__traceback__
    kept: TracebackType | None = None
    for one in reversed(steps):
        if one not in mine:
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def user_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of an error that lie outside Loopwright, Python and installed packages, with their lines."""
    steps = traceback.walk_tb(error.__traceback__)
    return [(one, line) for one, line in steps if not (is_of_loopwright(one) or is_of_library(one))]


def where_raised(error: BaseException) -> str:
    """Return the places of an error in the user's code, the innermost last: at most three."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}, line {error.lineno}"
    places = [(one.f_code, line) for one, line in user_frames(error)[-3:]]
    return " > ".join(f"{_shown(code.co_filename)}, line {line}, in {code.co_name}" for code, line in places)


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else filename


def _is_internal(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if is_of_loopwright(frame):
        return True
    return is_of_library(frame) and (file.endswith(_IN_TORCH) or os.path.basename(file) == "contextlib.py")
