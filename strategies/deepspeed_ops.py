"""Imports DeepSpeed without a surprise: no build that nobody asked for, and builds that say so and end.

DeepSpeed compiles parts of itself with the machine's compiler when they are first used. Called by
strategies/deepspeed.py and deepspeed_engine.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import ConfigError, LaunchError, MissingDependency

__all__ = ["building", "connect", "import_deepspeed", "load", "quietly", "refuse_stale_locks", "stale_locks"]

logger = logging.getLogger(__name__)

# Any in this file: deepspeed has no types.

BUILD_TIMEOUT_S = 900.0
# A build holds its lock and writes all the time; a lock beside which nothing was written for so long has no owner.
_STALE_AFTER_S = 600.0
_SHARED_MEMORY = "deepspeed_shm_comm"


def import_deepspeed() -> Any:
    """Return the module `deepspeed`, ready for use.

    Raises:
        MissingDependency: It is not installed.
    """
    try:
        with quietly():
            import deepspeed
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != "deepspeed":
            raise
        raise MissingDependency("deepspeed", needed_for="strategy='deepspeed'", extra="deepspeed") from error
    # DeepSpeed (0.19) calls collectives by names that torch 2.13 has renamed; users can do nothing about it.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    operators = deepspeed.ops.__compatible_ops__
    # DeepSpeed (0.19) compiles this one, for a minute, as soon as CPU processes connect; only inference uses it.
    if operators.get(_SHARED_MEMORY) and not is_built(_SHARED_MEMORY):
        operators[_SHARED_MEMORY] = False
    return deepspeed


@contextmanager
def quietly() -> Iterator[None]:
    """Return a context without the warnings that DeepSpeed's imports cause in torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def connect(deepspeed: Any, *, backend: str, timeout: timedelta) -> None:
    """Let DeepSpeed use the processes that torch.distributed has connected already."""
    from deepspeed.comm import comm

    if comm.cdb is not None and not comm.cdb.is_initialized():
        comm.cdb = None  # of an earlier run of this process, which was disconnected since
    if comm.cdb is None:
        _forget_groups()
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout, dist_init_required=None
        )


def _forget_groups() -> None:
    """Forget the process groups that DeepSpeed keeps for the whole process: those of an earlier run are gone."""
    from deepspeed.utils import groups

    for name, value in vars(groups).items():
        if name.startswith("_") and name.endswith("_GROUP") and value is not None and not callable(value):
            setattr(groups, name, {} if isinstance(value, dict) else None)


# --- builds --------------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Return where torch keeps what is built: TORCH_EXTENSIONS_DIR, else its own cache."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root)


def is_built(name: str) -> bool:
    """Return whether an operator was built on this machine already."""
    return any(folder().glob(f"**/{name}/{name}.so"))


def stale_locks() -> list[Path]:
    """Return the locks of builds that ended without removing them: the next build would wait for ever."""
    now = time.time()
    found = []
    for lock in folder().glob("**/lock"):
        newest = max((one.stat().st_mtime for one in lock.parent.iterdir()), default=0.0)
        if now - newest > _STALE_AFTER_S:
            found.append(lock)
    return found


def refuse_stale_locks() -> None:
    """Raise if a build would wait for a lock that nobody holds.

    Raises:
        LaunchError: Names the files.
    """
    found = stale_locks()
    if found:
        raise LaunchError(
            f"a build of DeepSpeed's operators was broken off and left its lock, for which the next one would wait for "
            f"ever: {', '.join(map(str, found))}.",
            fix="delete the files, if no build is running.",
        )


@contextmanager
def building(what: str, *, timeout_s: float = BUILD_TIMEOUT_S) -> Iterator[None]:
    """Say that an operator is being built, and that it still is; raise in the end if it took too long.

    A build cannot be broken off from outside without leaving its lock; after the limit an error line says where to
    look, once, and the build goes on.
    """
    refuse_stale_locks()
    done = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        while not done.wait(30.0):
            passed = time.monotonic() - began
            if passed > timeout_s:
                logger.error("building %s takes longer than %.0f s; look into %s", what, timeout_s, folder())
                return
            logger.warning("building %s with the C++ compiler: %.0f s", what, passed)

    logger.warning("building %s with the C++ compiler, once; it is kept in %s", what, folder())
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    logger.warning("built %s in %.0f s", what, time.monotonic() - began)


def load(name: str, builder: Callable[[], Any], *, timeout_s: float = BUILD_TIMEOUT_S) -> None:
    """Build an operator unless it is there, saying so.

    Raises:
        ConfigError: It cannot be built here; says why.
    """
    if is_built(name):
        refuse_stale_locks()
        return
    made = builder()
    if not made.is_compatible(verbose=False):
        reason = getattr(made, "error_log", None) or "it is not compatible"
        raise ConfigError(
            f"DeepSpeed's operator {name} cannot be built on this machine: {reason}.",
            fix="install what is missing; for async_io that is libaio (apt-get install libaio-dev).",
        )
    with building(f"DeepSpeed's {name}", timeout_s=timeout_s):
        made.load(verbose=False)
