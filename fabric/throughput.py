"""Samples, tokens and FLOPs per second over a moving window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import ConfigError
from .peak_flops import get_available_flops

if TYPE_CHECKING:
    from .fabric import Fabric

__all__ = ["Throughput", "ThroughputMonitor", "measure_flops"]


class _Reading(NamedTuple):
    time: float
    batches: int
    samples: int
    lengths: int | None


class Throughput:
    """Convert running totals into rates over the last `window_size` readings.

    Rates with the prefix `device` are for this device. Rates without it are for all devices, assume that all are
    equally fast, and are present only with several devices.

    Args:
        available_flops: Peak FLOP/s of one device, for `device/mfu`; None omits that rate.
        world_size: Number of devices.
        window_size: Number of readings in the window, at least 2.
        separator: Separator between the parts of a key.
        copies: Number of devices that work on the same samples, as along a tensor parallel axis; a divisor of
            `world_size`. What these have counted is what they did together: FLOPs are divided by their number.

    Raises:
        ConfigError: `window_size` is below 2, or `world_size` below 1.
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
        copies: int = 1,
    ) -> None:
        if window_size < 2 or world_size < 1:
            raise ConfigError(
                f"Expected window_size >= 2 and world_size >= 1 for Throughput, got window_size={window_size} and "
                f"world_size={world_size}.",
                fix="pass window_size=2 or more and world_size=1 or more.",
            )
        self.available_flops = available_flops
        self.world_size = world_size
        self.window_size = window_size
        self.separator = separator
        self.copies = copies
        self._readings: deque[_Reading] = deque(maxlen=window_size)
        self._flops: deque[float] = deque(maxlen=window_size)
        self._gives_lengths: bool | None = None

    def update(
        self,
        *,
        time: float,
        batches: int,
        samples: int,
        lengths: int | None = None,
        flops: float | None = None,
    ) -> None:
        """Add a reading. All arguments except `flops` are totals since the start.

        Args:
            time: Seconds.
            batches: Number of batches on this device.
            samples: Number of samples on this device.
            lengths: Number of items, such as tokens, on this device; given in all readings or in none.
            flops: FLOPs of this device since the last reading; None if unknown.

        Raises:
            ConfigError: A total did not increase, there are fewer samples than batches or fewer items than samples, or
                `lengths` is given in some readings but not in others.
        """
        gives_lengths = lengths is not None
        last = self._readings[-1] if self._readings else None
        problems = []
        if self._gives_lengths is not None and gives_lengths != self._gives_lengths:
            problems.append(
                f"lengths={lengths} differs from earlier readings, which "
                f"{'omitted' if gives_lengths else 'included'} it"
            )
        if last is not None:
            grown = {"time": (last.time, time), "batches": (last.batches, batches), "samples": (last.samples, samples)}
            if lengths is not None and last.lengths is not None:
                grown["lengths"] = (last.lengths, lengths)
            problems += [f"{name}={now} is not larger than its last value, {old}" for name, (old, now) in grown.items()
                         if now <= old]  # fmt: skip
        if samples < batches:
            problems.append(f"samples={samples} is less than batches={batches}")
        if lengths is not None and lengths < samples:
            problems.append(f"lengths={lengths} is less than samples={samples}")
        if problems:
            raise ConfigError(
                f"Expected consistent, increasing totals for Throughput.update: {'; '.join(problems)}.",
                fix="pass totals since the start of the run.",
            )
        self._gives_lengths = gives_lengths
        self._readings.append(_Reading(time, batches, samples, lengths))
        if flops is not None:
            self._flops.append(flops)

    def compute(self) -> dict[str, float]:
        """Return the totals and, once the window is full, the rates over it.

        Keys: time, batches, samples, lengths; device/batches_per_sec, device/samples_per_sec, device/items_per_sec,
        device/flops_per_sec, device/mfu; and, with several devices, batches_per_sec, samples_per_sec, items_per_sec and
        flops_per_sec of all devices.
        """
        if not self._readings:
            return {}
        first, last = self._readings[0], self._readings[-1]
        metrics: dict[str, float] = {"time": last.time, "batches": last.batches, "samples": last.samples}
        if last.lengths is not None:
            metrics["lengths"] = last.lengths
        if len(self._readings) < self.window_size:
            return metrics
        seconds = last.time - first.time
        rates = {
            "batches_per_sec": (last.batches - first.batches) / seconds,
            "samples_per_sec": (last.samples - first.samples) / seconds,
        }
        if last.lengths is not None and first.lengths is not None:
            rates["items_per_sec"] = (last.lengths - first.lengths) / seconds
        if len(self._flops) == self.window_size:
            # The first reading's FLOPs were spent before the window's time began.
            rates["flops_per_sec"] = (sum(self._flops) - self._flops[0]) / seconds / self.copies
        metrics.update({f"device{self.separator}{name}": rate for name, rate in rates.items()})
        if self.world_size > 1:
            replicas = self.world_size // self.copies
            factors = {"flops_per_sec": self.world_size}
            metrics.update({name: rate * factors.get(name, replicas) for name, rate in rates.items()})
        if "flops_per_sec" in rates and self.available_flops:
            metrics[f"device{self.separator}mfu"] = rates["flops_per_sec"] / self.available_flops
        return metrics

    def reset(self) -> None:
        """Discard all readings."""
        self._readings.clear()
        self._flops.clear()
        self._gives_lengths = None


class ThroughputMonitor(Throughput):
    """A `Throughput` for loops on Fabric: reads the devices from Fabric, and logs on rank 0.

    Args:
        fabric: A launched Fabric; the rates are logged to its loggers.
        window_size: See `Throughput`.
        separator: See `Throughput`.

    Attributes:
        step: x axis of the last logged rates; -1 before the first.
    """

    def __init__(self, fabric: Fabric, *, window_size: int = 100, separator: str = "/") -> None:
        super().__init__(
            get_available_flops(fabric.device, fabric.precision.policy.compute_dtype),
            fabric.world_size,
            window_size,
            separator,
            fabric.world_size // fabric.strategy.topology.data_size,
        )
        self.step = -1
        self._fabric = fabric

    def compute_and_log(self, step: int | None = None, **more: float) -> dict[str, float]:
        """Log `compute()` and additional numbers, and return them. Return an empty dict on ranks other than 0.

        Args:
            step: x axis; None uses the last one plus 1.
            more: Additional numbers to log.
        """
        self.step = self.step + 1 if step is None else step
        if self._fabric.global_rank > 0:
            return {}
        metrics = {**self.compute(), **more}
        self._fabric.log_dict(metrics, step=self.step)
        return metrics


def measure_flops(
    model: nn.Module,
    forward_fn: Callable[[], object],
    loss_fn: Callable[[object], Tensor] | None = None,
) -> int:
    """Return the number of floating-point operations of one call, as torch counts them: matrix products and
    convolutions.

    With a model on the meta device, nothing is computed.

    Args:
        model: The module.
        forward_fn: Runs the forward pass: `lambda: model(x)`.
        loss_fn: Computes a loss from the result of `forward_fn`; the backward pass is then counted as well. The model's
            gradients are not changed.
    """
    with FlopCounterMode(display=False) as counter:
        if loss_fn is None:
            with torch.no_grad():
                forward_fn()
        else:
            before = [(parameter, parameter.grad) for parameter in model.parameters()]
            for parameter, _ in before:
                parameter.grad = None
            try:
                loss_fn(forward_fn()).backward()
            finally:
                for parameter, gradient in before:
                    parameter.grad = gradient
    return int(counter.get_total_flops())
