"""`XLAStatsMonitor`: counters of XLA's compilations, executions, device reads and CPU fallbacks."""

from __future__ import annotations

import logging
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ..base import AnyModule, Callback

if TYPE_CHECKING:
    from ...protocols import AnyBatch, AnyOutput
    from ...trainer import Trainer

logger = logging.getLogger(__name__)

_NS_PER_S = 1e9
_RUNS = ("ExecuteComputation", "ExecuteReplicated")


class XLAStatsMonitor(Callback):
    """Log torch_xla's counters at the steps that the Trainer logs, on rank 0, without waiting for the device.

    Keys, after `XLAStatsMonitor/`: `compiled_graphs` and `compile_s` since the process began; `executions`; `reads`
    (`.item()` and the like); `fallbacks` (operations that XLA lacks and the CPU computed); and the accelerator's memory
    if the runtime reports it. Each read and each fallback waits for the device. Compilations at every step mean that
    shapes or Python numbers in the graph change.

    Args:
        verbose: Whether the time and the compilations of each epoch are logged.

    Raises:
        ConfigError: At the beginning of a run: the Trainer has no logger, or uses another device.
    """

    def __init__(self, verbose: bool = True) -> None:
        self.verbose = verbose
        self._lw_metrics: Any = None  # Any: torch_xla is not annotated
        self._lw_began = 0.0
        self._lw_compiled = 0.0

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Raise an error for a run without a logger, or on another device."""
        problems = []
        if not trainer.loggers and not trainer.fast_dev_run:
            problems.append(("there is no logger to write to", "pass Trainer(logger=...)"))
        if trainer.fabric.device.type != "xla":
            problems.append((f"the device is {trainer.fabric.device}", "pass accelerator='tpu' or 'xla'"))
        if problems:
            whats, fixes = zip(*problems, strict=True)
            raise ConfigError(
                f"XLAStatsMonitor: {'; '.join(whats)}.", fix=f"{'; '.join(fixes)}, or remove the callback."
            )
        self._lw_metrics = import_module("torch_xla.debug.metrics")

    def read(self) -> dict[str, float]:
        """Return the counters of this process, which are on the host."""
        metrics = self._lw_metrics
        compiled = metrics.metric_data("CompileTime")
        names = metrics.counter_names()
        reads = "aten::_local_scalar_dense"
        fallbacks = [name for name in names if name.startswith("aten::") and name != reads]
        return {
            "compiled_graphs": float(compiled[0]) if compiled else 0.0,
            "compile_s": compiled[1] / _NS_PER_S if compiled else 0.0,
            "executions": float(sum(metrics.counter_value(name) or 0 for name in _RUNS)),
            "reads": float(metrics.counter_value(reads) or 0),
            "fallbacks": float(sum(metrics.counter_value(name) or 0 for name in fallbacks)),
        }

    def on_train_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Record the time."""
        self._lw_began = time.monotonic()
        self._lw_compiled = self.read()["compiled_graphs"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Log the counters after a step that is logged."""
        if not (trainer.is_global_zero and trainer.at_step_boundary and trainer.log_every_n_steps):
            return
        if trainer.global_step % trainer.log_every_n_steps:
            return
        stats = {**self.read(), **trainer.accelerator.get_device_stats(trainer.fabric.device)}
        trainer.log_metrics({f"XLAStatsMonitor/{name}": value for name, value in stats.items()}, trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Write the epoch's time and compilations to the log. The device may not have finished the epoch's work."""
        if self.verbose and trainer.is_global_zero:
            compiled = self.read()["compiled_graphs"] - self._lw_compiled
            seconds = time.monotonic() - self._lw_began
            logger.info("epoch %d: %.2f s, %d graphs compiled", trainer.current_epoch, seconds, compiled)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lw_metrics": None}
