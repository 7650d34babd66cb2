"""`lw.Tuner`: finds a learning rate, a batch size or faster settings before training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..callbacks import BatchSizeFinder, LearningRateFinder
from ..errors import ConfigError, nearest
from ..messages import warn
from ..trainer.session.attach import adopt
from ..trainer.session.checks import split_datamodule, unwrapped
from .batch_size import Search, find_batch_size_that_fits, set_batch_size
from .lr_curve import LearningRateCurve
from .lr_find import check_search, find_learning_rate, name_of_rate, set_learning_rate
from .schedule_preview import SchedulePreview, preview_schedule
from .speed import apply_settings, find_fastest, read_settings
from .speed_table import SpeedTable
from .trial import Subject

if TYPE_CHECKING:
    from torch import nn

    from ..data.module import DataModule
    from ..protocols import Loaders
    from ..trainer.trainer import Trainer

_METHODS = ("fit", "validate", "test", "predict")


class Tuner:
    """Find hyperparameters by short trials.

    Trials train copies: they do not change weights, counts, random numbers, the order of data or files. Only the result
    of the search is set, on the module, the data module and their hyperparameters, wherever its name exists. Call the
    methods on every rank; all ranks get the same result.

    Args:
        trainer: The Trainer, whose devices and arguments the trials use.
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
        """Train a copy while the learning rate rises, and set the module's learning rate to the suggestion.

        Args:
            model: The module.
            train_dataloaders: Loaders to train with, or a DataModule.
            val_dataloaders: Not used, because trials do not validate.
            dataloaders: Only for verbs other than fit.
            datamodule: DataModule that provides the loaders instead.
            method: "fit"; no other verb is supported.
            min_lr: First learning rate.
            max_lr: Last learning rate.
            num_training: Number of optimizer steps.
            mode: "exponential" or "linear".
            early_stop_threshold: Multiple of the lowest smoothed loss at which the search stops; None for never.
            update_attr: Whether to set the attribute or hyperparameter.
            attr_name: Name of the attribute or hyperparameter; "" is `lr` or `learning_rate`.

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
        make = subject.trainer.behavior.learning_rate_curve or LearningRateCurve
        curve = make(mode, min_lr, max_lr, num_training)
        find_learning_rate(subject, curve, early_stop_threshold)
        lr = curve.suggestion()
        if name is not None and lr is not None:
            set_learning_rate(subject, name, lr)
        self._adopt(subject)
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
            train_dataloaders: A DataModule, because the batch size of a loader is fixed.
            val_dataloaders: None only.
            dataloaders: A DataModule, for verbs other than fit.
            datamodule: DataModule that provides the loaders.
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
        self._adopt(subject)
        return found.size

    def speed(
        self,
        model: nn.Module,
        train_dataloaders: Loaders = None,
        datamodule: DataModule | None = None,
        *,
        settings: Sequence[str] | None = None,
        seconds: float = 2.0,
        apply: bool = False,
        show: bool = True,
    ) -> SpeedTable | None:
        """Try settings that affect the speed of a step, each for a few seconds; `apply=True` sets the fastest ones.

        Each trial trains a copy as `fit` does, without logging, validation and checkpoints. The time of a step includes
        waiting for its batch. The unchanged run is measured first and last. A setting counts as faster if it saves at
        least 3 %, and more than the spread of the measured times; the winners are then measured together.

        Args:
            model: The module.
            train_dataloaders: Loaders to train with, or a DataModule.
            datamodule: DataModule that provides the loaders instead.
            settings: Settings to try: "fused" (optimizer), "compile", "channels_last", "matmul_precision",
                "pin_memory", "num_workers", "prefetch_factor"; None for all.
            seconds: Seconds of measured steps per trial, without the time for starting workers and compiling.
            apply: Whether to set the fastest settings on the Trainer, the module, and the loader, or on the attribute
                of the module or data module that has the setting's name. The table lists settings that cannot be set.
            show: Whether to print the table, on rank 0.

        Returns:
            The table; None with `fast_dev_run`.

        Raises:
            ConfigError: An argument is invalid, or the trainer uses several devices.
        """
        names = read_settings(settings)
        if not 0 < seconds < math.inf:
            raise ConfigError(
                f"Tuner.speed: Expected a positive number of seconds, got seconds={seconds!r}.", fix="pass 2."
            )
        if self._trainer.world_size > 1:
            raise ConfigError(
                f"Tuner.speed: Expected a trainer on one device, got one on {self._trainer.world_size}.",
                fix="search with devices=1, and use what was found with several devices.",
            )
        subject = self._subject("speed", type(None), "fit", model, train_dataloaders, None, None, datamodule)
        if subject is None:
            return None
        table, chosen = find_fastest(subject, names, seconds)
        if apply:
            table = apply_settings(subject, table, chosen)
        self._adopt(subject)
        if show:
            self._trainer.print(table)
        return table

    def preview_schedule(
        self,
        model: nn.Module,
        train_dataloaders: Loaders = None,
        datamodule: DataModule | None = None,
        num_steps: int | None = None,
    ) -> SchedulePreview:
        """Return the learning rate of each optimizer step of a training, without training; see `preview_schedule`."""
        return preview_schedule(self._trainer, model, train_dataloaders, datamodule, num_steps)

    def _adopt(self, subject: Subject) -> None:
        """Let the trainer show module and data of the search."""
        loaders = None if subject.trial is None else subject.trial._lw_loaders.train
        subject.trial = None
        adopt(self._trainer, subject.module, subject.datamodule, loaders)

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
            others = "" if callback is type(None) else f", or add {callback.__name__} to the trainer's callbacks"
            raise ConfigError(
                f"Tuner.{what} was called while trainer.{trainer.state.fn} is running.", fix=f"call it before{others}."
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
            warn(f"Tuner.{what} does nothing with fast_dev_run")
            return None
        stage = {"fit": "train", "validate": "validation"}.get(method, method)
        loaders = {stage: given, **({"validation": val_dataloaders} if method == "fit" else {})}
        present = {stage: one for stage, one in loaders.items() if one is not None}
        return Subject(trainer, unwrapped(model), datamodule, present)
