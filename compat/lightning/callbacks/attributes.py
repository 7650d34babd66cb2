"""What programs read of callbacks under Lightning's names, also those with a leading underscore."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any  # Any: a callback, whose class each row names

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ....callbacks import (
    ProgressBar,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from ....callbacks.averaging.weights import tensors_of, write
from ....lazy import is_core
from ..patch import extend, patch
from .progress import get_standard_metrics

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ....trainer.trainer import Trainer

__all__: list[str] = []


class _Readable:
    """An attribute that is computed when it is read. A class may assign its own: parity has such classes.

    Args:
        compute: Gets the callback.
    """

    def __init__(self, compute: Callable[[Any], object]) -> None:
        self._compute = compute

    def __get__(self, callback: object, owner: type) -> object:
        return self if callback is None else self._compute(callback)


def _id_of(stage: str, bar: RichProgressBar) -> TaskID | None:
    task = bar._lw_task(stage)
    return None if task is None else task.id


def _with_average(callback: WeightAveraging | StochasticWeightAveraging) -> nn.Module | None:
    """Return a copy of the module that has the average; None before training."""
    if callback._lw_source is None:
        return None
    module = copy.deepcopy(callback._lw_source)
    if callback._lw_average:
        write(callback._lw_average, tensors_of(module), owner=type(callback).__name__)
    return module


def _averaged_model(callback: WeightAveraging) -> AveragedModel | None:
    """Return the average as torch's module of averages; None before training."""
    module = _with_average(callback)
    if module is None:
        return None
    average = AveragedModel(module, use_buffers=callback.use_buffers)
    average.n_averaged.copy_(torch.tensor(callback.n_averaged))
    return average


_get_metrics = ProgressBar.get_metrics


def _metrics_of_bar(bar: ProgressBar, trainer: Trainer, pl_module: nn.Module) -> dict[str, float | int | str]:
    """Return what is shown beside the bar; to subclasses of the program with `v_num`, which they may take out."""
    shown = _get_metrics(bar, trainer, pl_module)
    return shown if is_core(type(bar)) else {**get_standard_metrics(trainer), **shown}


_DETECTOR = ("mode", "warmup", "atol", "rtol", "finite_only")

# Class -> name -> function of the callback.
_ATTRIBUTES: dict[type, dict[str, Callable[[Any], object]]] = {
    RichProgressBar: {
        "train_progress_bar_id": partial(_id_of, "train"),
        "val_sanity_progress_bar_id": partial(_id_of, "sanity"),
        "val_progress_bar_id": partial(_id_of, "validation"),
        "test_progress_bar_id": partial(_id_of, "test"),
        "predict_progress_bar_id": partial(_id_of, "predict"),
    },
    WeightAveraging: {"_average_model": _averaged_model},
    StochasticWeightAveraging: {
        "_average_model": _with_average,
        "_initialized": lambda callback: callback._lw_began_at >= 0,
    },
    Timer: {"_duration": lambda timer: timer._lw_duration_s, "_offset": lambda timer: timer._lw_offset_s},
    SpikeDetection: {name: attrgetter(f"detector.{name}") for name in _DETECTOR},
}

# In place, because programs with and without this layer share the classes.
for _class, _readable in _ATTRIBUTES.items():
    for _name, _compute in _readable.items():
        extend(_class, _name, _Readable(_compute))
patch(ProgressBar, "get_metrics", _metrics_of_bar)
