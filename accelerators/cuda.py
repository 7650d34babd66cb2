"""NVIDIA (and AMD ROCm) cards as an accelerator."""

from __future__ import annotations

import logging
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import ConfigError
from .base import Accelerator, parse_device_indices
from .matmul_precision import get_matmul_precision
from .registry import ACCELERATOR_REGISTRY

log = logging.getLogger(__name__)


@ACCELERATOR_REGISTRY.register("cuda", description="NVIDIA or ROCm cards; devices= is a number or indices")
class CUDAAccelerator(Accelerator):
    """Cards that torch reaches through `torch.cuda`."""

    auto_priority = 10
    is_gpu = True

    @staticmethod
    def name() -> str:
        """Return "cuda"."""
        return "cuda"

    @staticmethod
    def is_available() -> bool:
        """Return whether torch sees at least one card; queries the driver without making a context."""
        return torch.cuda.device_count() > 0

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of visible cards."""
        return torch.cuda.device_count()

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:  # Any: whatever the user typed
        """Return the indices of the cards, in the requested order; see `parse_device_indices`."""
        return parse_device_indices(devices, "cuda", range(torch.cuda.device_count()))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:  # Any: what parse_devices returned
        """Return `torch.device("cuda", i)` for each index."""
        return [torch.device("cuda", index) for index in devices]

    def setup_device(self, device: torch.device) -> None:
        """Make the card current, and report once if float32 products do not use tensor cores.

        Raises:
            ConfigError: The device is not a CUDA device.
        """
        if device.type != "cuda":
            raise ConfigError(f"Expected a CUDA device, got {device}.", fix='pass accelerator="auto" or a cuda device.')
        torch.cuda.set_device(device)
        if torch.cuda.get_device_capability(device) >= (8, 0) and get_matmul_precision() == "highest":
            log.info("%s has tensor cores, which Trainer(matmul_precision='high') or Fabric's would use.", device)

    def teardown(self) -> None:
        """Release cached memory to the driver."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the allocator's statistics (`torch.cuda.memory_stats`), sizes in bytes, and the card's own.

        The latter need nvidia-ml-py: `power_draw_w`, `temperature_c`, and `utilization_percent`.
        """
        stats = {key: float(value) for key, value in torch.cuda.memory_stats(device).items()}
        return {**stats, **_card_stats(device)}

    def device_memory(self, device: torch.device) -> float:
        """Return the memory of the card in bytes. It initializes CUDA in this process."""
        return float(torch.cuda.get_device_properties(device).total_memory)


def _card_stats(device: torch.device) -> dict[str, float]:
    """Return what the driver measures of a card; nothing without nvidia-ml-py, and only what the card supports."""
    if find_spec("pynvml") is None:
        return {}
    from pynvml import NVMLError

    stats = {}
    for name, read, unit in (
        ("power_draw_w", torch.cuda.power_draw, 0.001),  # of milliwatts
        ("temperature_c", torch.cuda.temperature, 1.0),
        ("utilization_percent", torch.cuda.utilization, 1.0),
    ):
        with suppress(NVMLError):  # a part of a card, as of MIG, has no power draw
            stats[name] = read(device) * unit
    return stats


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of cards on which a tensor can currently be created.

    Args:
        num_devices: Number of cards; -1 for all usable cards, 0 for an empty list.

    Raises:
        ConfigError: No card is usable, or fewer cards are usable than requested.
    """
    if num_devices == 0:
        return []
    visible = torch.cuda.device_count()
    if visible == 0 or num_devices > visible or num_devices < -1:
        raise ConfigError(
            f"find_usable_cuda_devices({num_devices}) was called on a machine with {visible} CUDA devices.",
            fix="ask for -1 or at most the number of visible devices; set CUDA_VISIBLE_DEVICES to show more.",
        )
    usable: list[int] = []
    for index in range(visible):
        try:
            torch.zeros(1, device=torch.device("cuda", index))
        except RuntimeError as error:  # what torch raises for a card that another process owns
            log.info("cuda:%d cannot be used now: %s", index, error)
            continue
        usable.append(index)
        if len(usable) == num_devices:
            break
    if len(usable) < num_devices or not usable:
        raise ConfigError(
            f"{num_devices} CUDA devices were requested; of {visible}, these are usable: {usable}.",
            fix="wait for another process to end, or ask for fewer devices.",
        )
    return usable
