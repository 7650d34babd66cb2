"""Logged values, as programs for Lightning read them."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from ...data.move import find_batch_size
from ...trainer.metrics.accumulators import ScalarAccumulator
from ...trainer.metrics.metrics import Metrics

__all__ = ["LightningMetrics"]


class LightningMetrics(Metrics):
    """Weighs a value by the first tensor of a batch whose tensors disagree about its size, as Lightning does.

    Attributes:
        shows_first_key: Whether a value that has several keys for the bar is shown under the first one only.
    """

    shows_first_key = False

    @override
    def show(self, number: float, *keys: str | None) -> None:
        """Keep a number for the bar."""
        super().show(number, *(keys[:1] if self.shows_first_key else keys))

    @override
    def weight_of(self, accumulator: ScalarAccumulator) -> float:
        """Return the samples of the present batch, by its first tensor where its tensors disagree."""
        if self.batch is not None and self.sized is not self.batch:
            size = find_batch_size(self.batch)
            self.size = _first_size(self.batch) if size is None else size
            self.sized = self.batch
        return super().weight_of(accumulator)

    def keys_without_logger(self, *stages: str) -> set[str]:
        """Return the keys that were logged with `logger=False` in these stages."""
        found = (one for stage in stages for one in self.accumulators(stage))
        return {key for one in found if not one.logger for key in one.keys}

    def waiting_for_loggers(self) -> dict[str, Tensor]:
        """Return the latest values of keys that are sent to loggers, including values not sent yet."""
        found = {}
        sent = [one for stage in ("train", "validation", "test") for one in self.accumulators(stage) if one.logger]
        for accumulator in sorted(sent, key=lambda one: one.window):
            if accumulator.on_epoch and accumulator.epoch_key in self.results:
                found[accumulator.epoch_key] = self.results[accumulator.epoch_key]
            key = accumulator.step_key
            if accumulator.step_values and accumulator.window > self.result_windows.get(key, -1):
                value = accumulator.step_value(self.device)
                found[key] = torch.as_tensor(value, device=self.device).detach().reshape(())
        return found


def _first_size(batch: object) -> int | None:
    """Return the first dimension of the first tensor in a batch, None if there is no tensor."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((size for item in items if (size := _first_size(item)) is not None), None)
