"""`lw.Tuner`: finds a learning rate or a batch size before training."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ..callbacks import BatchSizeFinder, LearningRateFinder
from ..errors import ConfigError, nearest
from ..trainer.setup.begin import split_datamodule, unwrapped
from .batch_size import Search, find_batch_size_that_fits, set_batch_size
from .lr_curve import LearningRateCurve
from .lr_find import check_search, find_learning_rate, name_of_rate, set_learning_rate
from .schedule_preview import SchedulePreview, preview_schedule
from .trial import Subject

if TYPE_CHECKING:
    from torch import nn

    from ..data.module import DataModule
    from ..protocols import Loaders
    from ..trainer.trainer import Trainer

__all__ = ["Tuner"]

_METHODS = ("fit", "validate", "test", "predict")


class Tuner:
    """Find hyperparameters by short trials.

    Trials train copies: weights, counts, random numbers, the order of data and files are afterwards as if there had
    been none. Only the value that was searched for is set, on the module, the data module and their hyperparameters,
    wherever there is one of its name. With several ranks it is called on all of them, and all get the same result.

    Args:
        trainer: Trials run on its devices and follow its arguments.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: nn.Module,
        train_dataloaders: Loaders = None,
        val_dataloaders: Loaders = None,
        dataloaders: Loaders = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LearningRateCurve | None:
        """Train a copy while the learning rate rises; set the module's to the suggestion.

        Args:
            model: The module.
            train_dataloaders: Loaders to train with, or a DataModule.
            val_dataloaders: Not used: trials do not validate.
            dataloaders: Only for other verbs than fit.
            datamodule: Brings the loaders instead.
            method: "fit".
            min_lr: First learning rate.
            max_lr: Last learning rate.
            num_training: Number of optimizer steps.
            mode: "exponential" or "linear".
            early_stop_threshold: Multiple of the lowest smoothed loss at which the search stops; None: never.
            update_attr: Whether to set the attribute or hyperparameter.
            attr_name: Its name; "" takes `lr` or `learning_rate`.

        Returns:
            The curve; None with `fast_dev_run`.

        Raises:
            ConfigError: An argument is invalid, or the attribute does not exist.
        """
        if method != "fit":
            raise ConfigError(f"lr_find: method={method!r}, and only fit has a learning rate.", fix="leave it out.")
        check_search(
            min_lr=min_lr, max_lr=max_lr, num_training=num_training, mode=mode,
            early_stop_threshold=early_stop_threshold,
        )  # fmt: skip
        subject = self._subject(
            "lr_find", LearningRateFinder, "fit", model, train_dataloaders, val_dataloaders, dataloaders, datamodule
        )
        if subject is None:
            return None
        name = name_of_rate(subject, attr_name) if update_attr else None
        curve = LearningRateCurve(mode, min_lr, max_lr, num_training)
        find_learning_rate(subject, curve, early_stop_threshold)
        lr = curve.suggestion()
        if name is not None and lr is not None:
            set_learning_rate(subject, name, lr)
        return curve

    def scale_batch_size(
        self,
        model: nn.Module,
        train_dataloaders: Loaders = None,
        val_dataloaders: Loaders = None,
        dataloaders: Loaders = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
        *,
        keep_global_batch: bool = False,
    ) -> int | None:
        """Find the largest batch size that fits into memory, and set it.

        Args:
            model: The module.
            train_dataloaders: A DataModule only: the batch size of a loader is fixed.
            val_dataloaders: None.
            dataloaders: A DataModule only, for other verbs than fit.
            datamodule: Brings the loaders.
            method: "fit", "validate", "test" or "predict".
            mode: "power" doubles the size until memory is exhausted; "binsearch" then bisects.
            steps_per_trial: Number of steps of each trial.
            init_val: First batch size.
            max_trials: Maximum number of sizes to try.
            batch_arg_name: Name of the attribute or hyperparameter that the loaders read their batch size from.
            margin: For "binsearch", fraction of the found size that is left free.
            max_val: Largest size to try; the number of samples is another limit.
            keep_global_batch: Whether the number of samples per step stays the same: the found size divides the current
                one times `accumulate_grad_batches`, which is increased accordingly.

        Returns:
            Samples of a micro-batch on one device; None with `fast_dev_run`.

        Raises:
            ConfigError: An argument is invalid, the attribute does not exist, or no size fits.
        """
        if method not in _METHODS:
            raise ConfigError(
                f"scale_batch_size: method={method!r}{nearest(str(method), _METHODS)}, expected one of {_METHODS}.",
                fix="choose one of them.",
            )
        search = Search(
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val, keep_global_batch
        )  # fmt: skip
        subject = self._subject(
            "scale_batch_size", BatchSizeFinder, method, model, train_dataloaders, val_dataloaders, dataloaders,
            datamodule,
        )  # fmt: skip
        if subject is None:
            return None
        if not getattr(self._trainer.fabric.launcher, "starts_processes", False):
            self._trainer.fabric.launch()  # the ranks synchronize results
        found = find_batch_size_that_fits(subject, method, search)
        set_batch_size(subject, method, batch_arg_name, found)
        return found.size

    def preview_schedule(
        self,
        model: nn.Module,
        train_dataloaders: Loaders = None,
        datamodule: DataModule | None = None,
        num_steps: int | None = None,
    ) -> SchedulePreview:
        """Return the learning rates that training will have, without training; see `preview_schedule`."""
        return preview_schedule(self._trainer, model, train_dataloaders, datamodule, num_steps)

    def _subject(
        self,
        what: str,
        callback: type,
        method: str,
        model: nn.Module,
        train_dataloaders: Loaders,
        val_dataloaders: Loaders,
        dataloaders: Loaders,
        datamodule: DataModule | None,
    ) -> Subject | None:
        """Check what was passed to every search; None where it is left out, with `fast_dev_run`."""
        trainer = self._trainer
        if trainer.state.status == "running":
            raise ConfigError(
                f"Tuner.{what} was called while trainer.{trainer.state.fn} is running.",
                fix=f"call it before, or add {callback.__name__} to the trainer's callbacks.",
            )
        if any(isinstance(one, callback) for one in trainer.callbacks):
            raise ConfigError(
                f"Tuner.{what}: the trainer has a {callback.__name__}, which would search again.",
                fix="use one of the two.",
            )
        wrong = dataloaders if method == "fit" else (train_dataloaders or val_dataloaders)
        if wrong is not None:
            raise ConfigError(
                f"Tuner.{what}: method={method!r} does not take "
                f"{'dataloaders' if method == 'fit' else 'train_dataloaders or val_dataloaders'}.",
                fix="pass " + ("train_dataloaders." if method == "fit" else "dataloaders."),
            )
        given = train_dataloaders if method == "fit" else dataloaders
        name = "train_dataloaders" if method == "fit" else "dataloaders"
        given, datamodule = split_datamodule(given, datamodule, name)
        if given is not None and datamodule is not None:
            raise ConfigError(f"Tuner.{what}: both {name} and datamodule are given.", fix="pass one of them.")
        if trainer.fast_dev_run:
            warnings.warn(f"Tuner.{what} does nothing with fast_dev_run", stacklevel=3)
            return None
        stage = {"fit": "train", "validate": "validation"}.get(method, method)
        return Subject(trainer, unwrapped(model), datamodule, {stage: given} if given is not None else {})
