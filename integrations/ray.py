"""Ray Train and Ray Tune: reports, resume and data shards in their workers. The Trainer runs there as it is."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ..callbacks.base import AnyModule, Checkpoint, from_rank_zero
from ..callbacks.model_checkpoint.interval import TimeInterval
from ..errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    import ray.data

    from ..protocols import AnyBatch, AnyOutput, Batch, Options
    from ..trainer import Trainer

try:
    import ray.train
    import ray.tune
    from pyarrow.fs import LocalFileSystem
except ModuleNotFoundError as error:
    raise MissingDependency("ray", needed_for="loopwright.integrations.ray", extra="ray") from error

__all__ = ["RayReport", "RayTrainReportCallback", "data_shard", "resume_path"]

_FILE = "checkpoint.ckpt"
_POLL = timedelta(seconds=10)  # for announced preemptions; a call to an actor of Ray, on all ranks
_resumed = contextlib.ExitStack()  # what `resume_path` has downloaded, until it is read


class RayReport(Checkpoint):
    """Report metrics and checkpoints to Ray Train, or in a trial of Ray Tune, at the end of epochs or every n steps.

    A report follows the validation of the same moment, has metrics that are reduced over all ranks, and waits for all
    ranks. Training ends with a report, so that Ray's result has the last metrics and the last checkpoint. When Ray
    announces that a node will be preempted, a checkpoint is reported within some seconds, and training continues.

    Where Ray's storage is a file system, all ranks write the checkpoint there, so that it may be sharded. Otherwise it
    is written to a temporary folder of rank 0's node, and Ray uploads it.

    Args:
        every: Number of optimizer steps between reports; None is each epoch's end. Ray's controller fetches a report
            every 2 s, and the next one waits for it; the variable RAY_TRAIN_HEALTH_CHECK_INTERVAL_S changes the 2 s.
        metrics: Names of logged metrics; None is all of them. "epoch" and "step" are always reported.
        checkpoint: Whether reports have a checkpoint. Without it, Ray Train's result does not have the metrics, either.
        checkpoint_upload_mode: A `ray.train.CheckpointUploadMode`; the checkpoint is then uploaded as Ray does it.
        validation: Whether Ray validates the checkpoint asynchronously, or a `ray.train.ValidationTaskConfig`.

    Raises:
        ConfigError: `every` is below 1. At the beginning of training: this is not a process of Ray Train or Ray Tune.
    """

    CHECKPOINT_NAME = _FILE

    def __init__(
        self,
        *,
        every: int | None = None,
        metrics: Sequence[str] | None = None,
        checkpoint: bool = True,
        checkpoint_upload_mode: ray.train.CheckpointUploadMode | None = None,
        validation: bool | ray.train.ValidationTaskConfig = False,
    ) -> None:
        if every is not None and every < 1:
            raise ConfigError(f"RayReport: expected every of at least 1, got {every}.", fix="pass a number of steps.")
        self.every = every
        self.metrics = metrics
        self.checkpoint = checkpoint
        self.checkpoint_upload_mode = checkpoint_upload_mode
        self.validation = validation
        self._lw_reported_step = 0
        self._lw_poll: TimeInterval | None = None
        self._lw_preemption: ray.train.PreemptionInfo | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Check that this is a process of Ray, and remove what a resume has downloaded."""
        _resumed.close()
        self._lw_reported_step = trainer.global_step
        self._lw_poll = None
        if not _is_trial():
            self._lw_poll = TimeInterval(_POLL)
            self._lw_poll.begin(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Report if the step is one of `every` and no validation follows, or if a node will be preempted."""
        if not trainer.at_step_boundary:
            return
        if self._lw_is_due(trainer) and not trainer.validation_is_due:
            self._lw_report(trainer)
        elif self._lw_poll is not None and self._lw_poll.is_over(trainer):
            self._lw_poll.begin(trainer)
            before, self._lw_preemption = self._lw_preemption, ray.train.get_preemption_info()
            if self._lw_preemption not in (None, before):
                self._lw_report(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Report if the step before the validation is one of `every`."""
        if not trainer.sanity_checking and trainer.state.fn == "fit" and self._lw_is_due(trainer):
            self._lw_report(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Report if reports follow epochs."""
        if self.every is None:
            self._lw_report(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Report if there were steps after the last report."""
        if self._lw_reported_step != trainer.global_step:
            self._lw_report(trainer)

    def _lw_is_due(self, trainer: Trainer) -> bool:
        step = trainer.global_step
        return self.every is not None and step % self.every == 0 and step != self._lw_reported_step

    def _lw_report(self, trainer: Trainer) -> None:
        """Report, on every rank."""
        self._lw_reported_step = trainer.global_step
        names = from_rank_zero(trainer, lambda: list(self.metrics or sorted(trainer.callback_metrics)))
        trainer.synchronize_metrics(*names)
        logged = trainer.callback_metrics
        # Waits for the device, once for each report.
        metrics: dict[str, float] = {name: float(logged[name]) for name in names if name in logged}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        if not self.checkpoint:
            _report(metrics, None)
            return
        folder, is_stored = from_rank_zero(trainer, lambda: self._lw_make_folder(trainer.global_step))
        trainer.save_checkpoint(os.path.join(folder, _FILE))
        trainer.wait_for_save()
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD if is_stored else self.checkpoint_upload_mode
        _report(metrics, folder if trainer.is_global_zero else None, mode, self.validation)
        if trainer.is_global_zero and not is_stored and mode is not ray.train.CheckpointUploadMode.ASYNC:
            shutil.rmtree(folder)

    def _lw_make_folder(self, step: int) -> tuple[str, bool]:
        """Return a new folder for a checkpoint, and whether it is in Ray's storage already."""
        if self.checkpoint_upload_mode is None and not _is_trial():
            storage = ray.train.get_context().get_storage()
            if isinstance(storage.storage_filesystem, LocalFileSystem):
                name = f"checkpoint_step_{step:08d}_{uuid.uuid4().hex[:8]}"  # a killed attempt may have left its own
                folder = os.path.join(storage.experiment_fs_path, name)
                os.makedirs(folder)
                return folder, True
        return tempfile.mkdtemp(prefix="loopwright-"), False


RayTrainReportCallback = RayReport  # its name in ray.train.lightning


def resume_path() -> str | None:
    """Return the path of the latest checkpoint that `RayReport` has reported; None at the first start.

    In the training function: `trainer.fit(model, loader, ckpt_path=resume_path())`. Ray has a checkpoint only once its
    controller knows of it, up to a second after the report: steps since the one before may be repeated.

    Raises:
        ConfigError: This is not a process of Ray Train or Ray Tune.
    """
    checkpoint = ray.tune.get_checkpoint() if _is_trial() else ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    return os.path.join(_resumed.enter_context(checkpoint.as_directory()), _FILE)


def data_shard(name: str = "train", *, batch_size: int, **options: Any) -> Iterable[Batch]:  # Any: Ray's arguments
    """Return this worker's shard of a data set of Ray Data, as training or validation data; batches are dicts.

    A checkpoint has its position: a resume within an epoch reads the batches again that were used. Therefore the order
    must be the same (`ray.data.DataContext.get_current().execution_options.preserve_order = True` in the driver). With
    another number of workers the shards differ, so that only a checkpoint from the end of an epoch can be resumed.

    Args:
        name: Its key in `TorchTrainer(datasets=...)`.
        batch_size: Number of samples in a batch.
        options: Further arguments of `DataIterator.iter_torch_batches`.

    Raises:
        KeyError: No data set has this name.
    """
    return RayShard(ray.train.get_dataset_shard(name), {"batch_size": batch_size, **options})


class RayShard:
    """A shard that can be read repeatedly, a pass for each epoch."""

    def __init__(self, shard: ray.data.DataIterator, options: Options) -> None:
        self._shard = shard
        self._options = options

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass."""
        return iter(self._shard.iter_torch_batches(**self._options))


def _is_trial() -> bool:
    """Return whether this process is a trial of Ray Tune, and not a worker of Ray Train.

    Raises:
        ConfigError: It is neither.
    """
    try:
        ray.train.get_context()
    except DeprecationWarning:  # Ray raises it in a trial, as an error
        return True
    except RuntimeError as error:
        raise ConfigError(
            "Expected a worker of Ray Train or a trial of Ray Tune, got another process.",
            fix="call this in the function that TorchTrainer or Tuner runs, or use ModelCheckpoint and "
            "ckpt_path='last'.",
        ) from error
    return False


def _report(
    metrics: dict[str, float],
    folder: str | None,
    mode: ray.train.CheckpointUploadMode | None = None,
    validation: bool | ray.train.ValidationTaskConfig = False,
) -> None:
    if _is_trial():
        checkpoint = None if folder is None else ray.tune.Checkpoint.from_directory(folder)
        ray.tune.report(metrics, checkpoint=checkpoint)
        return
    ray.train.report(
        metrics,
        checkpoint=None if folder is None else ray.train.Checkpoint.from_directory(folder),
        checkpoint_upload_mode=mode or ray.train.CheckpointUploadMode.SYNC,
        validation=validation if folder is not None else False,
    )
