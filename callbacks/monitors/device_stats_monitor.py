"""`DeviceStatsMonitor`: statistics of GPUs, of the CPU and of the network."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from ...accelerators.cpu import CPUAccelerator
from ...errors import MissingDependency
from ..base import AnyModule, Callback, as_hook
from .measuring import is_evaluation_due, require_logger
from .network_rates import NetworkRates

if TYPE_CHECKING:
    from ...protocols import AnyBatch, AnyOutput
    from ...trainer import Trainer


class DeviceStatsMonitor(Callback):
    """Log the accelerator's statistics of rank 0's device, before and after each step that the Trainer logs.

    Keys: `DeviceStatsMonitor.on_train_batch_start/<statistic>` and `..._end`; likewise for validation and test. The
    statistics depend on the accelerator: on GPUs, `torch.cuda.memory_stats` and, with nvidia-ml-py, `power_draw_w`,
    `temperature_c` and `utilization_percent`; on a CPU, percentages of processor, memory and swap, which need psutil.
    Steps that are not logged cost a comparison.

    Args:
        cpu_stats: Whether to log CPU statistics, also in addition to a GPU's. None logs them if the CPU is the
            accelerator.
        network_stats: Whether to log what rank 0's machine sends and receives (`network_sent_bytes_per_sec`,
            `network_received_bytes_per_sec`, without loopback; `infiniband_...` for RDMA): during the step in
            `on_train_batch_end`, since the last logged one in `on_train_batch_start`. Needs psutil.

    Raises:
        ConfigError: At the beginning of a run: the Trainer has no logger.
        MissingDependency: Before a run: statistics of the CPU or the network are logged, and psutil is
            not installed.
    """

    def __init__(self, cpu_stats: bool | None = None, *, network_stats: bool = False) -> None:
        self._cpu_stats = cpu_stats
        self._lw_network = NetworkRates() if network_stats else None
        self._lw_noted: dict[str, float] = {}
        self._lw_noted_step = -1
        self._lw_is_on = False

    def _lw_check_packages(self, trainer: Trainer, verb: str) -> None:
        if verb == "predict" or not trainer.log_every_n_steps:
            return
        reads_cpu = self._cpu_stats is not False and (
            self._cpu_stats or isinstance(trainer.accelerator, CPUAccelerator)
        )
        if (reads_cpu or self._lw_network is not None) and find_spec("psutil") is None:
            raise MissingDependency("psutil", needed_for="DeviceStatsMonitor", extra="stats")

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Refuse a run without a logger; read everything once, so that what is missing is found now."""
        require_logger(trainer, self)
        self._lw_is_on = stage != "predict" and trainer.is_global_zero and bool(trainer.log_every_n_steps)
        self._lw_noted = {}
        if self._lw_is_on:
            self._lw_read(trainer, "setup")

    def _lw_read(self, trainer: Trainer, hook: str) -> dict[str, float]:
        is_cpu = trainer.fabric.device.type == "cpu"
        stats: dict[str, float] = {}
        if not (is_cpu and self._cpu_stats is False):
            stats.update(trainer.accelerator.get_device_stats(trainer.fabric.device))
        if self._cpu_stats and not is_cpu:
            stats.update(CPUAccelerator().get_device_stats(torch.device("cpu")))
        if self._lw_network is not None:
            stats.update(self._lw_network.read())
        separator = getattr(trainer.logger, "group_separator", "/")
        return {f"{type(self).__qualname__}.{hook}{separator}{name}": value for name, value in stats.items()}

    def on_train_batch_start(self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int) -> None:
        """Record the statistics before the first batch of a step that is logged."""
        if self._lw_is_on and trainer.should_log and self._lw_noted_step != trainer.global_step:
            # Sent when the step is done: one that is skipped is tried again under the same number.
            self._lw_noted = self._lw_read(trainer, "on_train_batch_start")
            self._lw_noted_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Log the recorded statistics, and the statistics after the step."""
        if not self._lw_noted or not trainer.at_step_boundary:
            return
        noted, self._lw_noted = self._lw_noted, {}
        if trainer.global_step > self._lw_noted_step:
            trainer.log_metrics({**noted, **self._lw_read(trainer, "on_train_batch_end")}, self._lw_noted_step)
        self._lw_noted_step = -1

    def _lw_evaluated(self, hook: str, trainer: Trainer, *_: object) -> None:
        """Log the statistics before or after a batch."""
        if self._lw_is_on and not trainer.sanity_checking and is_evaluation_due(trainer):
            trainer.log_metrics(self._lw_read(trainer, hook), trainer.progress.eval_batches)

    on_validation_batch_start = as_hook(_lw_evaluated, "on_validation_batch_start")
    on_validation_batch_end = as_hook(_lw_evaluated, "on_validation_batch_end")
    on_test_batch_start = as_hook(_lw_evaluated, "on_test_batch_start")
    on_test_batch_end = as_hook(_lw_evaluated, "on_test_batch_end")
