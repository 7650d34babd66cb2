"""Devices of torch_xla: TPUs, and for tests the CPU; and the import of torch_xla with its errors."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, MissingDependency
from .base import Accelerator, parse_device_indices
from .registry import ACCELERATOR_REGISTRY

_MEGABYTE = 1 << 20
# Value of PJRT_DEVICE that torch_xla has set at its import.
_chosen_by_torch_xla: set[str] = set()


def why_xla_is_missing(needed_for: str) -> tuple[str, str] | None:
    """Return (what, fix) if torch_xla cannot be imported, else None.

    Args:
        needed_for: The user's request as typed.
    """
    # Every listing of accelerators calls this, also in programs without XLA: avoid the import if it is missing.
    if "torch_xla" in sys.modules:
        return None
    if find_spec("torch_xla") is None:
        missing = MissingDependency("torch_xla", needed_for=needed_for)
        return missing.what, _command()
    problem = _import_problem()
    if problem is None:
        return None
    return (
        f"{needed_for} needs torch_xla, which cannot be imported with torch {torch.__version__}: {problem}",
        _command(),
    )


@cache
def _import_problem() -> str | None:
    is_chosen = "PJRT_DEVICE" in os.environ
    try:
        import_module("torch_xla")
    except (ImportError, OSError) as error:  # built for another torch: a symbol is missing
        return str(error)
    if not is_chosen and "PJRT_DEVICE" in os.environ:
        _chosen_by_torch_xla.add(os.environ["PJRT_DEVICE"])
    return None


def _command() -> str:
    return (
        "pip install torch==2.9.0 torch_xla==2.9.0 (torch_xla works with the torch that it was built for; on a TPU "
        "'torch_xla[tpu]==2.9.0')"
    )


def import_xla(name: str = "torch_xla", *, needed_for: str = "accelerator='xla'") -> Any:  # Any: it is not annotated
    """Return a module of torch_xla.

    Args:
        name: Name of the module.
        needed_for: The user's request as typed.

    Raises:
        ConfigError: torch_xla is not installed, or was built for another torch.
    """
    problem = why_xla_is_missing(needed_for)
    if problem is not None:
        raise ConfigError(problem[0], fix=problem[1])
    return import_module(name)


def is_runtime_started() -> bool:
    """Return whether this process has started XLA's runtime: its devices are fixed from then on."""
    binding = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    return binding is not None and bool(binding._xla_runtime_is_initialized())


@ACCELERATOR_REGISTRY.register("tpu", description="TPUs, and other devices of torch_xla's runtime (PJRT_DEVICE)")
@ACCELERATOR_REGISTRY.register("xla", description="the same")
class XLAAccelerator(Accelerator):
    """The devices of XLA's runtime (PJRT), which PJRT_DEVICE chooses: "TPU", or "CPU" for tests.

    `accelerator="auto"` selects it only if the runtime is a TPU's.
    """

    auto_priority = 30

    @staticmethod
    def name() -> str:
        """Return "xla", torch's name of the device type."""
        return "xla"

    @staticmethod
    def is_available() -> bool:
        """Return whether torch_xla can be imported; the runtime is not started."""
        return why_xla_is_missing("accelerator='xla'") is None

    @classmethod
    def is_auto_choice(cls) -> bool:
        """Return whether this machine's runtime is a TPU: XLA on a CPU must be requested."""
        chosen = os.environ.get("PJRT_DEVICE", "").upper()
        has_tpu = chosen == "TPU" or (not chosen and Path("/dev/accel0").exists())
        return has_tpu and find_spec("torch_xla") is not None and cls.is_available()

    @staticmethod
    def explain_missing(needed_for: str) -> tuple[str, str] | None:
        """Return (what, fix) if torch_xla cannot be imported, or finds no TPU where one was requested.

        With PJRT_DEVICE=CPU in the environment, "tpu" trains on the CPU, to try a program.
        """
        missing = why_xla_is_missing(needed_for)
        if missing is None and needed_for.lower() == "accelerator='tpu'" and "CPU" in _chosen_by_torch_xla:
            return (
                f"{needed_for}, but torch_xla finds no TPU on this machine and would compute on the CPU.",
                "run it on a machine with a TPU; to try a program without one, set PJRT_DEVICE=CPU before it starts.",
            )
        return missing

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices of the runtime, or of this host's replicas; on a CPU CPU_NUM_DEVICES, else 1.

        A TPU's runtime is not started here: the processes that will use its chips may start later.
        """
        if not is_runtime_started() and _is_cpu():
            count = os.environ.get("CPU_NUM_DEVICES", "1")
            return int(count) if count.isdecimal() and int(count) > 0 else 1
        runtime = import_xla("torch_xla.runtime")
        if int(os.environ.get("PJRT_LOCAL_PROCESS_COUNT") or 1) > 1:  # this process is one of several replicas
            return int(os.environ["PJRT_LOCAL_PROCESS_COUNT"])
        if not is_runtime_started() and runtime.device_type() == "TPU":
            return int(import_xla("torch_xla._internal.tpu").num_available_devices())
        return int(runtime.global_runtime_device_count())

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:  # Any: whatever the user typed
        """Return indices of devices. A CPU has as many as are requested, until the runtime is started."""
        count = XLAAccelerator.auto_device_count()
        requested = int(devices) if isinstance(devices, str) and devices.strip().isdecimal() else devices
        if isinstance(requested, int) and not isinstance(requested, bool) and not is_runtime_started() and _is_cpu():
            count = max(count, requested)
        return parse_device_indices(devices, "xla", range(count))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:  # Any: what parse_devices returned
        """Return `torch.device("xla", i)` for each index."""
        return [torch.device("xla", index) for index in devices]

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the memory in use and the limit, in megabytes, if the runtime reports them."""
        try:
            info = import_xla("torch_xla.core.xla_model").get_memory_info(device)
        except RuntimeError as error:
            # A CPU's runtime, and SPMD's virtual device, have no such statistics.
            if "UNIMPLEMENTED" not in str(error) and "not supported" not in str(error):
                raise
            return {}
        used, limit = float(info["bytes_used"]), float(info["bytes_limit"])
        stats = {"memory used (MB)": used / _MEGABYTE, "free memory (MB)": (limit - used) / _MEGABYTE}
        if "peak_bytes_used" in info:
            stats["peak memory (MB)"] = float(info["peak_bytes_used"]) / _MEGABYTE
        return stats


def _is_cpu() -> bool:
    """Return whether PJRT_DEVICE says that the runtime will be the CPU's."""
    return os.environ.get("PJRT_DEVICE", "").upper() == "CPU"
