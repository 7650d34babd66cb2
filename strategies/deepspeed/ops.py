"""DeepSpeed's parts that belong to the process: its import, connection, activation checkpointing, compiled operators.

DeepSpeed compiles operators when they are first used. builds.py compiles them instead: earlier, visibly, with a limit.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import Clauses, ConfigError, MissingDependency
from .builds import build, build_environment, is_built, missing_for
from .config import activation_options, section_of

_DIRECT = getattr(os, "O_DIRECT", 0)
_SHARED_MEMORY = "deepspeed_shm_comm"


def missing_deepspeed() -> MissingDependency:
    """Return the error for a machine without DeepSpeed."""
    return MissingDependency("deepspeed", needed_for="strategy='deepspeed'", extra="deepspeed")


def import_deepspeed(logging_level: int = logging.WARNING) -> ModuleType:
    """Return the module `deepspeed`, imported without its warnings; `builds.build` builds its operators.

    Raises:
        MissingDependency: It is not installed.
    """
    try:
        with quietly():
            import deepspeed
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != "deepspeed":
            raise
        raise missing_deepspeed() from error
    from deepspeed.utils import logger

    logger.setLevel(logging_level)
    # DeepSpeed (0.19) calls collectives by names that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    _redirect_builds()
    operators = deepspeed.ops.__compatible_ops__
    # DeepSpeed (0.19) compiles this one, for a minute, as soon as CPU processes connect; only inference uses it.
    if operators.get(_SHARED_MEMORY) and not is_built(_SHARED_MEMORY):
        operators[_SHARED_MEMORY] = False
    module: ModuleType = deepspeed
    return module


@contextmanager
def quietly() -> Iterator[None]:
    """Return a context without the warnings that DeepSpeed's imports cause in torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """Return a context in which DeepSpeed's errors about its configuration become a ConfigError.

    Args:
        where: Location of the configuration.

    Raises:
        ConfigError: With every key that DeepSpeed does not know, and every value that it does not accept.
    """
    try:
        yield
    except ValueError as error:
        if type(error).__name__ != "ValidationError":  # pydantic's, in the version that DeepSpeed uses
            raise
        problems = error.errors()  # type: ignore[attr-defined]  # pydantic's
        lines = "".join(f"\n  {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems)
        title = error.title  # type: ignore[attr-defined]  # pydantic's
        raise ConfigError(
            f"{where}: DeepSpeed rejects these keys ({title}):{lines}", fix="correct these keys."
        ) from error


def connect(*, backend: str, timeout: timedelta) -> None:
    """Let DeepSpeed use the connection of torch.distributed."""
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    if comm.cdb is not None and comm.cdb.is_initialized():
        return
    comm.cdb = None  # of an earlier run in this process, as are the process groups
    for name, value in vars(groups).items():
        if name.startswith("_") and name.endswith("_GROUP") and value is not None and not callable(value):
            setattr(groups, name, {} if isinstance(value, dict) else None)
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout, dist_init_required=None
    )


# --- activation checkpointing --------------------------------------------------------------------------------------


def configure_activations(config: Mapping[str, Any], device_type: str) -> bool:
    """Configure `deepspeed.checkpointing`, which is process-wide.

    What a script has configured before stays where the configuration is silent.

    Returns:
        Whether activations stay in buffers until a backward pass.
    """
    from deepspeed import checkpointing

    options = activation_options(config)
    is_requested = any(options.values())
    if device_type == "cpu":
        # They are on the CPU already; DeepSpeed (0.19) would then free the originals.
        options["checkpoint_in_cpu"] = False
    if is_requested or not checkpointing.is_configured():
        checkpointing.configure(None, **options)
    return bool(options["contiguous_checkpointing"] or options["checkpoint_in_cpu"])


def forget_activations(config: Mapping[str, Any]) -> None:
    """Reset what `configure_activations` has set, for later runs in this process."""
    if any(activation_options(config).values()):
        from deepspeed import checkpointing

        checkpointing.configure(None)


# --- operators -----------------------------------------------------------------------------------------------------


def _redirect_builds() -> None:
    """Let `builds.build` build every operator that DeepSpeed loads: all builds go through one method."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    original = OpBuilder.jit_load
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def jit_load(self: Any, verbose: bool = True) -> Any:  # Any: DeepSpeed's builder and its operator
        kind = type(self)
        build(self.name, f"{kind.__module__}:{kind.__qualname__}")
        with build_environment():
            return original(self, verbose)

    OpBuilder.jit_load = jit_load


def operators_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the operators that an engine with this configuration loads, each with its builder."""
    found = {}
    optimizer = str(section_of(config, "optimizer").get("type")).lower()
    if optimizer in ("adam", "adamw") and takes_cpu_adam(config):
        found["cpu_adam"] = "CPUAdamBuilder"
    if _nvme_paths(config):
        found.update(pin_memory="PinMemoryBuilder", async_io="AsyncIOBuilder")
    return {name: f"deepspeed.ops.op_builder:{maker}" for name, maker in found.items()}


def takes_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration selects DeepSpeed's own Adam on the host, instead of torch's."""
    offload = section_of(section_of(config, "zero_optimization"), "offload_optimizer")
    return offload.get("device", "none") != "none" and bool(config.get("zero_force_ds_cpu_optimizer", False))


def prepare(config: Mapping[str, Any], where: str) -> None:
    """Refuse what this machine cannot do for a configuration, and build the operators that the engine will load.

    Called on every process of a node before they connect, and in the first process before the others start.

    Args:
        config: DeepSpeed's configuration.
        where: Its location, for messages.

    Raises:
        ConfigError: A folder for NVMe cannot be used, or libaio or the compiler is missing; every problem is named.
        LaunchError: A build failed, or took too long.
    """
    missing = {name: maker for name, maker in operators_of(config).items() if not is_built(name)}
    problems = Clauses(one for path in _nvme_paths(config) for one in _problems_of(path))
    problems += [(f"DeepSpeed's {', '.join(missing)} must be built, and there is no {tool} here", fix)
                 for tool, fix in missing_for(missing).items()]  # fmt: skip
    problems.refuse(where)
    for name, maker in missing.items():
        build(name, maker)


def _nvme_paths(config: Mapping[str, Any]) -> list[str]:
    """Return the folders for "nvme" in a configuration, each once."""
    zero = section_of(config, "zero_optimization")
    sections = [section_of(zero, name) for name in ("offload_optimizer", "offload_param")]
    return list(dict.fromkeys(str(one.get("nvme_path")) for one in sections if one.get("device") == "nvme"))


def _problems_of(path: str) -> list[tuple[str, str]]:
    """Return (what, fix) if DeepSpeed could not swap to a folder."""
    fix = "pass nvme_path=, a writable folder on a local disk"
    if not Path(path).is_dir():
        return [(f"nvme_path={path!r} is not an existing folder", fix)]
    try:
        # Opened as by libaio: without the system's cache.
        with tempfile.NamedTemporaryFile(dir=path) as file:
            os.close(os.open(file.name, os.O_RDWR | _DIRECT))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return [(f"nvme_path={path!r} is on a file system without direct access (O_DIRECT)", fix)]
        return [(f"nvme_path={path!r} cannot be written to ({error.strerror})", fix)]
    return []
