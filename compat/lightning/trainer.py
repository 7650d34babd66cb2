"""`Trainer` with Lightning's defaults, its state as members, and what libraries touch behind the scenes.

Besides, here is what a program for Lightning may do and Loopwright refuses by itself: methods that look like hooks,
hooks without room for the loader's number, batches whose tensors disagree about their size, and objects in checkpoints.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks import Callback
from ...checkpoint.content import LIGHTNING_VERSION_KEY, OWN_KEY
from ...checkpoint.tools.convert import lightning_loop
from ...data.move import find_batch_size
from ...errors import ModuleError
from ...trainer import lifecycle, trainer
from ...trainer.checkpointing import snapshot
from ...trainer.checkpointing.saving import Saving
from ...trainer.hooks import Hook, check_hook_names, find_override
from ...trainer.loop.fit_loop import FitLoop
from ...trainer.metrics.metrics import Metrics
from ...trainer.setup import begin
from . import connectors
from .enums import TrainerFn, TrainerState
from .imports.finder import VERSION, LightningFinder
from .loggers import TensorBoardLogger
from .module import LightningDataModule, LightningModule
from .objects import keep_hyperparameters, part_hyperparameters, trust_objects
from .overrides import check_overrides

if TYPE_CHECKING:
    from ...data import DataModule
    from ...protocols import StateDict
    from ...trainer.metrics.accumulators import ScalarAccumulator
    from ...trainer.run import Run

__all__ = ["Trainer"]

_ENVIRONMENT_LOGGER = "PL_TRAINER_LOGGER"


class Trainer(trainer.Trainer):
    """`lw.Trainer` as programs for Lightning expect it.

    Logs go to `lightning_logs`, checkpoints have Lightning's entries too, and hold whatever pickle can write; a method
    that looks like a hook is a warning. Arguments are those of `lw.Trainer`.
    """

    def __init__(self, **arguments: Any) -> None:  # Any: see lw.Trainer
        root = os.path.expanduser(str(arguments.get("default_root_dir") or os.getcwd()))
        is_default = arguments.get("logger") in (None, True) and _ENVIRONMENT_LOGGER not in os.environ
        if is_default and not (arguments.get("fast_dev_run") or arguments.get("barebones")) and "://" not in root:
            arguments["logger"] = TensorBoardLogger(root)
        _take_level()
        super().__init__(**arguments)
        check_overrides(self.fabric.strategy, "strategy")
        check_overrides(self.fabric.precision, "precision")
        check_overrides(self.fabric.accelerator, "accelerator")
        connectors.bind_strategy(self)
        self.state = TrainerState()
        self.saving = _Saving(self)
        limits = {name: getattr(self.fit_loop, name) for name in ("max_epochs", "min_epochs", "max_steps", "min_steps")}
        self.fit_loop = _FitLoop(self, **limits)
        is_disabled = self._metrics.is_disabled
        self._metrics = _Metrics(self.fabric.device)
        self._metrics.is_disabled = is_disabled
        self._checkpoint_connector = connectors._CheckpointConnector(self)
        self._callback_connector = connectors._CallbackConnector(self)
        self._accelerator_connector = connectors._AcceleratorConnector(self)

    __init__.__signature__ = inspect.signature(trainer.Trainer.__init__)  # type: ignore[attr-defined]

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Values for the bar: of a key that was logged by step and by epoch, the two."""
        found = super().progress_bar_metrics
        return {name: value for name, value in found.items() if f"{name}_epoch" not in found}

    @property
    def logged_metrics(self) -> dict[str, float]:
        """What was sent to the loggers, the latest of each key."""
        return {name: value for name, value in super().logged_metrics.items() if name != "epoch"}

    @property
    def estimated_stepping_batches(self) -> int | float:
        """How many steps fit takes; after it, how many it would take."""
        if self._run is not None or self._last_run is None:
            return super().estimated_stepping_batches
        epochs, limit = self.max_epochs, self.max_steps
        steps = math.inf
        if epochs not in (None, -1):
            scheduler, batches = self.accumulation_scheduler, self.num_training_batches
            sizes = (
                [self.accumulate_grad_batches] * epochs
                if scheduler is None
                else [scheduler.get_accumulate_grad_batches(epoch) for epoch in range(epochs)]
            )
            steps = sum(math.ceil(batches / size) for size in sizes)
        return steps if limit == -1 else min(steps, limit)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers of the present or last fit."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        connectors.replace_optimizers(self, optimizers)

    def make_run(self, plan: begin.Plan, module: nn.Module, datamodule: DataModule | None) -> Run:
        """Return the run, whose accelerator is set up."""
        run = super().make_run(plan, module, datamodule)
        setup = getattr(self.accelerator, "setup", None)
        if setup is not None:
            setup(self)
        return run

    @property
    def validate_loop(self) -> connectors.LoopView:
        """The validation of `trainer.validate`."""
        return connectors.LoopView(self, "validation")

    @property
    def test_loop(self) -> connectors.LoopView:
        """The loop of `trainer.test`."""
        return connectors.LoopView(self, "test")

    @property
    def predict_loop(self) -> connectors.LoopView:
        """The loop of `trainer.predict`."""
        return connectors.LoopView(self, "predict")

    @property
    def _model(self) -> nn.Module | None:
        return self.lightning_module

    @property
    def _results(self) -> connectors.ResultsView:
        return connectors.ResultsView(self, self.__dict__.get("_epoch_results", {}))

    @_results.setter
    def _results(self, results: Mapping[str, float]) -> None:
        self.__dict__["_epoch_results"] = results  # Loopwright's own use of the name

    @property
    def _precision_plugin(self) -> object:  # a precision of any kind
        return self.precision_plugin


