"""`CombinedLoader` and `move_data_to_device` with what Lightning has besides."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from ....data import combined, move_to_device, tree
from ..imports.finder import LightningFinder
from ..imports.served import Served
from ..patch import patch

__all__ = ["CombinedLoader", "move_data_to_device"]

# Any in this file: batches of any form.


class CombinedLoader(combined.CombinedLoader, metaclass=Served):
    """`lw.data.CombinedLoader` with its mode and its present iteration."""

    @property
    def _mode(self) -> str:
        return self.mode

    @property
    def _iterator(self) -> Iterator[tuple[Any, int, int]] | None:
        return self._latest


def _holds_loader(item: Any) -> bool:
    """Return what the core says, and True for a list of numbers or texts: in a collection, it is a loader."""
    is_plain = isinstance(item, list | tuple) and item and all(isinstance(one, int | float | str) for one in item)
    if is_plain and any(isinstance(finder, LightningFinder) for finder in sys.meta_path):
        return True
    return _holds_loader_beyond_doubt(item)


# In a list of lists of numbers, Loopwright sees the batches of one loader.
_holds_loader_beyond_doubt = tree._holds_loader
patch(tree, "_holds_loader", _holds_loader)


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Return a batch with every tensor in it on a device; see `lw.data.move_to_device`.

    Args:
        batch: Any nesting of tensors.
        device: The device, its name, or the number of a GPU.
    """
    return move_to_device(batch, torch.device(device))
