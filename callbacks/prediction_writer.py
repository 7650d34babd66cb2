"""`BasePredictionWriter`: predictions written during prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from ..data.batch_indices import IndexRecord, record_indices
from ..data.move import move_to_device
from ..errors import ConfigError, ModuleError
from ..protocols import Indices
from .base import AnyModule, Callback

if TYPE_CHECKING:
    from ..protocols import AnyBatch, AnyOutput
    from ..trainer import Trainer

_INTERVALS = ("batch", "epoch", "batch_and_epoch")


class BasePredictionWriter(Callback):
    """Write the outputs of `predict_step`: override `write_on_batch_end`, `write_on_epoch_end`, or both.

    Both are called on every rank, with the predictions of this rank: include `trainer.global_rank` in file names. If
    ranks of a mesh predict the same batches (along tp, cp and pp), they are called on one of these. To write more than
    fits into memory, use write_interval="batch" and `trainer.predict(..., return_predictions=False)`.

    Args:
        write_interval: When to write: "batch", "epoch", or "batch_and_epoch".

    Raises:
        ConfigError: The interval is invalid.
        ModuleError: At the beginning of predict: the method that the interval calls is not overridden.
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        interval = getattr(write_interval, "value", write_interval)
        if interval not in _INTERVALS:
            raise ConfigError(
                f"{type(self).__name__}: write_interval={write_interval!r}, expected one of {list(_INTERVALS)}.",
                fix="choose one of them.",
            )
        self.interval: str = interval
        self._lw_on_batch = interval != "epoch"
        self._lw_on_epoch = interval != "batch"
        self._lw_is_first = True  # of the ranks that predict the same batches
        self._lw_records: list[IndexRecord | None] = []
        self._lw_predictions: list[list[AnyOutput]] = []
        self._lw_indices: list[list[list[Indices] | None]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: AnyModule,
        prediction: AnyOutput,
        batch_indices: list[Any] | None,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the prediction of one batch.

        Args:
            trainer: The trainer.
            pl_module: The module.
            prediction: Output of `predict_step`, on the device.
            batch_indices: Indices of the batch's samples in the data set; None if unknown, as for an iterable data set
                or a list of batches.
            batch: The batch, on the device.
            batch_idx: Index of the batch in this loader, on this rank.
            dataloader_idx: Index of the loader.
        """
        raise NotImplementedError

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: AnyModule,
        predictions: list[AnyOutput],
        batch_indices: list[list[list[Any] | None]],
    ) -> None:
        """Write the predictions of all batches of this rank.

        Args:
            trainer: The trainer.
            pl_module: The module.
            predictions: Output of `predict_step` for each batch, on the CPU; a list of such lists for several loaders.
            batch_indices: For each loader and each batch, the `batch_indices` of `write_on_batch_end`.
        """
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Raise an error for a writer that would write nothing."""
        if stage != "predict":
            return
        wanted = {"write_on_batch_end": self._lw_on_batch, "write_on_epoch_end": self._lw_on_epoch}
        missing = [
            name for name, is_wanted in wanted.items()
            if is_wanted and getattr(type(self), name) is getattr(BasePredictionWriter, name)
        ]  # fmt: skip
        if missing:
            raise ModuleError(
                f"{type(self).__name__}: write_interval={self.interval!r} calls {' and '.join(missing)}, which "
                "it does not define.",
                fix=f"define {missing[0]}, or choose another write_interval.",
            )

    def on_predict_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Start to record the indices of the samples that the loaders read."""
        ranks = trainer.strategy.topology.reporting_ranks
        self._lw_is_first = ranks is None or trainer.global_rank in ranks
        data = trainer._lw_loaders.eval["predict"]
        self._lw_records = []
        for number, loader in enumerate(data.loaders):
            data.loaders[number], record = record_indices(loader)
            self._lw_records.append(record)
        self._lw_predictions = [[] for _ in data.loaders]
        self._lw_indices = [[] for _ in data.loaders]

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: AnyModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the batch, keep it for the end, or both."""
        if not self._lw_is_first:
            return
        record = self._lw_records[dataloader_idx]
        indices = record.next() if record is not None else None
        if self._lw_on_batch:
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self._lw_on_epoch:
            self._lw_predictions[dataloader_idx].append(move_to_device(outputs, torch.device("cpu")))
            self._lw_indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Write all batches."""
        if self._lw_on_epoch and self._lw_is_first:
            predictions: list[AnyOutput] = self._lw_predictions
            one = predictions[0] if len(predictions) == 1 else predictions
            self.write_on_epoch_end(trainer, pl_module, one, self._lw_indices)
        self._lw_records, self._lw_predictions, self._lw_indices = [], [], []
