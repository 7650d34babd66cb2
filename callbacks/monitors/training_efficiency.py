"""`TrainingEfficiency`: rates, FLOPs, MFU, memory and cost of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ...accelerators.usage import peak_memory_bytes, synchronize
from ...errors import ConfigError
from ...fabric.compiling import compiled_parts
from ...fabric.peak_flops import get_available_flops, measure_peak_flops, mfu
from ...fabric.throughput import Counts, per_second
from ...planning.formulas import chinchilla_tokens, dense_flops_per_token
from ..base import AnyModule, Callback
from ..summary.summary import count_elements
from .measuring import LogSteps

if TYPE_CHECKING:
    from ...accelerators import Accelerator
    from ...protocols import AnyBatch, AnyOutput, StateDict
    from ...trainer import Trainer

__all__ = ["TrainingEfficiency"]


class TrainingEfficiency(Callback):
    """Log these values under `efficiency/` at each log boundary, and for the full fit in `summary`, on rank 0:

    ============================  ======================================================================================
    samples_per_sec               of all devices, over the steps since the last log boundary, without validation
    tokens_per_sec                if `tokens_fn` counts tokens
    flops_per_sec                 model FLOPs of all devices
    mfu                           flops_per_sec as a fraction of the devices' peak
    memory_peak_bytes             of rank 0's device; of its process on a CPU
    memory_utilization            memory_peak_bytes as a fraction of the device's memory, on GPUs
    gpu_utilization               fraction of time in which rank 0's GPU is busy, at log boundaries (needs nvidia-ml-py)
    seconds                       of wall clock since training began, including validation and earlier runs
    cost                          of the run until now, with `price_per_hour`; cost_per_sample,
                                  cost_per_million_samples, cost_per_million_tokens
    chinchilla_fraction           tokens so far, as a fraction of 20 per parameter
    ============================  ======================================================================================

    `summary` also has the timeline's fractions of the fit: `time_in_data_loading` (with transfers to the device),
    `time_in_forward`, `time_in_backward` and `time_in_communication`; its `gpu_utilization` is the mean of readings.

    torch counts the FLOPs of matrix products and convolutions during the first micro-batch, forward and backward: no
    pass is added, and training computes the same numbers. `flops="6n"` estimates 6 per trained parameter and token (or
    per sample, without `tokens_fn`). For compiled modules, whose operations cannot be counted, FLOPs are estimated.

    Rank 0's samples and tokens are multiplied by the number of ranks that read different data. It waits for the device
    at log boundaries only. A resumed run continues the totals.

    Args:
        tokens_fn: Function that returns the number of tokens in a batch: an int, or a tensor that stays on the device.
        batch_size_fn: Function that returns the number of samples in a batch; None determines it as the Trainer does.
        flops: Source of FLOPs: "count", "6n", or a number of FLOPs per sample; None for no FLOPs.
        peak_flops: Peak FLOP/s of one device. "auto" is the usual figure of a known chip; "measure" times a large
            matrix product before training (0.2 s), and also works on a CPU.
        price_per_hour: Price of one device for an hour, in any currency; None for no cost.
        verbose: Whether to print the summary at the end of fit, on rank 0.

    Attributes:
        summary: Values of the full training, after fit.

    Raises:
        ConfigError: An argument is invalid.
    """

    hears_every_step = True

    def __init__(
        self,
        tokens_fn: Callable[[AnyBatch], int | Tensor] | None = None,
        *,
        batch_size_fn: Callable[[AnyBatch], int] | None = None,
        flops: Literal["count", "6n"] | float | None = "count",
        peak_flops: Literal["auto", "measure"] | float | None = "auto",
        price_per_hour: float | None = None,
        verbose: bool = True,
    ) -> None:
        problems = []
        if isinstance(flops, str) and flops not in ("count", "6n"):
            problems.append(f"flops={flops!r} is not 'count', '6n' or a number")
        if isinstance(peak_flops, str) and peak_flops not in ("auto", "measure"):
            problems.append(f"peak_flops={peak_flops!r} is not 'auto', 'measure' or a number")
        for name, value in (("flops", flops), ("peak_flops", peak_flops), ("price_per_hour", price_per_hour)):
            if isinstance(value, int | float) and value <= 0:
                problems.append(f"{name}={value} is not above 0")
        if problems:
            raise ConfigError(f"TrainingEfficiency: {'; '.join(problems)}.", fix="change these arguments.")
        self.tokens_fn = tokens_fn
        self.batch_size_fn = batch_size_fn
        self.flops = flops
        self.peak_flops = peak_flops
        self.price_per_hour = price_per_hour
        self.verbose = verbose
        self.summary: dict[str, float] = {}
        self.flops_per_sample: float | None = flops if isinstance(flops, int | float) else None
        self._lw_totals = {"samples": 0.0, "tokens": 0.0, "seconds": 0.0, "training_seconds": 0.0}
        self._lw_busy = {"sum": 0.0, "readings": 0.0}  # of the GPU's utilization
        self._lw_counter: Any = None  # Any: torch's FLOP counter, imported where it is used
        self._lw_is_to_count = self._lw_is_counting = False
        self._lw_log_steps = LogSteps()
        self._lw_counts: Counts | None = None  # since the last reading; None where nothing is measured
        self._lw_peak: float | None = None
        self._lw_parameters = 0
        self._lw_replicas = self._lw_devices = 1

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint: the arguments distinguish instances."""
        return self._generate_state_key(flops=self.flops, price_per_hour=self.price_per_hour)

    # --- training ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Determine the peak and start the clock."""
        if not trainer.is_global_zero:
            return
        device = trainer.fabric.device
        self._lw_devices = trainer.world_size
        self._lw_replicas = trainer.strategy.topology.data_size
        self._lw_peak = self._lw_find_peak(trainer) if self.flops is not None else None
        self._lw_parameters = sum(count_elements(one) for one in pl_module.parameters() if one.requires_grad)
        self._lw_log_steps.start(trainer)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._lw_is_to_count = self.flops == "count" and self.flops_per_sample is None and not compiled_parts(pl_module)
        self._lw_counts = Counts(self.batch_size_fn or trainer._lw_batch_size_of, self.tokens_fn)
        synchronize(device)
        self._lw_counts.start()

    def _lw_find_peak(self, trainer: Trainer) -> float | None:
        if not isinstance(self.peak_flops, str):
            return self.peak_flops
        dtype = trainer.precision_plugin.policy.compute_dtype
        if self.peak_flops == "measure":
            return measure_peak_flops(trainer.fabric.device, dtype)
        return get_available_flops(trainer.fabric.device, dtype)

    def on_train_batch_start(self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int) -> None:
        """Start to count FLOPs, at the first micro-batch."""
        if self._lw_counts is not None and self._lw_is_to_count:
            self._lw_is_to_count = False
            self._lw_counter = FlopCounterMode(display=False)
            self._lw_counter.__enter__()
            self._lw_is_counting = True

    def on_after_backward(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """End the count. In manual optimization, where a step may have several passes, it ends with the batch."""
        if self._lw_is_counting and getattr(pl_module, "automatic_optimization", True):
            self._lw_is_counting = False
            self._lw_counter.__exit__(None, None, None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Count samples and tokens; log at log boundaries."""
        if self._lw_counts is None:
            return
        if batch is not None:
            size = self._lw_counts.add(batch)
            if self._lw_counter is not None:
                self._lw_end_count(size)
        if self._lw_log_steps.is_due(trainer, trainer.log_every_n_steps):
            self._lw_log(trainer, self._lw_counts)

    def _lw_end_count(self, size: int) -> None:
        counter, self._lw_counter = self._lw_counter, None
        if self._lw_is_counting:
            self._lw_is_counting = False
            counter.__exit__(None, None, None)
        if counter.get_total_flops() and size:
            self.flops_per_sample = counter.get_total_flops() / size

    def _lw_read(self, trainer: Trainer, counts: Counts) -> tuple[float, float, float]:
        """Add what was counted since the last time to the totals; return samples, tokens and seconds of it."""
        seconds = counts.seconds(trainer.fabric.device)  # a log boundary: the values of the step are read anyway
        before = self._lw_totals
        self._lw_totals = self._lw_with(counts)
        counts.start()
        return self._lw_totals["samples"] - before["samples"], self._lw_totals["tokens"] - before["tokens"], seconds

    def _lw_with(self, counts: Counts) -> dict[str, float]:
        """Return the totals with these counts; waits for the device where it counts the tokens."""
        totals = self._lw_totals
        return {
            "samples": totals["samples"] + counts.samples * self._lw_replicas,
            "tokens": totals["tokens"] + float(counts.items) * self._lw_replicas,
            "seconds": totals["seconds"] + counts.clock.wall_s(),
            "training_seconds": totals["training_seconds"] + counts.clock.running_s(),
        }

    def _lw_log(self, trainer: Trainer, counts: Counts) -> None:
        metrics = self._lw_rates(*self._lw_read(trainer, counts))
        metrics.update(self._lw_overall(trainer))
        if (busy := _utilization(trainer.accelerator, trainer.fabric.device)) is not None:
            metrics["gpu_utilization"] = busy
            self._lw_busy = {"sum": self._lw_busy["sum"] + busy, "readings": self._lw_busy["readings"] + 1}
        trainer.log_metrics({f"efficiency/{name}": value for name, value in metrics.items()})

    def _lw_rates(self, samples: float, tokens: float, seconds: float) -> dict[str, float]:
        if seconds <= 0:
            return {}
        counts = {"samples": samples}
        if self.tokens_fn is not None:
            counts["tokens"] = tokens
        flops = self._lw_flops_of(samples, tokens)
        if flops is None:
            return per_second(counts, seconds)
        share = mfu(flops, seconds, self._lw_peak and self._lw_peak * self._lw_devices)
        return {**per_second({**counts, "flops": flops}, seconds), **({} if share is None else {"mfu": share})}

    def _lw_flops_of(self, samples: float, tokens: float) -> float | None:
        if self.flops is None:
            return None
        if self.flops_per_sample is not None:
            return self.flops_per_sample * samples
        return dense_flops_per_token(self._lw_parameters) * (samples if self.tokens_fn is None else tokens)

    def _lw_overall(self, trainer: Trainer) -> dict[str, float]:
        totals = self._lw_totals
        peak = peak_memory_bytes(trainer.fabric.device)
        metrics = {"seconds": totals["seconds"], **({} if peak is None else {"memory_peak_bytes": float(peak)})}
        memory = trainer.accelerator.device_memory(trainer.fabric.device)
        if peak is not None and memory:
            metrics["memory_utilization"] = peak / memory
        if self.tokens_fn is not None and self._lw_parameters:
            metrics["chinchilla_fraction"] = totals["tokens"] / chinchilla_tokens(self._lw_parameters)
        if self.price_per_hour is not None:
            cost = metrics["cost"] = totals["seconds"] / 3600 * self.price_per_hour * self._lw_devices
            if totals["samples"]:
                metrics["cost_per_sample"] = cost / totals["samples"]
                metrics["cost_per_million_samples"] = cost / totals["samples"] * 1e6
            if totals["tokens"]:
                metrics["cost_per_million_tokens"] = cost / totals["tokens"] * 1e6
        return metrics

    # --- around it ---------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Stop the clock of training."""
        if self._lw_counts is not None and not trainer.sanity_checking:
            self._lw_counts.pause(trainer.fabric.device)

    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Continue with the clock of training."""
        if self._lw_counts is not None and not trainer.sanity_checking:
            self._lw_counts.resume(trainer.fabric.device)

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Set `summary`, and print it if `verbose`."""
        if self._lw_counts is None:
            return
        self._lw_read(trainer, self._lw_counts)
        self._lw_counts = None
        totals = self._lw_totals
        self.summary = {"samples": totals["samples"], **self._lw_rates(totals["samples"], totals["tokens"],
                                                                    totals["training_seconds"])}  # fmt: skip
        if self.tokens_fn is not None:
            self.summary.update(tokens=totals["tokens"], chinchilla_tokens=chinchilla_tokens(self._lw_parameters))
        flops = self._lw_flops_of(totals["samples"], totals["tokens"])
        if flops is not None:
            self.summary["flops"] = flops
        if self.flops_per_sample is not None:
            self.summary["flops_per_sample"] = self.flops_per_sample
        self.summary.update(self._lw_overall(trainer))
        if self._lw_busy["readings"]:
            self.summary["gpu_utilization"] = self._lw_busy["sum"] / self._lw_busy["readings"]
        self.summary.update(_times(trainer.timeline.seconds()))
        if self.verbose:
            width = max(map(len, self.summary))
            rows = [f"  {name:<{width}}  {value:,.6g}" for name, value in self.summary.items()]
            trainer.print("\n".join(["Efficiency", *rows]))

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """End a FLOP count that is in progress."""
        if self._lw_counter is not None:
            self._lw_end_count(0)
        self._lw_counts = None

    def forget_run(self) -> None:
        """Reset the totals."""
        self._lw_totals, self.summary = dict.fromkeys(self._lw_totals, 0.0), {}
        self._lw_busy = dict.fromkeys(self._lw_busy, 0.0)

    def state_dict(self) -> StateDict:
        """Return the totals, including the batches since the last log boundary."""
        totals = dict(self._lw_totals) if self._lw_counts is None else self._lw_with(self._lw_counts)
        return {
            "totals": totals,
            "busy": dict(self._lw_busy),
            "flops_per_sample": self.flops_per_sample,
            "summary": dict(self.summary),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with the totals of the earlier run."""
        self._lw_totals.update(state_dict["totals"])
        self._lw_busy.update(state_dict.get("busy", {}))  # which earlier checkpoints do not have
        self.summary = dict(state_dict["summary"])  # where fit ran in other processes, this brings it back
        if self.flops_per_sample is None:
            self.flops_per_sample = state_dict["flops_per_sample"]


def _utilization(accelerator: Accelerator, device: torch.device) -> float | None:
    """Return the fraction of time in which a GPU was busy in the last second, or so; None if it is unknown."""
    if device.type == "cpu":
        return None
    busy = accelerator.get_device_stats(device).get("utilization_percent")
    return None if busy is None else busy / 100


def _times(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the fractions of phases in a timeline."""
    total = sum(seconds.values())
    phases = {
        "data_loading": ("data", "transfer"),
        "forward": ("forward",),
        "backward": ("backward",),
        "communication": ("communication",),
    }
    return {f"time_in_{name}": sum(seconds[one] for one in parts) / total for name, parts in phases.items() if total}
