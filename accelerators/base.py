"""The interface of an accelerator, and the grammar of `devices=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentTypeError, ConfigError, MissingDependency


class Accelerator:
    """A kind of device: finds devices and sets them up.

    Methods of the kind are static; methods of one device take it as an argument. Subclasses implement the static
    methods, and register themselves in `ACCELERATOR_REGISTRY`.
    """

    auto_priority: int = -1
    """`accelerator="auto"` selects the available kind with the highest priority; below 0: never automatically."""

    is_gpu: bool = False
    """Whether `accelerator="gpu"` may choose this kind."""

    @staticmethod
    def name() -> str:
        """Return the name for `accelerator=`, which is also the device type of torch."""
        raise NotImplementedError

    @staticmethod
    def is_available() -> bool:
        """Return whether this machine has at least one such device. Must not initialize the device."""
        raise NotImplementedError

    @classmethod
    def is_auto_choice(cls) -> bool:
        """Return whether `accelerator="auto"` and "gpu" may choose this kind on this machine."""
        return cls.is_available()

    @staticmethod
    def explain_missing(needed_for: str) -> tuple[str, str] | None:
        """Return (what, fix) for the error where `is_available` is False; None: this machine has no such device.

        Args:
            needed_for: The user's argument: "accelerator='xla'".
        """
        return None

    @staticmethod
    def auto_device_count() -> int:
        """Return how many devices `devices="auto"` uses."""
        raise NotImplementedError

    @staticmethod
    def parse_devices(devices: Any) -> Any:  # Any: the user's value; an int or indices are returned
        """Check the user's `devices=` and return what `get_parallel_devices` takes.

        Raises:
            ConfigError: The form is wrong for this kind of device, or a device does not exist.
        """
        raise NotImplementedError

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:  # Any: what parse_devices returned
        """Return one torch.device per process of this node, from what `parse_devices` returned."""
        raise NotImplementedError

    def setup_device(self, device: torch.device) -> None:
        """Make a device current for this process. Called once, before a module is moved to it."""

    def teardown(self) -> None:
        """Release what a run has cached."""

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return statistics of a device, read on the host; keys and units depend on the kind."""
        return {}

    def device_memory(self, device: torch.device) -> float | None:
        """Return the bytes that a process may use on a device, for plans; None if unknown."""
        return None


def read_machine_stats(*, needed_for: str, memory: str, processor: str, swap: str) -> dict[str, float]:
    """Return the use of the machine's memory, processor and swap in percent, under these names.

    Raises:
        MissingDependency: psutil is not installed.
    """
    try:
        import psutil
    except ImportError:
        raise MissingDependency("psutil", needed_for=needed_for, extra="stats") from None
    return {
        memory: float(psutil.virtual_memory().percent),
        processor: float(psutil.cpu_percent()),
        swap: float(psutil.swap_memory().percent),
    }


def parse_device_count(devices: object, kind: str) -> int:
    """Return a positive number of processes from an int or a string of digits.

    Raises:
        ConfigError: Anything else, also 0, negative numbers and booleans.
        ArgumentTypeError: The same, for lists and other types.
    """
    count = devices
    if isinstance(count, str) and count.strip().isdecimal():
        count = int(count)
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        return count
    is_kind = isinstance(devices, str) and devices.partition(":")[0] in ("cpu", "gpu", "cuda", "mps", "tpu", "xla")
    error = ConfigError if isinstance(devices, int | str) else ArgumentTypeError
    raise error(
        f"devices={devices!r} cannot be used with accelerator={kind!r}: expected a number of processes, 1 or more.",
        fix=f"pass accelerator={str(devices).partition(':')[0]!r}, and the number as devices=."
        if is_kind
        else 'pass devices=1 (or a larger int), or devices="auto".',
    )


def parse_device_indices(devices: object, kind: str, visible: Sequence[int]) -> list[int]:
    """Return device indices from any accepted form: n, -1, "n", "-1", "auto", "0,1", "1,", [0, 1].

    Args:
        devices: The user's value.
        kind: Name of the accelerator, for messages.
        visible: Indices that exist.

    Raises:
        ConfigError: The form is wrong, the number is 0 or too large, or a device is named twice or does not exist.
    """
    if not visible:
        raise ConfigError(
            f"devices={devices!r} requests {kind} devices, but this machine has none.",
            fix='pass accelerator="cpu", or make the devices visible to this process.',
        )
    requested = _indices_or_count(devices, kind)
    if isinstance(requested, int):
        if requested == -1:
            return list(visible)
        if requested > len(visible):
            raise ConfigError(
                f"devices={devices!r} requests {requested} {kind} devices, but this machine has {len(visible)}.",
                fix=f"pass devices={len(visible)} or fewer.",
            )
        return list(visible[:requested])
    twice = sorted({index for index in requested if requested.count(index) > 1})
    if twice:
        raise ConfigError(
            f"devices={devices!r} names {', '.join(map(str, twice))} more than once.", fix="name each device once."
        )
    missing = [index for index in requested if index not in visible]
    if missing:
        raise ConfigError(
            f"devices={devices!r} names {kind} devices that do not exist: {', '.join(map(str, missing))}.",
            fix=f"choose among the visible ones: {', '.join(map(str, visible))}.",
        )
    return requested


def _indices_or_count(devices: object, kind: str) -> int | list[int]:
    """Return -1 (all), a positive count, or a list of at least one index."""
    value = devices
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == "auto":
            return -1
        try:
            value = [int(part) for part in text.split(",") if part.strip()] if "," in text else int(text)
        except ValueError:
            raise _wrong_form(devices, kind) from None
    if isinstance(value, (list, tuple)):
        if not value:
            raise _wrong_form(devices, kind)
        if all(isinstance(index, int) and not isinstance(index, bool) for index in value):
            return [int(index) for index in value]
        raise _wrong_form(devices, kind)
    if isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0):
        return value
    raise _wrong_form(devices, kind)


def _wrong_form(devices: object, kind: str) -> ConfigError:
    return ConfigError(
        f"devices={devices!r} cannot be used with accelerator={kind!r}: expected a positive number of devices, "
        f"-1 for all, or indices of devices.",
        fix='pass devices=1, devices=[0, 1], devices="0,1", devices=-1 or devices="auto".',
    )
