"""`ThroughputMonitor`: batches, samples and items per second of each stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import ModuleError
from ...fabric.peak_flops import get_available_flops
from ...fabric.throughput import Counts, Throughput
from ...messages import warn
from ..base import AnyModule, Callback, as_hook
from .measuring import LogSteps, is_evaluation_due

if TYPE_CHECKING:
    from ...protocols import AnyBatch, AnyOutput, StateDict
    from ...trainer import Trainer


class ThroughputMonitor(Callback):
    """Log `<stage>/device/samples_per_sec` and more (see `Throughput`) every `log_every_n_steps`, on rank 0.

    Validation inside fit is not part of the training time. A resumed run continues the totals of training.

    FLOPs require the attribute or property `flops_per_batch` of the module: FLOPs of one batch on one device, forward
    and backward in training; `measure_flops` counts them. It waits for the device at log boundaries only.

    Args:
        batch_size_fn: Function that returns the number of samples in a batch.
        length_fn: Function that returns the number of items (such as tokens) in a batch; None for no item rate.
        window_size: Number of batches that rates are averaged over.
        separator: Text between the parts of a key.

    Raises:
        ConfigError: The window is too small.
        ModuleError: A function returned something other than a positive integer.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[AnyBatch], int],
        length_fn: Callable[[AnyBatch], int] | None = None,
        *,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        super().__init__()
        Throughput(window_size=window_size)  # refuses what cannot be a window
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.window_size = window_size
        self.separator = separator
        self.available_flops: int | None = None
        self._lw_stages: dict[str, tuple[Throughput, Counts]] = {}
        self._lw_log_steps = LogSteps()
        self._lw_resumed: dict[str, float] = {}
        self._lw_has_warned = False
        self._lw_is_on = False

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint: the arguments distinguish instances."""
        return self._generate_state_key(window_size=self.window_size, separator=self.separator)

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Look up the device's peak; warn about a run without a logger."""
        if not trainer.loggers and not trainer.fast_dev_run:
            warn("ThroughputMonitor has no logger to write to, and does nothing: pass Trainer(logger=...)")
        self._lw_is_on = trainer.is_global_zero and bool(trainer.loggers) and bool(trainer.log_every_n_steps)
        precision = trainer.precision_plugin
        self.available_flops = get_available_flops(trainer.fabric.device, precision.policy.compute_dtype)
        self._lw_stages = {}

    # --- one stage -------------------------------------------------------------------------------------------------

    def _lw_start(self, trainer: Trainer, stage: str, elapsed_s: float = 0.0) -> None:
        if self._lw_is_on:
            size = trainer.world_size
            copies = size // trainer.strategy.topology.data_size
            throughput = Throughput(self.available_flops, size, self.window_size, self.separator, copies)
            counts = Counts(self._lw_samples_of, None if self.length_fn is None else self._lw_length_of)
            self._lw_stages[stage] = throughput, counts
            counts.clock.start(elapsed_s)

    def _lw_samples_of(self, batch: AnyBatch) -> int:
        return _checked("batch_size_fn", self.batch_size_fn(batch))

    def _lw_length_of(self, batch: AnyBatch) -> int:
        assert self.length_fn is not None
        return _checked("length_fn", self.length_fn(batch))

    def _lw_count(
        self, trainer: Trainer, pl_module: AnyModule, stage: str, batch: AnyBatch, *, is_logged: bool
    ) -> None:
        throughput, counts = self._lw_stages[stage]
        counts.add(batch)
        throughput.update(
            time=counts.seconds(trainer.fabric.device) if is_logged else counts.clock.running_s(),
            batches=counts.batches,
            samples=counts.samples,
            lengths=int(counts.items) if self.length_fn is not None else None,
            flops=self._lw_flops(pl_module),
        )

    def _lw_flops(self, pl_module: AnyModule) -> float | None:
        flops: float | None = getattr(pl_module, "flops_per_batch", None)
        if flops is None and not self._lw_has_warned:
            self._lw_has_warned = True
            warn(f"ThroughputMonitor: {type(pl_module).__name__} has no flops_per_batch; FLOPs and MFU are not logged")
        return flops

    def _lw_log(self, trainer: Trainer, stage: str, step: int | None) -> None:
        metrics = self._lw_stages[stage][0].compute()
        trainer.log_metrics({f"{stage}{self.separator}{name}": value for name, value in metrics.items()}, step)

    # --- training ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Start the clock, with the totals of earlier runs."""
        self._lw_start(trainer, "train", self._lw_resumed.get("time", 0.0))
        self._lw_log_steps.start(trainer)
        if self._lw_is_on and self._lw_resumed:
            counts, resumed = self._lw_stages["train"][1], self._lw_resumed
            counts.batches, counts.samples = int(resumed["batches"]), int(resumed["samples"])
            counts.items = int(resumed["lengths"])
        self._lw_resumed = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Count the batch; log at log boundaries."""
        if not self._lw_is_on:
            return
        is_logged = self._lw_log_steps.is_due(trainer, trainer.log_every_n_steps)
        self._lw_count(trainer, pl_module, "train", batch, is_logged=is_logged)
        if is_logged:
            self._lw_log(trainer, "train", None)

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Keep the totals for a later fit."""
        self._lw_resumed = self._lw_totals()

    def _lw_totals(self) -> dict[str, float]:
        if "train" not in self._lw_stages:
            return self._lw_resumed
        counts = self._lw_stages["train"][1]
        return {
            "time": counts.clock.running_s(),
            "batches": counts.batches,
            "samples": counts.samples,
            "lengths": int(counts.items),
        }

    # --- evaluation --------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Pause the clock of training."""
        if "train" in self._lw_stages:
            self._lw_stages["train"][1].clock.pause()
        if not trainer.sanity_checking:
            self._lw_start(trainer, "validate")

    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Continue with the clock of training."""
        if "train" in self._lw_stages:
            self._lw_stages["train"][1].clock.resume()

    def _lw_begin(self, stage: str, trainer: Trainer, pl_module: AnyModule) -> None:
        """Start the clock of a stage."""
        self._lw_start(trainer, stage)

    def _lw_evaluated(
        self,
        stage: str,
        trainer: Trainer,
        pl_module: AnyModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch."""
        if not self._lw_is_on or trainer.sanity_checking:
            return
        # The x axis is that of step values of an evaluation: batches ever evaluated.
        if stage == "predict":
            done = self._lw_stages[stage][1].batches
            is_logged = (done + 1) % trainer.log_every_n_steps == 0
        else:
            done, is_logged = trainer.progress.eval_batches, is_evaluation_due(trainer)
        self._lw_count(trainer, pl_module, stage, batch, is_logged=is_logged)
        if is_logged:
            self._lw_log(trainer, stage, done)

    on_test_start, on_predict_start = as_hook(_lw_begin, "test"), as_hook(_lw_begin, "predict")
    on_validation_batch_end = as_hook(_lw_evaluated, "validate")
    on_test_batch_end = as_hook(_lw_evaluated, "test")
    on_predict_batch_end = as_hook(_lw_evaluated, "predict")

    def forget_run(self) -> None:
        """Reset the totals."""
        self._lw_stages, self._lw_resumed = {}, {}

    def state_dict(self) -> StateDict:
        """Return the totals of training."""
        totals = self._lw_totals()
        return {"train": totals} if totals else {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with the totals of the earlier run."""
        self._lw_resumed = dict(state_dict.get("train", {}))


def _checked(name: str, number: int) -> int:
    if isinstance(number, int) and not isinstance(number, bool) and number > 0:
        return number
    raise ModuleError(
        f"ThroughputMonitor: {name} returned {number!r}, expected an integer above 0.",
        fix="return a size that the host knows, such as batch[0].shape[0].",
    )
