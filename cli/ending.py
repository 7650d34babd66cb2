"""Program exit after an error: the user's errors are reported without a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ..errors import CheckpointError, ConfigError, LaunchError, LoopwrightError, MissingDependency, ModuleError

__all__ = ["told", "where_raised"]

_ROOT = Path(__file__).resolve().parents[1]
_OF_SETTINGS = (ConfigError, CheckpointError, LaunchError, MissingDependency, ModuleError)


@contextmanager
def told(name: str) -> Iterator[None]:
    """Report an error caused by settings, and end the program with code 2; with 130 after Ctrl+C.

    Where the user's own code raised it, or had called what raised it, the traceback is of use and stays.

    Args:
        name: The program with its subcommand.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        _say(name, "interrupted")
        raise SystemExit(130) from error
    except LoopwrightError as error:
        if not isinstance(error, _OF_SETTINGS) or _is_through_user(error.__traceback__):
            raise
        _say(name, str(error))
        raise SystemExit(2) from error


def where_raised(error: BaseException) -> str:
    """Return the places of a traceback that lie outside Loopwright and Python's import system, the innermost last."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}, line {error.lineno}"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not _is_ours(one.filename)]
    return " > ".join(f"{_shown(one.filename)}, line {one.lineno}, in {one.name}" for one in frames[-3:])


def _say(name: str, text: str) -> None:
    rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID") or "0"
    sys.stderr.write(f"{name}: {text}\n" if rank == "0" else f"{name} (rank {rank}): {text}\n")
    sys.stderr.flush()


def _is_through_user(trace: TracebackType | None) -> bool:
    """Return whether the traceback includes the user's code."""
    return any(not _is_ours(one.filename) for one in traceback.extract_tb(trace))


def _is_ours(filename: str) -> bool:
    # Frozen modules import; frames of torch and Python between two of ours do not help a user.
    if filename.startswith("<") or "importlib" in filename:
        return True
    path = Path(filename).resolve()
    return (
        (path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] not in ("examples", "tests"))
        or any(part in ("site-packages", "dist-packages") for part in path.parts)
        or path.is_relative_to(Path(os.__file__).parent)
    )


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else filename
