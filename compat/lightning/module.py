"""`LightningModule` and `LightningDataModule`: Loopwright's, with the few additional methods of Lightning."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, Self

from ...data import DataModule
from ...data.hparams import class_only
from ...data.tree import flatten_loaders, is_collection
from ...trainer.module import Module
from ..absent import refuse
from .objects import keep_hyperparameters
from .utilities.hparams import CoreName, accepted, existing, remove_ignored, set_hparams

if TYPE_CHECKING:
    import torch

    from ...fabric import Fabric
    from ...protocols import MapLocation, StateDict, TrustedClasses

__all__ = [
    "CheckpointHooks",
    "DataHooks",
    "LightningDataModule",
    "LightningModule",
    "ModelHooks",
    "load_from_checkpoint",
]


class LightningModule(Module):
    """`lw.Module` under Lightning's name. Hooks stay those of the base class: what is not overridden costs nothing."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"
    _compiler_ctx: dict[str, Any] | None = None  # set where a compiled module was unpacked, which is not done here
    _strict_loading: bool | None = None
    _trainer, _fabric, _fabric_optimizers = CoreName(), CoreName(), CoreName()
    _hparams, _hparams_initial, _hparams_name, _log_hyperparams = CoreName(), CoreName(), CoreName(), CoreName()
    __jit_ignored_attributes__ = [*Module.__jit_ignored_attributes__, "_trainer", "_fabric", "_lw_fabric_optimizers"]
    __jit_unused_properties__ = [*Module.__jit_unused_properties__, "_current_fx_name", "strict_loading"]

    @property
    def logger(self) -> Any:  # Any: a logger of any library
        """First logger of the trainer, None without any; or of the Fabric, with an IndexError without any."""
        return self._fabric.logger if self._trainer is None and self._fabric is not None else super().logger

    def checkpoint_hyperparameters(self, prefix: str) -> StateDict:
        """Return what a checkpoint holds of the arguments: objects, too.

        Args:
            prefix: How keys begin.
        """
        return keep_hyperparameters(self, prefix)

    @property
    def strict_loading(self) -> bool:
        """Whether the keys of a loaded checkpoint must match those of the module exactly; None is assigned as True."""
        return self._strict_loading is not False

    @strict_loading.setter
    def strict_loading(self, is_strict: bool | None) -> None:
        self._strict_loading = is_strict

    @property
    def _current_fx_name(self) -> str | None:
        """Name of the hook that runs, None outside of one."""
        return self._lw_trainer.parts.metrics.table.hook or None if self._lw_trainer is not None else None

    def _apply_batch_transfer_handler(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:  # Any: a batch of any form
        """Return a batch on the device, through the three hooks of a transfer."""
        device = self.device if device is None else device
        batch = self.on_before_batch_transfer(batch, dataloader_idx)
        batch = self.transfer_batch_to_device(batch, device, dataloader_idx)
        return self.on_after_batch_transfer(batch, dataloader_idx)

    def _set_hparams(self, hp: Mapping[str, Any] | Namespace) -> None:
        set_hparams(self, hp)

    def _lw_stand_in_for_trainer(self) -> Any:  # Any: attributes of the Fabric
        return None if self._lw_fabric is None else _FabricAsTrainer(self._lw_fabric)

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        trusted_classes: TrustedClasses = (),
        **kwargs: object,
    ) -> Self:
        """Build the module from a checkpoint; see `lw.Module.load_from_checkpoint`.

        Keywords that `__init__` does not take are left out. A file of hyperparameters that is missing is a warning.
        """
        with existing(hparams_file) as file:
            return super().load_from_checkpoint(
                checkpoint_path, map_location, file, strict, weights_only,
                trusted_classes=trusted_classes, **accepted(cls, kwargs),
            )  # fmt: skip

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Take entries out of the hyperparameters."""
        remove_ignored(self, ignore_list)

    def to_tensorrt(self, *args: object, **kwargs: object) -> NoReturn:  # nothing is done with them
        """Raise an error: export to TensorRT is not supported."""
        refuse("LightningModule.to_tensorrt", "use torch_tensorrt.compile on the module in eval mode")


class LightningDataModule(DataModule):
    """`lw.DataModule` under Lightning's name."""

    _hparams, _hparams_initial, _hparams_name, _log_hyperparams = CoreName(), CoreName(), CoreName(), CoreName()

    def checkpoint_hyperparameters(self, prefix: str) -> StateDict:
        """Return what a checkpoint holds of the arguments: objects, too.

        Args:
            prefix: How keys begin.
        """
        return keep_hyperparameters(self, prefix)

    def _set_hparams(self, hp: Mapping[str, Any] | Namespace) -> None:
        set_hparams(self, hp)

    def __str__(self) -> str:
        """Return a line for each kind of loader, with the sizes of its data sets; None where it is not available."""
        kinds = {"Train": "train", "Validation": "val", "Test": "test", "Predict": "predict"}
        lines = []
        for title, stage in kinds.items():
            try:
                loaders = getattr(self, f"{stage}_dataloader")()
            except Exception:  # any error of the user's method means that this kind of data is not available yet
                loaders = None
            lines.append(f"{{{title} dataloader: {_sizes_of(loaders)}}}")
        return "\n".join(lines)

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        trusted_classes: TrustedClasses = (),
        **kwargs: Any,
    ) -> Self:
        """Build the data module from a checkpoint; see `lw.DataModule.load_from_checkpoint`.

        Keywords that `__init__` does not take are left out. A file of hyperparameters that is missing is a warning.
        """
        with existing(hparams_file) as file:
            return super().load_from_checkpoint(
                checkpoint_path, map_location, file, weights_only,
                trusted_classes=trusted_classes, **accepted(cls, kwargs),
            )  # fmt: skip

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Take entries out of the hyperparameters."""
        remove_ignored(self, ignore_list)


def load_from_checkpoint(cls: type, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:  # Any: as in the methods
    """Return a module or data module from a checkpoint, bypassing an override in its class."""
    base: Any = LightningDataModule if issubclass(cls, DataModule) else LightningModule
    return base.load_from_checkpoint.__func__(cls, checkpoint_path, *args, **kwargs)


class _FabricAsTrainer:
    """A Fabric instead of a module's Trainer: `self.trainer.device` and the like work."""

    def __init__(self, fabric: Fabric) -> None:
        self._lw_fabric = fabric

    def __getattr__(self, name: str) -> Any:  # Any: the Fabric's
        if name.startswith("__") or not hasattr(self._lw_fabric, name):
            raise AttributeError(f"self.trainer.{name} is not available in a module that runs on Fabric.")
        return getattr(self._lw_fabric, name)


# Lightning's modules inherit their hooks from classes with these names; here one class has all of them.
ModelHooks = Module
CheckpointHooks = Module
DataHooks = Module


def _sizes_of(loaders: Any) -> str:  # Any: a loader, or a collection of any depth
    if loaders is None:
        return "None"
    if not is_collection(loaders):
        return f"size={_size_of(loaders)}"
    members = flatten_loaders(loaders)
    return " ; ".join(f"{number}. size={_size_of(one)}" for number, one in enumerate(members, start=1))


def _size_of(loader: Any) -> object:  # Any: any iterable
    data = getattr(loader, "dataset", loader)
    return len(data) if isinstance(data, Sized) else "NA"
