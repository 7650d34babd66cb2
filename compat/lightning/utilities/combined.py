"""`CombinedLoader` and `move_data_to_device` with what Lightning has besides."""

from __future__ import annotations

from typing import Any

import torch

from ....data import CombinedLoader, move_to_device
from ..patch import extend

__all__ = ["CombinedLoader", "move_data_to_device"]

# Any in this file: batches of any form.


# In place, because a Trainer makes such loaders itself, which programs look for by this class.
extend(CombinedLoader, "_mode", property(lambda loader: loader.mode))
extend(CombinedLoader, "_iterator", property(lambda loader: loader._latest))


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Return a batch with every tensor in it on a device; see `lw.data.move_to_device`.

    Args:
        batch: Any nesting of tensors.
        device: The device, its name, or the number of a GPU.
    """
    return move_to_device(batch, torch.device(device))
