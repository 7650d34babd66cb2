"""`LightningModule` and `LightningDataModule`: Loopwright's, and the few methods that Lightning has besides."""

from __future__ import annotations

from typing import NoReturn

from ...data import DataModule
from ...trainer.module import Module
from .imports.absent import refuse
from .utilities.hparams import remove_ignored

__all__ = ["CheckpointHooks", "DataHooks", "LightningDataModule", "LightningModule", "ModelHooks"]


class LightningModule(Module):
    """`lw.Module` under Lightning's name. Hooks stay those of the base class: what is not overridden costs nothing."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"

    @property
    def _current_fx_name(self) -> str | None:
        """Name of the hook that runs, None outside of one."""
        return self._trainer._metrics.table.hook or None if self._trainer is not None else None

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Take entries out of the hyperparameters."""
        remove_ignored(self, ignore_list)

    def to_tensorrt(self, *args: object, **kwargs: object) -> NoReturn:  # nothing is done with them
        """Refuse: there is no export to TensorRT."""
        refuse("LightningModule.to_tensorrt", "use torch_tensorrt.compile on the module in eval mode")


class LightningDataModule(DataModule):
    """`lw.DataModule` under Lightning's name."""

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Take entries out of the hyperparameters."""
        remove_ignored(self, ignore_list)


# Lightning's modules inherit their hooks from classes of these names; here one class has them all.
ModelHooks = Module
CheckpointHooks = Module
DataHooks = Module
