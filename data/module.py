"""`DataModule`: the data of a project in one object; users subclass it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import ConfigError
from ..protocols import AnyBatch, AnyLoaders, MapLocation, StateDict, TrustedClasses
from .hparams import AttributeDict, class_only, save_hyperparameters
from .move import move_to_device

if TYPE_CHECKING:
    from typing import Self

    from ..trainer import Trainer


class DataModule:
    """Prepares data and returns the loaders for fit, validate, test and predict.

    Example:
        class Numbers(lw.DataModule):
            def setup(self, stage):
                self.data = torch.arange(100.0)

            def train_dataloader(self):
                return DataLoader(self.data, batch_size=10, shuffle=True)

    Attributes:
        name: A name for loggers and messages; None by default.
        prepare_data_per_node: Whether `prepare_data` runs once on each node, or once in total.
        allow_zero_length_dataloader_with_multiple_devices: Whether a rank may have no batches while other ranks have
            some.
    """

    name: str | None = None
    prepare_data_per_node: bool = True
    allow_zero_length_dataloader_with_multiple_devices: bool = False

    # Defaults stand on the class, so that a subclass need not call super().__init__().
    _lw_trainer: Trainer | None = None
    _lw_hparams: Any = None
    _lw_hparams_initial: Any = None
    _lw_hparams_name: str | None = None
    _lw_log_hyperparams: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    # --- hooks -----------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download or convert data. Called in one process of each node; do not assign to `self` here."""

    def setup(self, stage: str) -> None:
        """Create the data sets. Called in every process when "fit", "validate", "test" or "predict" begins."""

    def teardown(self, stage: str) -> None:
        """Undo `setup`. Called in every process when the stage ends."""

    def train_dataloader(self) -> AnyLoaders:
        """Return the training data: a loader, or nested lists, tuples and dicts of loaders."""
        raise self._lw_lacks("train_dataloader")

    def val_dataloader(self) -> AnyLoaders:
        """Return the validation data: one loader or several."""
        raise self._lw_lacks("val_dataloader")

    def test_dataloader(self) -> AnyLoaders:
        """Return the test data: one loader or several."""
        raise self._lw_lacks("test_dataloader")

    def predict_dataloader(self) -> AnyLoaders:
        """Return the data to predict on: one loader or several."""
        raise self._lw_lacks("predict_dataloader")

    def on_before_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Return the batch that is moved to the device; called with the batch on the host."""
        return batch

    def transfer_batch_to_device(self, batch: AnyBatch, device: torch.device, dataloader_idx: int) -> AnyBatch:
        """Return the batch on the device."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Return the batch that the step receives; called with the batch on the device."""
        return batch

    def state_dict(self) -> StateDict:
        """Return the state for checkpoints: tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what `state_dict` returned."""

    def on_exception(self, exception: BaseException) -> None:
        """Clean up after a failed run, for which `teardown` is not called."""

    def _lw_lacks(self, hook: str) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} has no {hook}.", fix=f"define {hook}(self) and return a loader from it."
        )

    # --- the trainer -----------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer | None:
        """The trainer that uses this data module; None if not attached."""
        trainer = self._lw_trainer
        return trainer._lw_itself if isinstance(trainer, weakref.ProxyType) else trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._lw_trainer = trainer

    # --- hyperparameters -------------------------------------------------------------------------------------------

    def save_hyperparameters(
        self, *args: Any, ignore: str | Iterable[str] | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Store the arguments of `__init__` in `self.hparams`, in checkpoints and in loggers.

        Args:
            args: Names of arguments, or one dict, namespace, dataclass or OmegaConf object that becomes the
                hyperparameters. Without them, every argument is stored.
            ignore: Name or names of arguments to omit.
            frame: Frame to read the arguments from; None is the caller's.
            logger: Whether they are sent to the loggers.
        """
        if frame is None:
            current = inspect.currentframe()
            frame = current.f_back if current is not None else None
        save_hyperparameters(self, *args, ignore=ignore, frame=frame, logger=logger)

    @property
    def hparams(self) -> Any:
        """Hyperparameters: a mapping with attribute access."""
        if self._lw_hparams is None:
            self._lw_hparams = AttributeDict()
        return self._lw_hparams

    @property
    def hparams_initial(self) -> Any:
        """A copy of the hyperparameters from when they were saved."""
        return AttributeDict() if self._lw_hparams_initial is None else self._lw_hparams_initial

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
        """Build the data module from a checkpoint's hyperparameters and load its state.

        Args:
            checkpoint_path: Path, URL or open file of a checkpoint of Loopwright or Lightning.
            map_location: Device for the tensors, as in torch.load; None is the CPU.
            hparams_file: A .yaml or .csv file with hyperparameters that override the saved ones.
            weights_only: False also unpickles entries that were marked as trusted when saved.
            trusted_classes: See `Module.load_from_checkpoint`.
            kwargs: Arguments of `__init__`; they override the saved ones.

        Raises:
            CheckpointError: The file is damaged.
            ConfigError: An argument of `__init__` is neither saved nor given.
        """
        from ..checkpoint.rebuild import load_datamodule

        datamodule, state = load_datamodule(
            cls, checkpoint_path, map_location, hparams_file, weights_only=weights_only,
            trusted_classes=trusted_classes, overrides=kwargs,
        )  # fmt: skip
        if state:
            datamodule.load_state_dict(state)
        return datamodule

    # --- from data sets --------------------------------------------------------------------------------------------

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Return a data module with a loader for each of the given data sets, and only their hooks.

        The training data are shuffled, unless the data set is iterable; the others are not.

        Args:
            train_dataset: A data set, a sequence of data sets, or a mapping of names to them.
            val_dataset: As `train_dataset`.
            test_dataset: As `train_dataset`.
            predict_dataset: As `train_dataset`.
            batch_size: Samples in a batch.
            num_workers: Worker processes of each loader.
            datamodule_kwargs: Arguments of the class; `batch_size` and `num_workers` are added if it accepts them.
        """
        parameters = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        special = {"batch_size": batch_size, "num_workers": num_workers}
        for key, value in special.items():
            if key in parameters or takes_any:
                datamodule_kwargs.setdefault(key, value)
        datamodule = cls(**datamodule_kwargs)
        sets = {
            "train_dataloader": train_dataset,
            "val_dataloader": val_dataset,
            "test_dataloader": test_dataset,
            "predict_dataloader": predict_dataset,
        }
        for hook, dataset in sets.items():
            if dataset is not None:
                setattr(datamodule, hook, _loader_hook(dataset, hook == "train_dataloader", batch_size, num_workers))
        return datamodule


def _loader_hook(dataset: object, shuffle: bool, batch_size: int, num_workers: int) -> Callable[[], object]:
    """Return a function without arguments that makes the loaders of a data set, or of a collection of them."""

    def one(part: Any) -> DataLoader[AnyBatch]:
        is_shuffled = shuffle and not isinstance(part, IterableDataset)
        return DataLoader(part, batch_size=batch_size, shuffle=is_shuffled, num_workers=num_workers)

    def loaders() -> AnyLoaders:
        if isinstance(dataset, Mapping):
            return {name: one(part) for name, part in dataset.items()}
        if isinstance(dataset, Sequence) and not isinstance(dataset, Dataset) and _holds_sets(dataset):
            return [one(part) for part in dataset]
        return one(dataset)

    return loaders


def _holds_sets(dataset: Sequence[object]) -> bool:
    return bool(len(dataset)) and isinstance(dataset[0], (Dataset, Sequence)) and not isinstance(dataset[0], str)
