"""Counting micro-batches into windows of one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import ConfigError

__all__ = ["Accumulation", "Reader", "Window"]


class Reader(Protocol):
    """A loader that knows how much of its pass is left."""

    def batches_left(self, upto: int) -> int:
        """Return how many batches come after the one that was given last, at most `upto`."""
        ...


@dataclass(slots=True, eq=False)
class Window:
    """The micro-batches of one optimizer step.

    Attributes:
        models: Whose gradients are accumulated.
        size: Micro-batches that are planned: a loss counts as one part of that number.
        index: The micro-batch under way, from 1.
        is_last: Whether the micro-batch under way is the last: gradients are reduced and the optimizer steps.
        has_gradients: Whether a backward pass was made: `zero_grad` would drop what was accumulated.
    """

    models: tuple[nn.Module, ...]
    size: int
    index: int = 0
    is_last: bool = False
    has_gradients: bool = False


class Accumulation:
    """The windows of one Fabric: one for each model, or group of models, that is accumulated by itself."""

    def __init__(self) -> None:
        self._windows: dict[tuple[int, ...], Window] = {}

    def next_batch(self, models: tuple[nn.Module, ...], steps: object, reader: Reader | None) -> Window:
        """Count one micro-batch, and return the window that it belongs to.

        A window that the end of the data cuts short is known in time: its losses count as one part in as many as it
        really has. Where the end is seen only when it comes, the gradients that are there are scaled up.

        Args:
            models: Whose gradients are accumulated.
            steps: Micro-batches of a window.
            reader: The loader under way, if it is one of Fabric's; without one, windows are never cut short.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"Fabric.accumulate was given steps={steps!r}.", fix="pass a whole number of 1 or more.")
        key = tuple(map(id, models))
        window = self._windows.get(key)
        if window is None or window.is_last:
            left = steps if reader is None else reader.batches_left(steps)
            window = self._windows[key] = Window(models, min(steps, left + 1))
        window.index += 1
        window.is_last = window.index >= window.size
        if not window.is_last and reader is not None and not reader.batches_left(1):
            _scale_gradients(models, window.size / window.index)
            window.size, window.is_last = window.index, True
        return window

    def forget(self, window: Window) -> None:
        """Start again with the next micro-batch of these models."""
        self._windows.pop(tuple(map(id, window.models)), None)


def _scale_gradients(models: Sequence[nn.Module], factor: float) -> None:
    gradients: list[Tensor] = [p.grad for model in models for p in model.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
