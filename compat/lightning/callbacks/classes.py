"""Callbacks with the additional attributes that programs for Lightning read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn, tensor
from torch.optim.swa_utils import AveragedModel

from .... import callbacks
from ....lazy import is_core
from ..imports.served import Served
from .progress import get_standard_metrics

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ....trainer.trainer import Trainer

__all__ = [
    "ModelCheckpoint",
    "ProgressBar",
    "RichProgressBar",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "Timer",
    "WeightAveraging",
]

_Shown = dict[str, float | int | str]


def _with_version(bar: callbacks.ProgressBar, trainer: Trainer, shown: _Shown) -> _Shown:
    """Return what is shown beside the bar; to subclasses of the program with `v_num`, which they may take out."""
    return shown if is_core(type(bar)) else {**get_standard_metrics(trainer), **shown}


class ProgressBar(callbacks.ProgressBar, metaclass=Served):
    """`lw.ProgressBar`, whose subclasses may take `v_num` out."""

    def get_metrics(self, trainer: Trainer, pl_module: nn.Module) -> _Shown:
        """Return what is shown beside the bar."""
        return _with_version(self, trainer, super().get_metrics(trainer, pl_module))


class TQDMProgressBar(callbacks.TQDMProgressBar, metaclass=Served):
    """`lw.TQDMProgressBar`, whose subclasses may take `v_num` out."""

    def get_metrics(self, trainer: Trainer, pl_module: nn.Module) -> _Shown:
        """Return what is shown beside the bar."""
        return _with_version(self, trainer, super().get_metrics(trainer, pl_module))


class RichProgressBar(callbacks.RichProgressBar, metaclass=Served):
    """`lw.RichProgressBar` with the numbers of its tasks; None for a task that does not exist."""

    def get_metrics(self, trainer: Trainer, pl_module: nn.Module) -> _Shown:
        """Return what is shown beside the bar."""
        return _with_version(self, trainer, super().get_metrics(trainer, pl_module))

    @property
    def train_progress_bar_id(self) -> TaskID | None:
        """Number of the task of training."""
        return self._lw_id("train")

    @property
    def val_sanity_progress_bar_id(self) -> TaskID | None:
        """Number of the task of the sanity check."""
        return self._lw_id("sanity")

    @property
    def val_progress_bar_id(self) -> TaskID | None:
        """Number of the task of validation."""
        return self._lw_id("validation")

    @property
    def test_progress_bar_id(self) -> TaskID | None:
        """Number of the task of test."""
        return self._lw_id("test")

    @property
    def predict_progress_bar_id(self) -> TaskID | None:
        """Number of the task of prediction."""
        return self._lw_id("predict")

    def _lw_id(self, stage: str) -> TaskID | None:
        task = self._lw_task(stage)
        return None if task is None else task.id


class WeightAveraging(callbacks.WeightAveraging, metaclass=Served):
    """`lw.WeightAveraging` with the average as torch's module of averages."""

    @property
    def _average_model(self) -> AveragedModel | None:
        module = self.averaged_module()
        if module is None:
            return None
        average = AveragedModel(module, use_buffers=self.use_buffers)
        average.n_averaged.copy_(torch.tensor(self.n_averaged))
        return average


class StochasticWeightAveraging(callbacks.StochasticWeightAveraging, metaclass=Served):
    """`lw.StochasticWeightAveraging` with the average as a module."""

    @property
    def _average_model(self) -> nn.Module | None:
        return self.averaged_module()

    @property
    def _initialized(self) -> bool:
        return self._lw_began_at >= 0


class Timer(callbacks.Timer, metaclass=Served):
    """`lw.Timer` with its limit and the time of earlier runs, in seconds."""

    @property
    def _duration(self) -> float | None:
        return self._lw_duration_s

    @property
    def _offset(self) -> float:
        return self._lw_offset_s


class SpikeDetection(callbacks.SpikeDetection, metaclass=Served):
    """`lw.SpikeDetection` with the arguments of its detector."""

    @property
    def mode(self) -> str:
        """See `lw.SpikeDetection`."""
        return self.detector.mode

    @property
    def warmup(self) -> int:
        """See `lw.SpikeDetection`."""
        return self.detector.warmup

    @property
    def atol(self) -> float | None:
        """See `lw.SpikeDetection`."""
        return self.detector.atol

    @property
    def rtol(self) -> float | None:
        """See `lw.SpikeDetection`."""
        return self.detector.rtol

    @property
    def finite_only(self) -> bool:
        """See `lw.SpikeDetection`."""
        return self.detector.finite_only


class ModelCheckpoint(callbacks.ModelCheckpoint, metaclass=Served):
    """`lw.ModelCheckpoint`, which calls the private methods of Lightning's where a subclass overrides one of them."""

    _lw_own_last_path = ""  # that a program which saves by itself has assigned

    def save_now(self, trainer: Trainer) -> None:
        """Save, by Lightning's steps where a subclass overrides one."""
        if not any(map(self._lw_overrides, ("_monitor_candidates", "_save_topk_checkpoint", "_save_last_checkpoint"))):
            super().save_now(trainer)
            return
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    def _lw_overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(ModelCheckpoint, name)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return what scores and file names may use."""
        counts = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        return {**trainer.callback_metrics, **{name: tensor(count) for name, count in counts.items()}}

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: object) -> None:
        """Save if the score is among the best; and `last`, unless a subclass does that itself."""
        if self._lw_overrides("_save_last_checkpoint"):
            with self._lw_without_last():
                super().save_now(trainer)
        else:
            super().save_now(trainer)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: object) -> None:
        """Save `last`, where the step before did not."""
        if self.save_last and self._lw_overrides("_save_last_checkpoint"):
            self.write_last_alone(trainer)

    @contextmanager
    def _lw_without_last(self) -> Iterator[None]:
        kept, self.save_last = self.save_last, None
        try:
            yield
        finally:
            self.save_last = kept

    @property
    def kth_best_model_path(self) -> str:
        """See `lw.ModelCheckpoint`; it is computed, and an assignment has no effect."""
        return super().kth_best_model_path

    @kth_best_model_path.setter
    def kth_best_model_path(self, path: str) -> None:
        pass

    @property
    def kth_value(self) -> Tensor:
        """See `lw.ModelCheckpoint`; it is computed, and an assignment has no effect."""
        return super().kth_value

    @kth_value.setter
    def kth_value(self, value: Tensor) -> None:
        pass

    @property
    def _last_global_step_saved(self) -> int:
        return max(self.written_step, 0)

    @_last_global_step_saved.setter
    def _last_global_step_saved(self, step: int) -> None:
        self.written_step = step

    @property
    def _last_checkpoint_saved(self) -> str:
        return self._lw_own_last_path or self.last_model_path or self.best_model_path

    @_last_checkpoint_saved.setter
    def _last_checkpoint_saved(self, path: str) -> None:
        self._lw_own_last_path = path
