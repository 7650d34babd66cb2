"""One process on one XLA device: one core of a TPU, or XLA on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...errors import ConfigError
from .process import XLAProcessStrategy

if TYPE_CHECKING:
    from ...accelerators import Accelerator
    from ...precision import Precision
    from ...protocols import CheckpointPlugin


class SingleDeviceXLAStrategy(XLAProcessStrategy):
    """One process on one device of XLA's runtime; every collective returns its argument.

    Args:
        device: The device, such as "xla:0"; an int is its index. None is the first one in `devices=`.

    Raises:
        ConfigError: The device is not an XLA device.
    """

    strategy_name = "single_xla"

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        *,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin, debug=debug, precision=precision)
        if device is not None:
            self._lw_device = _xla_device(device)


def _xla_device(device: torch.device | str | int) -> torch.device:
    try:
        found = torch.device("xla", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _no_xla_device(device) from error
    if found.type != "xla":
        raise _no_xla_device(device)
    return torch.device("xla", found.index or 0)


def _no_xla_device(device: object) -> ConfigError:
    return ConfigError(
        f"Expected device to be an XLA device, got {device!r}.",
        fix='pass device="xla:0", an index, or nothing.',
    )
