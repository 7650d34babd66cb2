"""Grouping of micro-batches into accumulation windows of one optimizer step each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..messages import warn
from .wrappers import FabricOptimizer


class Reader(Protocol):
    """A loader that can report how many batches are left in its pass."""

    def batches_left(self, upto: int) -> int:
        """Return the number of batches after the most recent one, at most `upto`."""
        ...


@dataclass(slots=True, eq=False)
class Window:
    """The micro-batches of one optimizer step.

    Attributes:
        models: The models whose gradients are accumulated.
        size: Planned number of micro-batches; each loss is divided by it.
        index: Number of the current micro-batch, from 1.
        is_last: Whether the current micro-batch is the last, in which gradients are reduced and the optimizer steps.
        has_gradients: Whether a backward pass was run, so that `zero_grad` would discard accumulated gradients.
    """

    models: tuple[nn.Module, ...]
    size: int
    index: int = 0
    is_last: bool = False
    has_gradients: bool = False


class Accumulation:
    """The windows of one Fabric: one for each model, or group of models, that is accumulated separately."""

    def __init__(self) -> None:
        self._windows: dict[tuple[int, ...], Window] = {}

    def next_batch(self, models: tuple[nn.Module, ...], steps: object, reader: Reader | None) -> Window:
        """Count one micro-batch and return its window.

        If the data ends within a window, its losses are divided by the actual number of micro-batches. If the end is
        not known in advance, the accumulated gradients are scaled up instead.

        Args:
            models: The models whose gradients are accumulated.
            steps: Number of micro-batches per window.
            reader: The current loader, if Fabric set it up. Without one, windows are never shortened.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(
                f"Expected steps of Fabric.accumulate to be an integer >= 1, got steps={steps!r}.",
                fix="pass the number of micro-batches per optimizer step.",
            )
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

    def refuse_save(self, optimizers: Sequence[FabricOptimizer]) -> None:
        """Raise an error if a window's gradients are still to be used by one of the optimizers that are saved.

        Raises:
            ConfigError: See above. A resumed run would lack these gradients.
        """
        for window in self._windows.values():
            own = {id(parameter) for model in window.models for parameter in model.parameters()}
            steps = [
                optimizer.__dict__["_done"] is window
                for optimizer in optimizers
                if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
            ]
            if window.has_gradients and steps and not any(steps):
                raise ConfigError(
                    "Expected Fabric.save between accumulation windows, got a call after "
                    f"{window.index} of {window.size} micro-batches, before the optimizer's step. The gradients that "
                    "are accumulated are not saved, so a resumed run would lack them.",
                    fix="save after optimizer.step(), where fabric.sync_gradients is True.",
                )

    def forget(self, window: Window) -> None:
        """Start a new window with the next micro-batch of these models."""
        self._windows.pop(tuple(map(id, window.models)), None)


def refuse_within_window(
    state: Mapping[str, object], accumulation: Accumulation | None, *, is_accumulating: bool
) -> None:
    """Raise or warn if an optimizer is saved while gradients wait for its step.

    Args:
        state: The objects to save.
        accumulation: The windows of `Fabric.accumulate`; None without any.
        is_accumulating: Whether gradients were added under `Fabric.no_backward_sync` since the last step.

    Raises:
        ConfigError: See `Accumulation.refuse_save`.
    """
    optimizers = [obj for obj in state.values() if issubclass(type(obj), FabricOptimizer)]  # see its __class__
    if accumulation is not None:
        accumulation.refuse_save(cast(Sequence[FabricOptimizer], optimizers))
    if is_accumulating and optimizers:
        warn(
            "Fabric.save was called between fabric.no_backward_sync and the optimizer's step. The gradients that "
            "are accumulated are not saved, so a resumed run lacks them: save after optimizer.step()."
        )


def _scale_gradients(models: Sequence[nn.Module], factor: float) -> None:
    gradients: list[Tensor] = [p.grad for model in models for p in model.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