class _Saving(Saving):
    """Writes checkpoints that hold objects, and have what Lightning looks for in one."""

    def _write(self, checkpoint: StateDict, filepaths: Sequence[str | Path], storage_options: object) -> None:
        own = checkpoint.get(OWN_KEY)
        if isinstance(own, dict) and not self._trainer.strategy.saves_shards("full"):
            checkpoint = trust_objects(part_hyperparameters(checkpoint))
            checkpoint.setdefault(LIGHTNING_VERSION_KEY, VERSION)
            checkpoint.setdefault("loops", {"fit_loop": lightning_loop(own.get("progress", {}))})
        super()._write(checkpoint, filepaths, storage_options)


class _FitLoop(FitLoop):
    """The loop of fit, with the names under which Lightning's has its parts."""

    @property
    def epoch_loop(self) -> connectors.LoopView:
        """The batches of an epoch."""
        return connectors.LoopView(self._trainer, "train")

    @property
    def _data_source(self) -> object:
        return self.epoch_loop._data_source

    @property
    def epoch_progress(self) -> SimpleNamespace:
        """Counts of epochs, to be read: `epoch_progress.current.completed`."""
        run, done = self._trainer._run, self._trainer.current_epoch
        begun = done + (run is not None and run.stream is not None and self._trainer.state.stage == "train")
        counts = {"ready": begun, "started": begun, "processed": done, "completed": done}
        return SimpleNamespace(current=SimpleNamespace(**counts), total=SimpleNamespace(**counts))

    @property
    def max_batches(self) -> int | float:
        """Micro-batches of an epoch."""
        return self._trainer.num_training_batches


class _Metrics(Metrics):
    """Weighs a value by the first tensor of a batch whose tensors disagree about its size, as Lightning does."""

    def _weight(self, accumulator: ScalarAccumulator) -> float:
        if self.batch is not None and self.sized is not self.batch:
            size = find_batch_size(self.batch)
            self._size = _first_size(self.batch) if size is None else size
            self.sized = self.batch
        return super()._weight(accumulator)


def _first_size(batch: object) -> int | None:
    """Return the first dimension of the first tensor in a batch, None if there is no tensor."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((size for item in items if (size := _first_size(item)) is not None), None)


def _take_level() -> None:
    """Apply the levels of Lightning's loggers, as set by `getLogger("lightning.pytorch").setLevel(ERROR)`."""
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning"):
        level = logging.getLogger(name).level
        if level != logging.NOTSET:
            logging.getLogger("loopwright").setLevel(level)
            return


def _warn_of_hook_names(owner: object, listener: str, known: set[str]) -> None:
    """Warn of methods that look like hooks and are not, where Lightning's names are Loopwright's; else refuse them.

    Lightning ignores them, and libraries have such methods.
    """
    try:
        check_hook_names(owner, listener, known)
    except ModuleError as error:
        if not any(isinstance(finder, LightningFinder) for finder in sys.meta_path):
            raise
        warnings.warn(f"{error.what} They are not called.", stacklevel=4)


def _find_override(owner: object, name: str, bases: tuple[type, ...]) -> Hook | None:
    """Return a hook as trainer/hooks.py does; one that has no room for the loader's number is called without it.

    Lightning passes that number only where there are several loaders, and a member of an enumeration as a stage.
    """
    hook = find_override(owner, name, bases)
    if hook is None:
        return None
    if name in ("setup", "teardown"):
        return lambda *arguments: hook(*arguments[:-1], TrainerFn(arguments[-1]))
    if name not in _OF_A_LOADER:
        return hook
    count = _OF_A_LOADER[name] + (2 if isinstance(owner, Callback) else 0)
    try:
        inspect.signature(hook).bind(*range(count))
    except TypeError:
        return lambda *arguments: hook(*arguments[:-1])
    return hook


def _hyperparameters(owner: object, prefix: str) -> dict[str, Any]:  # Any: see the function that is replaced
    """Return what a checkpoint holds of a module's arguments: of a LightningModule, objects too."""
    is_lightning = isinstance(owner, LightningModule | LightningDataModule)
    return keep_hyperparameters(owner, prefix) if is_lightning else _plain_hyperparameters(owner, prefix)


_plain_hyperparameters = snapshot._hyperparameters

# Hook of an evaluation's batch -> how many arguments it gets, beside a callback's trainer and module.
_OF_A_LOADER = {
    f"on_{stage}_batch_{when}": count
    for stage in ("validation", "test", "predict")
    for when, count in (("start", 3), ("end", 4))
}

# The replaced functions of the core, which are not part of a run and have no Trainer.
lifecycle.find_override = _find_override  # type: ignore[attr-defined]
snapshot._hyperparameters = _hyperparameters
begin.check_hook_names = trainer.check_hook_names = _warn_of_hook_names  # type: ignore[attr-defined]
