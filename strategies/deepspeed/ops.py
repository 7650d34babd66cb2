"""Imports DeepSpeed without a surprise: no build that nobody asked for, and builds that say so and end.

DeepSpeed compiles parts of itself with the machine's compiler when they are first used; deepspeed_builds.py does it
instead.
"""

from __future__ import annotations

import errno
import functools
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...errors import ConfigError, MissingDependency

__all__ = ["connect", "import_deepspeed", "operators_of", "prepare", "quietly", "refusals", "takes_cpu_adam"]

# Any in this file: deepspeed has no types; values of a JSON document.

_OFFLOADS = ("offload_optimizer", "offload_param")
_DIRECT = getattr(os, "O_DIRECT", 0)
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
    _watch_builds()
    from .builds import is_built

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


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """Return a context in which what DeepSpeed says of keys and values of its configuration is an error of ours.

    Args:
        where: Where the configuration stands.

    Raises:
        ConfigError: With every key that DeepSpeed does not know, and every value that it does not take.
    """
    try:
        yield
    except ValueError as error:
        if type(error).__name__ != "ValidationError":
            raise
        said: Any = error  # pydantic's, of which only DeepSpeed knows the version
        lines = "".join(f"\n  {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in said.errors())
        raise ConfigError(f"{where}: DeepSpeed refuses a part of it, {said.title}:{lines}", fix="mend it.") from error


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


def _watch_builds() -> None:
    """Let `deepspeed_builds.build` build whatever DeepSpeed loads.

    All its builds go through one method, also those of an optimizer that the user makes.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    from .builds import build, tools_on_path

    original = OpBuilder.jit_load
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def jit_load(self: Any, verbose: bool = True) -> Any:
        kind = type(self)
        build(self.name, f"{kind.__module__}:{kind.__qualname__}")
        with tools_on_path():
            return original(self, verbose)

    OpBuilder.jit_load = jit_load


def operators_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the operators that a configuration makes an engine load, each with what builds it."""
    found = {}
    optimizer = str((config.get("optimizer") or {}).get("type")).lower()
    if optimizer in ("adam", "adamw") and takes_cpu_adam(config):
        found["cpu_adam"] = "CPUAdamBuilder"
    if _nvme_paths(config):
        found.update(pin_memory="PinMemoryBuilder", async_io="AsyncIOBuilder")
    return {name: f"deepspeed.ops.op_builder:{maker}" for name, maker in found.items()}


def takes_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration asks for DeepSpeed's own Adam on the host, rather than for torch's."""
    return _device(config, "offload_optimizer") != "none" and bool(config.get("zero_force_ds_cpu_optimizer", False))


def prepare(config: Mapping[str, Any], where: str) -> None:
    """Refuse what this machine cannot do for a configuration, and build the operators that the engine will load.

    Called on every process of a node before they connect, and before they are started where that can be.

    Args:
        config: DeepSpeed's.
        where: Where it stands, for the message.

    Raises:
        ConfigError: A folder for NVMe cannot be used; or libaio or the compiler is missing. All of it is named.
        LaunchError: A build failed, or took too long.
    """
    needed = operators_of(config)
    if not needed:
        return
    from .builds import build, is_built, missing_for

    missing = {name: maker for name, maker in needed.items() if not is_built(name)}
    problems = [one for path in _nvme_paths(config) for one in _problems_of(path)]
    problems += [(f"DeepSpeed's {', '.join(missing)} must be built, and there is no {tool} here", fix)
                 for tool, fix in missing_for(missing).items()]  # fmt: skip
    if problems:
        whats, fixes = zip(*problems, strict=True)
        raise ConfigError(f"{where}: {'; '.join(whats)}.", fix=f"{'; '.join(dict.fromkeys(fixes))}.")
    for name, maker in missing.items():
        build(name, maker)


def _device(config: Mapping[str, Any], section: str) -> str:
    zero = config.get("zero_optimization")
    offload = (zero.get(section) or {}) if isinstance(zero, Mapping) else {}
    return str(offload.get("device", "none"))


def _nvme_paths(config: Mapping[str, Any]) -> list[str]:
    """Return the folders on disks that a configuration names for "nvme", each once."""
    used = [section for section in _OFFLOADS if _device(config, section) == "nvme"]
    return list(dict.fromkeys(str(config["zero_optimization"][section].get("nvme_path")) for section in used))


def _problems_of(path: str) -> list[tuple[str, str]]:
    """Return (what, fix) if DeepSpeed could not swap to a folder."""
    fix = "pass nvme_path=, a folder on a local disk that can be written to"
    if not Path(path).is_dir():
        return [(f"nvme_path={path!r} is no folder that exists", fix)]
    try:
        # As libaio opens files: without the system's cache.
        with tempfile.NamedTemporaryFile(dir=path) as file:
            os.close(os.open(file.name, os.O_RDWR | _DIRECT))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return [(f"nvme_path={path!r} is on a file system without direct access (O_DIRECT)", fix)]
        return [(f"nvme_path={path!r} cannot be written to ({error.strerror})", fix)]
    return []
