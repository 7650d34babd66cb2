"""`CombinedLoader` and `move_data_to_device` with Lightning's additions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ....data import combined, move_to_device
from ..imports.served import Served

__all__ = ["CombinedLoader", "move_data_to_device", "with_plain_loaders"]

# Any in this file: batches of any form.


class CombinedLoader(combined.CombinedLoader, metaclass=Served):
    """`lw.data.CombinedLoader` with its mode and its current iteration."""

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        super().__init__(with_plain_loaders("", iterables), mode)

    @property
    def _mode(self) -> str:
        return self.mode

    @property
    def _iterator(self) -> Iterator[tuple[Any, int, int]] | None:
        return self._latest


class _PlainLoader:
    """A list of numbers or texts as a loader, whose batches they are.

    Args:
        batches: The list.
    """

    def __init__(self, batches: list[Any] | tuple[Any, ...]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def with_plain_loaders(stage: str, loaders: Any) -> Any:
    """Return a collection in which lists of numbers or texts are loaders: Loopwright sees one loader in a list of them.

    Args:
        stage: Whose loaders they are.
        loaders: What the program passed or made.
    """
    if not isinstance(loaders, list | tuple) or hasattr(loaders, "_fields"):
        return loaders
    if not all(_is_plain(item) or not isinstance(item, int | float | str | torch.Tensor) for item in loaders):
        return loaders
    return type(loaders)(_PlainLoader(item) if _is_plain(item) else with_plain_loaders(stage, item) for item in loaders)


def _is_plain(item: Any) -> bool:
    return isinstance(item, list | tuple) and bool(item) and all(isinstance(one, int | float | str) for one in item)


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Return a batch with every tensor in it on a device; see `lw.data.move_to_device`.

    Args:
        batch: Any nesting of tensors.
        device: The device, its name, or the number of a GPU.
    """
    return move_to_device(batch, torch.device(device))
