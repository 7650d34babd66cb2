"""One process on one device: `strategy="auto"` with one device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import ConfigError
from .base import Strategy
from .registry import STRATEGY_REGISTRY

if TYPE_CHECKING:
    from ..accelerators import Accelerator
    from ..precision import Precision
    from ..protocols import CheckpointPlugin


@STRATEGY_REGISTRY.register("single_device", description="one process on one device")
class SingleDeviceStrategy(Strategy):
    """Train on one device. The module is not wrapped, and every collective returns its argument.

    Args:
        device: The device, as torch.device or string ("cuda:1"); None for the one selected by `accelerator=` and
            `devices=`.
        accelerator: The kind of device; None lets Fabric choose.
        checkpoint_io: Reads and writes checkpoints; None lets Fabric choose.
        precision_plugin: The precision; None lets Fabric choose.
        precision: Another name for `precision_plugin`.

    Raises:
        ConfigError: The device is not valid in torch.
    """

    strategy_name = "single_device"
    traits = replace(Strategy.traits, sums_in_tree=True)

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin, precision=precision)
        if device is not None:
            try:
                self._lw_device = _with_index(torch.device(device))
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"Expected a device of torch for SingleDeviceStrategy, got device={device!r}: {error}",
                    fix='pass a device such as "cpu", "cuda:0" or torch.device("mps").',
                ) from None

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Move the module to the device and return it, not wrapped."""
        self.module_to_device(module)
        return module


def _with_index(device: torch.device) -> torch.device:
    """Return the device with its index, as `tensor.device` has it, so that the two can be compared."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type in ("cuda", "mps") and device.index is None:
        return torch.device(device.type, 0)
    return device
