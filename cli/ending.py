"""Program exit after an error: the user's errors are reported without a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CheckpointError, ConfigError, LaunchError, LoopwrightError, MissingDependency, ModuleError
from ..tracebacks import user_frames

_OF_SETTINGS = (ConfigError, CheckpointError, LaunchError, MissingDependency, ModuleError)


@contextmanager
def reporting_errors(name: str) -> Iterator[None]:
    """Report an error caused by settings, and end the program with code 2; with 130 after Ctrl+C.

    If the user's own code raised it, or called the function that raised it, the traceback is useful and is shown.

    Args:
        name: The program with its subcommand.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        _say(name, "interrupted")
        raise SystemExit(130) from error
    except LoopwrightError as error:
        if not isinstance(error, _OF_SETTINGS) or user_frames(error):
            raise
        _say(name, str(error))
        raise SystemExit(2) from error


def _say(name: str, text: str) -> None:
    rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID") or "0"
    sys.stderr.write(f"{name}: {text}\n" if rank == "0" else f"{name} (rank {rank}): {text}\n")
    sys.stderr.flush()
