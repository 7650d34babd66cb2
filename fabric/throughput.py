"""Samples, tokens and FLOPs per second: counts, elapsed time, and rates over a moving window."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..accelerators.usage import synchronize
from ..errors import ConfigError
from .peak_flops import get_available_flops, measure_flops, mfu

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..protocols import AnyBatch
    from .fabric import Fabric

__all__ = ["Clock", "Counts", "Throughput", "ThroughputMonitor", "measure_flops", "per_second"]


class Clock:
    """Seconds since a start, with and without pauses."""

    def __init__(self) -> None:
        self._began_s = self._paused_s = 0.0
        self._paused_at_s: float | None = None

    def start(self, elapsed_s: float = 0.0) -> None:
        """Start the clock at this number of elapsed seconds."""
        self._began_s, self._paused_s, self._paused_at_s = time.perf_counter() - elapsed_s, 0.0, None

    def pause(self) -> None:
        """Stop counting."""
        self._paused_at_s = time.perf_counter()

    def resume(self) -> None:
        """Continue counting, if the clock is paused."""
        if self._paused_at_s is not None:
            self._paused_s += time.perf_counter() - self._paused_at_s
            self._paused_at_s = None

    def running_s(self) -> float:
        """Return the seconds since the start, without pauses."""
        now_s = time.perf_counter() if self._paused_at_s is None else self._paused_at_s
        return now_s - self._began_s - self._paused_s

    def wall_s(self) -> float:
        """Return the seconds since the start, pauses included."""
        return time.perf_counter() - self._began_s


class Counts:
    """Batches, samples and items that this rank has read since a start, and the elapsed time.

    Args:
        samples_of: Function that returns the number of samples of a batch; None is taken as 0.
        items_of: Function that returns the number of items (such as tokens) of a batch: an int, or a tensor of shape
            (), which stays on its device. None: not counted.

    Attributes:
        clock: Runs since the start.
        batches: Number of batches.
        samples: Number of samples.
        items: Number of items.
    """

    def __init__(
        self, samples_of: Callable[[Any], int | None], items_of: Callable[[Any], int | Tensor] | None = None
    ) -> None:
        self.clock = Clock()
        self.batches = self.samples = 0
        self.items: int | Tensor = 0
        self._samples_of, self._items_of = samples_of, items_of

    def start(self) -> None:
        """Reset the counts to 0 and start the clock."""
        self.batches = self.samples = self.items = 0
        self.clock.start()

    def add(self, batch: AnyBatch) -> int:
        """Count a batch; return its number of samples."""
        size = self._samples_of(batch) or 0
        self.batches += 1
        self.samples += size
        if self._items_of is not None:
            self.items = self.items + self._items_of(batch)
        return size

    def seconds(self, device: torch.device) -> float:
        """Wait for the device, and return the seconds since the start, without pauses."""
        synchronize(device)
        return self.clock.running_s()

    def pause(self, device: torch.device) -> None:
        """Wait for the device, and stop the clock."""
        synchronize(device)
        self.clock.pause()

    def resume(self, device: torch.device) -> None:
        """Wait for the device, and let the clock continue."""
        synchronize(device)
        self.clock.resume()


def per_second(counts: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return `<name>_per_sec` of each count; 0 without time."""
    return {f"{name}_per_sec": count / seconds if seconds > 0 else 0.0 for name, count in counts.items()}


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
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: float | None = None
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
        counts: dict[str, float] = {"batches": last.batches - first.batches, "samples": last.samples - first.samples}
        if last.lengths is not None and first.lengths is not None:
            counts["items"] = last.lengths - first.lengths
        if len(self._flops) == self.window_size:
            # The first reading's FLOPs were spent before the window's time began.
            counts["flops"] = (sum(self._flops) - self._flops[0]) / self.copies
        rates = per_second(counts, seconds)
        metrics.update({f"device{self.separator}{name}": rate for name, rate in rates.items()})
        if self.world_size > 1:
            replicas = self.world_size // self.copies
            factors = {"flops_per_sec": self.world_size}
            metrics.update({name: rate * factors.get(name, replicas) for name, rate in rates.items()})
        share = mfu(counts["flops"], seconds, self.available_flops) if "flops" in counts else None
        if share is not None:
            metrics[f"device{self.separator}mfu"] = share
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
