"""`MemorySnapshot`: a report on memory, written to files when it runs out."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...accelerators.out_of_memory import is_out_of_memory
from ...errors import ConfigError
from ...remote import local_dir
from ...strategies.memory_report import MemoryReport, memory_report
from ..base import AnyModule, Callback

if TYPE_CHECKING:
    from ...trainer import Trainer

_log = logging.getLogger(__name__)


class MemorySnapshot(Callback):
    """Write a report on memory when it runs out, on the rank that runs out of memory.

    The files are `<dirpath>/out_of_memory_rank<r>_step<n>.json` (and a readable `.txt`), with the memory by owner and
    the largest tensors with their variables' names; on CUDA also `.pickle`, the allocator's history with the stack of
    each allocation, for https://pytorch.org/memory_viz. A note on the error names the files.

    Args:
        dirpath: Directory of the reports. None is `memory` in the Trainer's `default_root_dir`, or in the working
            directory if that is a URL.
        max_entries: Number of allocations and frees in CUDA's history, which cost a few microseconds each; 0 for no
            history.

    Attributes:
        report: Report on the last error; None before the first.

    Raises:
        ConfigError: `max_entries` is negative.
    """

    def __init__(self, dirpath: str | Path | None = None, *, max_entries: int = 100_000) -> None:
        if max_entries < 0:
            raise ConfigError(f"MemorySnapshot: max_entries={max_entries} is negative.", fix="pass 0 or more.")
        self.dirpath = None if dirpath is None else Path(dirpath).expanduser()
        self.max_entries = max_entries
        self.report: MemoryReport | None = None
        self._lw_is_recording = False

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Enable the history of CUDA's allocator."""
        if trainer.fabric.device.type == "cuda" and self.max_entries:
            torch.cuda.memory._record_memory_history(max_entries=self.max_entries)
            self._lw_is_recording = True

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Disable the history of CUDA's allocator."""
        self._lw_stop()

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Write the report, if memory ran out."""
        try:
            if is_out_of_memory(exception):
                self._lw_write(trainer, pl_module, exception)
        finally:
            self._lw_stop()

    def _lw_write(self, trainer: Trainer, pl_module: AnyModule, error: BaseException) -> None:
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
        self.report = report = memory_report(pl_module, optimizers, device=trainer.fabric.device, error=error)
        folder = self.dirpath or Path(local_dir(trainer.default_root_dir), "memory")
        stem = folder / f"out_of_memory_rank{trainer.global_rank}_step{trainer.global_step}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._lw_is_recording:
                torch.cuda.memory._dump_snapshot(f"{stem}.pickle")
            Path(f"{stem}.json").write_text(json.dumps({"error": str(error), **asdict(report)}, indent=1))
            Path(f"{stem}.txt").write_text(f"{error}\n\n{report}\n")
        except OSError as problem:  # the error that is being handled is the one to see
            _log.warning("MemorySnapshot: %s cannot be written: %s", stem, problem)
            return
        error.add_note(f"Loopwright: {stem}.txt lists what held the memory")

    def _lw_stop(self) -> None:
        if self._lw_is_recording:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._lw_is_recording = False
