"""`lw.Module`: the base class that users subclass. Its hooks are no-ops here; trainer/lifecycle.py calls them."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.hparams import HyperParameters, class_only, save_hyperparameters
from ..data.move import move_to_device
from ..errors import ModuleError
from ..messages import warn
from ..protocols import Closure
from ..strategies.optional import HasMesh
from .loop.optimizers import ManagedOptimizer, toggled

if TYPE_CHECKING:
    from types import FrameType

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.export import ExportedProgram

    from ..callbacks import Callback
    from ..fabric import Fabric
    from ..loggers import Logger
    from ..protocols import AnyBatch, AnyLoaders, AnyOutput, MapLocation, StateDict, Tree, TrustedClasses
    from . import Trainer
    from .metrics.accumulators import Logged, Reduction


class Module(nn.Module):
    """A model with its training code: steps, optimizers and hooks.

    Override `training_step`, `configure_optimizers` and the hooks that you need; docs/lifecycle.md lists them. A hook
    that is not overridden costs nothing.

    Attributes:
        automatic_optimization: Whether the trainer calls backward and steps the optimizer; else `training_step` does.
        strict_loading: Whether the keys of a loaded checkpoint must match those of the module exactly; None is True.
        exclude_frozen_parameters: Whether checkpoints leave out parameters that are frozen and that no optimizer has.
            Loading keeps the module's own values of these, and still requires all other names.
        example_input_array: Example input of `forward`, for summaries, graphs and exports: a tensor, tuple or dict.
        prepare_data_per_node: Whether `prepare_data` runs on each node, or on global rank 0 only.
        allow_zero_length_dataloader_with_multiple_devices: Whether the loader of a rank may be empty.
        compile_blocks: Submodules that `compile=` compiles separately, with a shared graph: classes, names of classes,
            or a predicate on modules. None selects the repeated blocks of a ModuleList or Sequential; () nothing.
    """

    automatic_optimization: bool = True
    strict_loading: bool | None = True
    exclude_frozen_parameters: bool = False
    example_input_array: AnyBatch = None
    prepare_data_per_node: bool = True
    allow_zero_length_dataloader_with_multiple_devices: bool = False
    compile_blocks: object = None
    _lw_is_scripting = False  # set on the class while `to_torchscript` runs

    # For torch.jit.script: what belongs to a run is not part of the program.
    __jit_unused_properties__ = [
        "current_epoch", "device", "device_mesh", "dtype", "fabric", "global_rank", "global_step", "hparams",
        "hparams_initial", "local_rank", "logger", "loggers", "on_gpu", "trainer",
    ]  # fmt: skip
    __jit_ignored_attributes__ = [
        "example_input_array", "compile_blocks", "_lw_trainer", "_lw_fabric", "_lw_log", "_lw_hparams",
        "_lw_hparams_initial", "_lw_compile_options", "_lw_is_scripting",
    ]  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Set by the trainer during a run. Kept out of nn.Module's own registries, and never deep-copied.
        self._lw_trainer: Trainer | None = None
        self._lw_fabric: Fabric | None = None
        self._lw_log: Callable[..., None] | None = None
        if "_lw_hparams" not in self.__dict__:  # else they were saved before this constructor was called
            self._lw_hparams = HyperParameters()
            self._lw_hparams_initial = HyperParameters()
            self._lw_hparams_name: str | None = None
            self._lw_log_hyperparams = False

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        state.pop("_compiled_call_impl", None)  # it would call this object; torch's own modules drop it as well
        state.pop("_lw_fabric_optimizers", None)
        state.update(_lw_trainer=None, _lw_fabric=None, _lw_log=None)
        return state

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(deepcopy(self.__getstate__(), memo))
        return twin

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place, as `nn.Module.compile`: calls of the module and, in a Trainer, its steps.

        Args:
            args: Of torch.compile.
            kwargs: Of torch.compile.
        """
        super().compile(*args, **kwargs)
        self.__dict__["_lw_compile_options"] = kwargs

    # --- steps and configuration: override these -------------------------------------------------------------------

    # Any: steps and forward take what the user declares; with it, type checkers accept every signature in a subclass.
    def forward(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Compute the output of the module. `predict_step` calls it by default."""
        return super().forward(*args, **kwargs)  # nn.Module's own error

    def training_step(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Compute the loss of a micro-batch: `training_step(batch, batch_idx)`.

        Returns:
            A scalar tensor (a mean, which counts as one micro-batch); `lw.Loss(sum, weight)`; a dict with `loss`, or
            with `loss_sum` and `weight`, and anything else for `on_train_batch_end`; or None to skip the batch.
        """
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Evaluate a batch: `validation_step(batch, batch_idx[, dataloader_idx])`."""
        raise NotImplementedError

    def test_step(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Evaluate a test batch: `test_step(batch, batch_idx[, dataloader_idx])`."""
        raise NotImplementedError

    def predict_step(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Predict a batch: `predict_step(batch, batch_idx[, dataloader_idx])`; the default is `self(batch)`."""
        batch = args[0] if args else kwargs.get("batch")
        return self(batch)

    def configure_optimizers(self) -> Any:  # Any: one of the forms below, and each override declares its own
        """Return optimizers and schedules.

        One optimizer; a list of optimizers; `([optimizers], [schedulers])`; `{"optimizer": o, "lr_scheduler": s or
        {"scheduler": s, "interval": "epoch" or "step", "frequency": 1, "monitor": name, "strict": True}}`; a list of
        such dicts; or None. Several optimizers need `automatic_optimization = False`.
        """
        raise NotImplementedError

    def configure_callbacks(self) -> Callback | Sequence[Callback]:
        """Return one or several callbacks of this module; they replace the trainer's of the same class."""
        return []

    def configure_model(self) -> None:
        """Build layers under the strategy and precision. Called at the beginning of each run; must be idempotent."""

    def configure_sharded_model(self) -> None:
        """Older name of `configure_model`."""

    # --- hooks -----------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download or preprocess data. Called once per node, before `setup`; must not assign state."""

    def setup(self, stage: str) -> None:
        """Called on every process at the beginning of "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called at the end of "fit", "validate", "test" or "predict"."""

    def train_dataloader(self) -> AnyLoaders:
        """Return the loader of training batches."""
        raise NotImplementedError

    def val_dataloader(self) -> AnyLoaders:
        """Return the loader, or loaders, of validation batches."""
        raise NotImplementedError

    def test_dataloader(self) -> AnyLoaders:
        """Return the loader, or loaders, of test batches."""
        raise NotImplementedError

    def predict_dataloader(self) -> AnyLoaders:
        """Return the loader, or loaders, of batches to predict."""
        raise NotImplementedError

    def on_fit_start(self) -> None:
        """Called before training."""

    def on_fit_end(self) -> None:
        """Called after training."""

    def on_train_start(self) -> None:
        """Called before the first epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called at the beginning of each epoch."""

    def on_train_epoch_end(self) -> None:
        """Called at the end of each epoch, after its validation."""

    def on_train_batch_start(self, batch: AnyBatch, batch_idx: int) -> int | None:
        """Called before each micro-batch; returning -1 skips the rest of the epoch."""

    def on_train_batch_end(self, outputs: AnyOutput, batch: AnyBatch, batch_idx: int) -> None:
        """Called after each micro-batch; `outputs` is a dict with the detached, undivided `loss`."""

    def on_validation_start(self) -> None:
        """Called before validation."""

    def on_validation_end(self) -> None:
        """Called after validation."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(
        self, outputs: AnyOutput, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each validation batch."""

    def on_test_start(self) -> None:
        """Called before testing."""

    def on_test_end(self) -> None:
        """Called after testing."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each test batch."""

    def on_test_batch_end(self, outputs: AnyOutput, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each test batch."""

    def on_predict_start(self) -> None:
        """Called before predicting."""

    def on_predict_end(self) -> None:
        """Called after predicting."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last batch to predict."""

    def on_predict_batch_start(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each batch to predict."""

    def on_predict_batch_end(
        self, outputs: AnyOutput, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each batch to predict."""

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before a validation inside fit."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Switch to evaluation before validation."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Switch back after validation; the default gives each submodule its earlier mode."""
        self.train()

    def on_test_model_eval(self) -> None:
        """Switch to evaluation before testing."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Switch back after testing; the default gives each submodule its earlier mode."""
        self.train()

    def on_predict_model_eval(self) -> None:
        """Switch to evaluation before predicting."""
        self.eval()

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before the gradients are zeroed, at the first micro-batch of a window."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before each backward pass."""

    def on_after_backward(self) -> None:
        """Called after each backward pass."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before the optimizer steps; gradients are unscaled and not yet clipped."""

    def on_save_checkpoint(self, checkpoint: StateDict) -> None:
        """Add entries to a checkpoint: tensors and plain values."""

    def on_load_checkpoint(self, checkpoint: StateDict) -> None:
        """Read entries of a checkpoint, before its states are restored."""

    def on_before_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Change a batch on the host."""
        return batch

    def transfer_batch_to_device(self, batch: AnyBatch, device: torch.device, dataloader_idx: int) -> AnyBatch:
        """Move a batch to the device."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Change a batch on the device."""
        return batch

    # --- behavior that an override replaces ----------------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,  # Any: torch's, or the wrapper that the trainer passes
        optimizer_closure: Closure | None = None,  # Any: a loss, in the form that the optimizer expects
    ) -> None:
        """Step the optimizer. The closure returns the loss, which is already computed; calling it is optional."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Zero the gradients at the first micro-batch of a window."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:  # Any: a schedule of any library, and its input
        """Step a learning rate schedule; `metric` is None for schedules that do not take one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients before the optimizer step; an override calls `self.clip_gradients`."""
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def count_tokens(self, batch: AnyBatch) -> int:
        """Return the number of tokens in a training batch, for `Trainer(max_tokens=)`. Called on the host.

        The default counts the positions of `batch["input_ids"]`, or of the first integer tensor, padding included.
        """
        from ..data.tokens import count_tokens

        return count_tokens(batch)

    # --- what a module calls ---------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Logged,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: ProcessGroup | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value for the progress bar, loggers and callbacks. It stays on its device, without a host sync.

        Args:
            name: Key. With several evaluation loaders `/dataloader_idx_N` is appended.
            value: A number, a tensor of one element on any device, `lw.Loss`, or a torchmetrics metric.
            prog_bar: Whether the progress bar shows it.
            logger: Whether the loggers get it; None means True.
            on_step: Whether a window's value (the weighted mean over its micro-batches) is logged at log boundaries.
                None is the default of the hook; with on_epoch, the keys are `name_step` and `name_epoch`.
            on_epoch: Whether the value over the epoch is logged.
            reduce_fx: Reduction over an epoch: "mean" (weighted), "sum", "min" or "max".
            enable_graph: Whether the autograd graph is kept.
            sync_dist: Whether step values are reduced over all ranks; if False, they are those of rank 0. Epoch values
                are always reduced over all ranks.
            sync_dist_group: Accepted for compatibility: values are reduced over all ranks.
            add_dataloader_idx: Whether the loader's number is appended to the key.
            batch_size: Weight of the value in means. None takes it from `lw.Loss`, or from the batch where all its
                tensors agree on the first dimension.
            metric_attribute: Accepted for compatibility; a metric object needs no name.
            rank_zero_only: Whether only the values of rank 0 count. In either case a key may be logged on rank 0
                alone: no rank waits for another.

        Raises:
            ModuleError: The value or key is invalid, logging is not allowed here, or a required weight is unknown.
        """
        log = self._lw_log
        if log is None:
            self._lw_log_without_run({name: value})
            return
        log(
            name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, add_dataloader_idx, batch_size,
            sync_dist, rank_zero_only,
        )  # fmt: skip

    def log_dict(
        self,
        dictionary: Mapping[str, Logged],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: ProcessGroup | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log each entry of a dict, or of a torchmetrics MetricCollection; see `log`."""
        log = self._lw_log
        if log is None:
            self._lw_log_without_run(dictionary)
            return
        for name, value in dictionary.items():
            # In the order of Metrics.log.
            args = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, add_dataloader_idx, batch_size)
            log(name, value, *args, sync_dist, rank_zero_only)

    def print(self, *args: object, **kwargs: Any) -> None:  # Any: the arguments of the builtin
        """Print on rank 0, above the progress bar."""
        if self._lw_trainer is not None:
            self._lw_trainer.print(*args, **kwargs)
        elif self._lw_fabric is not None:
            self._lw_fabric.print(*args, **kwargs)
        else:
            print(*args, **kwargs)  # noqa: T201

    def _lw_log_without_run(self, values: Mapping[str, Logged]) -> None:
        """Send values to the loggers of the Fabric immediately, in a handwritten loop."""
        if self._lw_fabric is not None and self._lw_fabric.loggers:
            self._lw_fabric.log_dict(values)
        else:
            _warn_detached()

    def all_gather(self, data: Tree, group: ProcessGroup | bool | None = None, sync_grads: bool = False) -> Any:
        """Gather tensors of all ranks; leaves get a leading dimension when there are several ranks."""
        fabric = self._lw_fabric if self._lw_fabric is not None else self.trainer.fabric
        return fabric.all_gather(data, group=group, sync_grads=sync_grads)

    # Any: one optimizer or a list; a union would make each caller check which.
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of them when there are several.

        Without a Trainer these are the optimizers that `fabric.setup` returned with this module.

        Args:
            use_pl_optimizer: Whether to return the wrapper, whose `step` scales gradients and calls hooks, or torch's
                optimizer. Steps of either are counted.
        """
        of_fabric: list[Optimizer] = self.__dict__.get("_lw_fabric_optimizers") or []
        if self._lw_trainer is None and of_fabric:
            return of_fabric[0] if len(of_fabric) == 1 else of_fabric
        run = self.trainer.latest_run()
        managed = [] if run is None else run.managed
        chosen: Sequence[object] = managed if use_pl_optimizer else [m.optimizer for m in managed]
        return chosen[0] if len(chosen) == 1 else chosen

    def lr_schedulers(self) -> Any:  # Any: as `optimizers`
        """Return None, the schedule, or the list of them when there are several.

        With several ranks, `step(metric)` of a plateau schedule takes the mean over ranks; call it on every rank.
        """
        schedulers = self.trainer.managed_schedulers()
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass in manual optimization or in a handwritten loop, through strategy and precision.

        Raises:
            ModuleError: Optimization is automatic, by a Trainer.
        """
        trainer = self._lw_trainer
        if trainer is None:
            fabric = self._lw_fabric if self._lw_fabric is not None else self.trainer.fabric  # as in `all_gather`
            fabric.backward(loss, *args, **kwargs)
            return
        self._lw_require_manual("manual_backward")
        trainer.manual_backward(loss, *args, **kwargs)

    def count_step(self) -> None:
        """Count a training step that no optimizer makes, before its updates are written: at most one per batch.

        For updates that `training_step` computes itself, and for statistics, with `automatic_optimization = False` or
        without optimizers. `global_step`, limits, rows of the loggers and `every_n_train_steps` then count as with an
        optimizer. On every rank: gradients are averaged over ranks and unscaled first, as a step of an optimizer would.

        Raises:
            ModuleError: No training batch is under way, or the trainer steps an optimizer, and counts its steps.
        """
        self.trainer._lw_count_step()

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> Tensor | None:
        """Clip the optimizer's gradients, unscaled first where precision scales.

        Args:
            optimizer: Optimizer of the parameters.
            gradient_clip_val: Maximum norm or value; None takes the Trainer's. Without either, nothing is clipped.
            gradient_clip_algorithm: "norm" or "value"; None takes the Trainer's, else "norm".

        Returns:
            The norm before clipping by norm: shape (), on the device; None otherwise.
        """
        if self._lw_trainer is None and self._lw_fabric is not None:
            if gradient_clip_algorithm == "value":
                return self._lw_fabric.clip_gradients(self, optimizer, clip_val=gradient_clip_val)
            return self._lw_fabric.clip_gradients(self, optimizer, max_norm=gradient_clip_val)
        return self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Let only this optimizer's parameters require gradients, until `untoggle_optimizer`."""
        self._lw_require_manual("toggle_optimizer")
        self.trainer._lw_toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Undo `toggle_optimizer`."""
        self._lw_require_manual("untoggle_optimizer")
        self.trainer._lw_untoggle(optimizer)

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> Iterator[None]:
        """Toggle the optimizer for a block."""
        with toggled(self.trainer, optimizer):
            yield

    def _lw_require_manual(self, name: str) -> None:
        if self.automatic_optimization:
            raise ModuleError(
                f"{name} was called while optimization is automatic.",
                fix="set self.automatic_optimization = False in __init__, or leave backward and steps to the trainer.",
            )

    def freeze(self) -> Self:
        """Disable gradients of all parameters and switch to evaluation mode."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self.eval()

    def unfreeze(self) -> Self:
        """Enable gradients of all parameters and switch to training mode."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        return self.train()

    # --- hyperparameters and checkpoints ---------------------------------------------------------------------------

    def save_hyperparameters(
        self,
        *args: object,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of `__init__` in `self.hparams`, in checkpoints and in the loggers.

        Args:
            args: Names to keep, or one dict, namespace or OmegaConf object that becomes the hyperparameters. By default
                every argument is kept.
            ignore: A name, or names, to leave out.
            frame: Frame to read the arguments from; the caller's by default.
            logger: Whether they are sent to the loggers.
        """
        if frame is None:
            current = inspect.currentframe()
            frame = current.f_back if current is not None else None
        save_hyperparameters(self, *args, ignore=ignore, frame=frame, logger=logger)

    @property
    def hparams(self) -> Any:  # Any: type checkers do not know its attributes
        """Hyperparameters: a mapping with attribute access."""
        return self._lw_hparams

    @property
    def hparams_initial(self) -> Any:  # Any: as `hparams`
        """Copy of the hyperparameters as they were saved."""
        return self._lw_hparams_initial

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
        """Build the module from a checkpoint's hyperparameters and load its weights.

        Args:
            checkpoint_path: A checkpoint of Loopwright or Lightning.
            map_location: As in torch.load; None loads to the CPU.
            hparams_file: A .yaml or .csv file with hyperparameters that replace the saved ones.
            strict: Whether keys must match exactly; None takes the module's `strict_loading`.
            weights_only: False also unpickles entries that were marked as trusted when saved.
            trusted_classes: Further classes that settings of a command line in the file may name, and modules, for all
                of their classes. Without it, they may name classes that are imported already and derive from the class
                of the parameter's annotation.
            kwargs: Arguments of `__init__`; they take precedence over the saved ones.

        Raises:
            CheckpointError: The file is damaged, or has no weights.
            ConfigError: An argument of `__init__` is neither saved nor given, or is an object that the file must not
                have built.
        """
        from ..checkpoint.rebuild import load_module

        return load_module(
            cls, checkpoint_path, map_location, hparams_file, strict=strict, weights_only=weights_only,
            trusted_classes=trusted_classes, overrides=kwargs,
        )  # fmt: skip

    def to_onnx(self, file_path: str | Path | None = None, input_sample: AnyBatch = None, **kwargs: Any) -> Any:
        """Export `forward` as it is in evaluation with torch.onnx; needs `pip install 'loopwright[onnx]'`.

        Args:
            file_path: Where the model is written; None only returns it.
            input_sample: What `forward` takes: a tensor, a tuple of arguments, or a dict of them by name. None takes
                `example_input_array`.
            kwargs: Further arguments of torch.onnx.export, such as `dynamic_shapes`.

        Returns:
            The torch.onnx.ONNXProgram; None with `dynamo=False`.

        Raises:
            ConfigError: There is no sample.
            MissingDependency: The exporter's package is not installed.
        """
        from .exporting import export_onnx

        return export_onnx(self, file_path, input_sample, kwargs)

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: str = "script",
        example_inputs: AnyBatch = None,
        **kwargs: object,
    ) -> torch.jit.ScriptModule:
        """Return `forward` as it is in evaluation as TorchScript.

        Args:
            file_path: Where the program is written, for torch.jit.load; None only returns it.
            method: "script" reads the source of `forward`, with its branches and loops; "trace" records one call.
            example_inputs: For "trace", what `forward` takes: a tensor, a tuple of arguments, or a dict of them by
                name. None takes `example_input_array`.
            kwargs: Further arguments of torch.jit.script or torch.jit.trace.

        Raises:
            ConfigError: The method is another one, or "trace" has no sample.
        """
        from .exporting import export_script

        return export_script(self, file_path, method, example_inputs, kwargs)

    def to_export(
        self, file_path: str | Path | None = None, example_inputs: AnyBatch = None, **kwargs: Any
    ) -> ExportedProgram:
        """Return `forward` as it is in evaluation as a torch.export.ExportedProgram.

        Args:
            file_path: Where the program is written, for torch.export.load; None only returns it.
            example_inputs: What `forward` takes: a tensor, a tuple of arguments, or a dict of them by name. None takes
                `example_input_array`.
            kwargs: Further arguments of torch.export.export, such as `dynamic_shapes`.

        Raises:
            ConfigError: There is no sample.
        """
        from .exporting import export_program

        return export_program(self, file_path, example_inputs, kwargs)

    # --- where it is -----------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer that this module is attached to.

        Raises:
            RuntimeError: It is attached to none (a ModuleError would be a TypeError, which `hasattr` lets through).
        """
        if self._lw_trainer is None:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            # torch.jit.script looks at every attribute of the class, also at properties that it then leaves out.
            if self._lw_is_scripting or caller.startswith(("torch.jit.", "torch._jit_internal")):
                return None  # type: ignore[return-value]
            stand_in: Trainer | None = self._lw_stand_in_for_trainer()
            if stand_in is not None:
                return stand_in
            raise RuntimeError(
                f"{type(self).__name__} is not attached to a Trainer, or its Trainer no longer exists; call "
                "trainer.fit(module) first, and keep the Trainer in a variable."
            )
        return self._lw_trainer._lw_itself if isinstance(self._lw_trainer, weakref.ProxyType) else self._lw_trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for module in self.modules():
            if isinstance(module, Module):
                module.__dict__["_lw_trainer"] = trainer

    def _lw_stand_in_for_trainer(self) -> Any:  # Any: what a layer above puts instead of a Trainer
        return None

    @property
    def fabric(self) -> Fabric | None:
        """The Fabric that this module runs on, None when detached."""
        return self._lw_fabric

    @fabric.setter
    def fabric(self, fabric: Fabric | None) -> None:
        for module in self.modules():
            if isinstance(module, Module):
                module.__dict__["_lw_fabric"] = fabric

    @property
    def current_epoch(self) -> int:
        """Epochs completed; 0 when detached."""
        return self._lw_trainer.current_epoch if self._lw_trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Training steps taken; 0 when detached."""
        return self._lw_trainer.global_step if self._lw_trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """Rank of this process; 0 when detached."""
        return self._lw_trainer.global_rank if self._lw_trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """Rank on this host; 0 when detached."""
        return self._lw_trainer.local_rank if self._lw_trainer is not None else 0

    @property
    def logger(self) -> Logger | None:
        """First logger of the trainer, or of the Fabric; None without any."""
        return next(iter(self.loggers), None) if self._lw_trainer is None else self._lw_trainer.logger

    @property
    def loggers(self) -> list[Logger]:
        """All loggers of the trainer, or of the Fabric."""
        if self._lw_trainer is not None:
            return self._lw_trainer.loggers
        return [] if self._lw_fabric is None else self._lw_fabric.loggers

    @property
    def device(self) -> torch.device:
        """Device of the first parameter or buffer; the CPU for a module without any."""
        first: Tensor | None = next(chain(self.parameters(), self.buffers()), None)
        if first is not None:
            return first.device
        return self._lw_trainer.fabric.device if self._lw_trainer is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating parameter or buffer; torch's default for a module without any."""
        tensors: Iterable[Tensor] = chain(self.parameters(), self.buffers())
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """Whether the module is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Mesh of a model-parallel strategy; None otherwise."""
        strategy = None if self._lw_trainer is None else self._lw_trainer.strategy
        return strategy.device_mesh if isinstance(strategy, HasMesh) else None


_has_warned_detached = False


def _warn_detached() -> None:
    global _has_warned_detached
    if not _has_warned_detached:
        _has_warned_detached = True
        warn("log() was called on a module that is not in a run; the values are dropped")
