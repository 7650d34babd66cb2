"""Current step values for the bar, between two log boundaries, where reading them does not wait for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .metrics import Metrics


class CurrentValues:
    """Reads the latest step values: on the CPU at once, from a CUDA device those whose copy is complete.

    Args:
        metrics: Where they are kept.

    Attributes:
        metrics: As given.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._seen: dict[str, float] = {}
        self._copy: tuple[dict[str, Tensor | float], Tensor, torch.cuda.Event] | None = None
        self._at = -1

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_copy": None, "_at": -1}

    def read(self) -> dict[str, float]:
        """Return the values; {} if they are those of the last log boundary, or are not available yet.

        With several ranks, a value is this rank's, and is omitted once the value of all ranks is known.
        """
        metrics = self.metrics
        kind = metrics.device.type
        if kind not in ("cpu", "cuda"):
            return {}
        values: dict[str, Tensor | float] = {}
        for key, accumulator in metrics.newest_steps().items():
            if not accumulator.prog_bar or metrics.table_of(accumulator.hook).stage != "train":
                continue
            if metrics.gather is not None and accumulator.step_key in metrics.progress_bar:
                continue
            if not accumulator.is_step_changed:
                values[key] = accumulator.step_value(metrics.device)
        if kind == "cpu":
            return {name: float(value) for name, value in values.items()}
        return self._from_device(values)

    def _from_device(self, values: dict[str, Tensor | float]) -> dict[str, float]:
        """Return the values that the last call began to copy, if the copy is complete, and begin to copy these."""
        window = self.metrics.window
        if self._copy is not None:
            names, host, event = self._copy
            if not event.query():
                return self._newer(values)
            numbers = iter(host.tolist())
            self._seen = {n: next(numbers) if isinstance(v, Tensor) else float(v) for n, v in names.items()}
            self._copy = None
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        if tensors and window != self._at:
            packed = torch.stack([one.detach().reshape(()).to(self.metrics.device, torch.float64) for one in tensors])
            host = torch.empty(len(tensors), dtype=torch.float64, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._copy, self._at = (values, host, event), window
        return self._newer(values)

    def _newer(self, values: dict[str, Tensor | float]) -> dict[str, float]:
        return {name: number for name, number in self._seen.items() if name in values}
