"""`lw.Module`: the base class of users' modules. Its hooks do nothing here; trainer/lifecycle.py calls them."""

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
        automatic_optimization: Whether the trainer runs the backward pass and steps the optimizer. If False,
            `training_step` does both.
        strict_loading: Whether the keys of a loaded checkpoint must match the module's keys exactly; None is True.
        exclude_frozen_parameters: Whether checkpoints omit parameters that are frozen and in no optimizer. Loading
            keeps the module's values of these parameters, and still requires all other names.
        example_input_array: Example input of `forward`, for summaries, graphs and exports: a tensor, tuple or dict.
        prepare_data_per_node: Whether `prepare_data` runs on local rank 0 of each node, or on global rank 0 only.
        allow_zero_length_dataloader_with_multiple_devices: Whether the loader of a rank may be empty.
        compile_blocks: Submodules that `compile=` compiles separately, with a shared graph: classes, names of classes,
            or a predicate on modules. None selects the repeated blocks of a ModuleList or Sequential; () selects none.
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
        """Compile in place, as `nn.Module.compile` does: calls of the module and, in a Trainer, its steps.

        Args:
            args: Positional arguments of torch.compile.
            kwargs: Keyword arguments of torch.compile.
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
            A tensor of shape () on the device (a mean, which counts as one micro-batch); `lw.Loss(sum, weight)`; a dict
            with `loss`, or with `loss_sum` and `weight`, and any other entries for `on_train_batch_end`; or None to
            skip the batch.
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
        such dicts; or None.

        In automatic optimization, several optimizers step after one backward pass: each parameter is in one of them,
        gradients are clipped by the norm of all of them, and `optimizer_step` is called for each. `global_step` counts
        this as one step.
        """
        raise NotImplementedError

    def configure_callbacks(self) -> Callback | Sequence[Callback]:
        """Return one or several callbacks of this module. They replace the Trainer's callbacks of the same class."""
        return []

    def configure_model(self) -> None:
        """Build layers on the device and in the dtype that the run uses. Called in each run; must be idempotent."""

    def configure_sharded_model(self) -> None:
        """Build layers; the older name of `configure_model`."""

    # --- hooks -----------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download or preprocess data. Called before `setup`, in one process of each node; must not assign state."""

    def setup(self, stage: str) -> None:
        """Called on every process at the beginning of "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called on every process at the end of "fit", "validate", "test" or "predict"."""

    def train_dataloader(self) -> AnyLoaders:
        """Return the training loader, or a collection of loaders."""
        raise NotImplementedError

    def val_dataloader(self) -> AnyLoaders:
        """Return the validation loader, or a collection of loaders."""
        raise NotImplementedError

    def test_dataloader(self) -> AnyLoaders:
        """Return the test loader, or a collection of loaders."""
        raise NotImplementedError

    def predict_dataloader(self) -> AnyLoaders:
        """Return the prediction loader, or a collection of loaders."""
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
        """Called before each micro-batch, which is on the device. Return -1 to skip the rest of the epoch."""

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
        """Called before prediction."""

    def on_predict_end(self) -> None:
        """Called after prediction."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last prediction batch."""

    def on_predict_batch_start(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each prediction batch."""

    def on_predict_batch_end(
        self, outputs: AnyOutput, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each prediction batch; `outputs` is the output of `predict_step`."""

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before a validation inside fit."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Switch to evaluation mode before validation."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Switch back after validation. Without an override, each submodule gets the mode that it had before."""
        self.train()

    def on_test_model_eval(self) -> None:
        """Switch to evaluation mode before testing."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Switch back after testing. Without an override, each submodule gets the mode that it had before."""
        self.train()

    def on_predict_model_eval(self) -> None:
        """Switch to evaluation mode before prediction."""
        self.eval()

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before the gradients are zeroed, at the first micro-batch of a window; for each optimizer."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before each backward pass; `loss` has shape (), on the device."""

    def on_after_backward(self) -> None:
        """Called after each backward pass."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before the optimizer steps, for each; gradients are unscaled and not yet clipped."""

    def on_save_checkpoint(self, checkpoint: StateDict) -> None:
        """Add entries to a checkpoint, in place: tensors and plain values."""

    def on_load_checkpoint(self, checkpoint: StateDict) -> None:
        """Read entries of a checkpoint, before its states are restored."""

    def on_before_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Return the batch to move to the device; called with the batch on the host."""
        return batch

    def transfer_batch_to_device(self, batch: AnyBatch, device: torch.device, dataloader_idx: int) -> AnyBatch:
        """Return the batch on the device."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Return the batch that the step receives; called with the batch on the device."""
        return batch

    # --- behavior that an override replaces ----------------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass from the loss: shape (), on the device, scaled if the precision uses a loss scale."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,  # Any: torch's, or the wrapper that the trainer passes
        optimizer_closure: Closure | None = None,  # Any: a loss, in the form that the optimizer expects
    ) -> None:
        """Step the optimizer. The closure returns the loss, which is computed already; calling it is optional.

        Called for each optimizer, in the order of `configure_optimizers`.

        Args:
            epoch: Index of the epoch, from 0.
            batch_idx: Index of the micro-batch in the epoch, from 0.
            optimizer: The optimizer, whose `step` goes through strategy and precision.
            optimizer_closure: Returns the loss. Optimizers such as LBFGS call it to evaluate the window again.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Zero the gradients at the first micro-batch of a window."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:  # Any: a schedule of any library, and its input
        """Step a learning-rate schedule; `metric` is the monitored value, None for schedules that do not take one."""
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
        """Clip gradients before the optimizer step; an override calls `self.clip_gradients`.

        Args:
            optimizer: The optimizer; its gradients are unscaled. Several optimizers of one loss are passed as one, with
                the parameter groups of all.
            gradient_clip_val: The Trainer's `gradient_clip_val`.
            gradient_clip_algorithm: The Trainer's `gradient_clip_algorithm`.
        """
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
            name: The key. With several evaluation loaders, `/dataloader_idx_N` is appended.
            value: A number, a tensor of one element on any device, `lw.Loss`, or a torchmetrics metric.
            prog_bar: Whether the progress bar shows the value.
            logger: Whether the loggers get the value; None is True.
            on_step: Whether a window's value (the weighted mean over its micro-batches) is logged at log boundaries.
                None is the default of the hook; with on_epoch, the keys are `name_step` and `name_epoch`.
            on_epoch: Whether the value over the epoch is logged; None is the default of the hook.
            reduce_fx: Reduction over an epoch: "mean" (weighted), "sum", "min" or "max".
            enable_graph: Whether the autograd graph is kept.
            sync_dist: Whether step values are reduced over all ranks. If False, rank 0's values are logged. Epoch
                values are always reduced over all ranks.
            sync_dist_group: Accepted for compatibility: values are reduced over all ranks.
            add_dataloader_idx: Whether the loader's index is appended to the key.
            batch_size: Weight of the value in means. None takes it from `lw.Loss`, or from the batch if all its tensors
                have the same first dimension.
            metric_attribute: Accepted for compatibility; a metric object needs no name.
            rank_zero_only: Whether only the values of rank 0 count. In either case, rank 0 alone may log a key: no rank
                waits for another.

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
        """Log each entry of a dict, or of a torchmetrics MetricCollection; arguments and errors as in `log`."""
        log = self._lw_log
        if log is None:
            self._lw_log_without_run(dictionary)
            return
        for name, value in dictionary.items():
            # In the order of Metrics.log.
            args = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, add_dataloader_idx, batch_size)
            log(name, value, *args, sync_dist, rank_zero_only)

    def print(self, *args: object, **kwargs: Any) -> None:  # Any: the arguments of the builtin
        """Print as `Trainer.print` does, or `Fabric.print` in a handwritten loop; on every process if detached."""
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
        """Return the data of all ranks. Call it on every rank: it communicates.

        With several ranks, tensors and numbers are stacked along a new first dimension (`world_size`). On a single
        device, the data itself is returned.

        Args:
            data: A tensor or number, or any structure of them, with the same shapes on all ranks.
            group: Process group; None for all ranks.
            sync_grads: Whether gradients flow back through the gather.

        Raises:
            RuntimeError: The module is not attached to a Trainer or a Fabric.
        """
        fabric = self._lw_fabric if self._lw_fabric is not None else self.trainer.fabric
        return fabric.all_gather(data, group=group, sync_grads=sync_grads)

    # Any: one optimizer or a list; a union would make each caller check which.
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list if there are several or none.

        Without a Trainer, these are the optimizers that `fabric.setup` returned with this module.

        Args:
            use_pl_optimizer: Whether to return wrappers, whose `step` goes through strategy and precision and calls
                hooks. False returns torch's optimizers. Steps of either are counted.

        Raises:
            RuntimeError: The module is not attached to a Trainer, and `fabric.setup` returned no optimizers.
        """
        of_fabric: list[Optimizer] = self.__dict__.get("_lw_fabric_optimizers") or []
        if self._lw_trainer is None and of_fabric:
            return of_fabric[0] if len(of_fabric) == 1 else of_fabric
        run = self.trainer.latest_run()
        managed = [] if run is None else run.managed
        chosen: Sequence[object] = managed if use_pl_optimizer else [m.optimizer for m in managed]
        return chosen[0] if len(chosen) == 1 else chosen

    def lr_schedulers(self) -> Any:  # Any: as `optimizers`
        """Return the schedule, a list if there are several, or None without any.

        With several ranks, `step(metric)` of a plateau schedule uses the metric's mean over ranks. Call it on every
        rank.

        Raises:
            RuntimeError: The module is not attached to a Trainer.
        """
        schedulers = self.trainer.managed_schedulers()
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass in manual optimization or in a handwritten loop, through strategy and precision.

        Args:
            loss: The loss: shape (), on the device.
            args: Positional arguments of `Tensor.backward`.
            kwargs: Keyword arguments of `Tensor.backward`.

        Raises:
            ModuleError: A Trainer optimizes automatically.
            RuntimeError: The module is not attached to a Trainer or a Fabric.
        """
        trainer = self._lw_trainer
        if trainer is None:
            fabric = self._lw_fabric if self._lw_fabric is not None else self.trainer.fabric  # as in `all_gather`
            fabric.backward(loss, *args, **kwargs)
            return
        self._lw_require_manual("manual_backward")
        trainer.manual_backward(loss, *args, **kwargs)

    def count_step(self) -> None:
        """Count a training step without an optimizer; call it before the parameters change, at most once per batch.

        For updates that `training_step` computes itself, with `automatic_optimization = False` or without optimizers.
        `global_step`, limits, rows of the loggers and `every_n_train_steps` then count this step, too. Call it on every
        rank: gradients are first averaged over ranks and unscaled, as before a step of an optimizer.

        Raises:
            ModuleError: No training batch is in progress, or the Trainer steps an optimizer and counts its steps.
        """
        self.trainer._lw_count_step()

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> Tensor | None:
        """Clip the gradients of an optimizer's parameters, in place. If a loss scale is used, they are unscaled first.

        Args:
            optimizer: The optimizer.
            gradient_clip_val: Maximum norm or absolute value, or for "agc" the factor; None is the Trainer's. 0 clips
                nothing.
            gradient_clip_algorithm: "norm", "value" or "agc"; None is the Trainer's, else "norm".

        Returns:
            By norm, the total norm before clipping: shape (), on the device. Otherwise None.

        Raises:
            ConfigError: The algorithm is unknown; in a handwritten loop, the value is not positive.
            ModuleError: The Trainer has no run in progress.
        """
        if self._lw_trainer is None and self._lw_fabric is not None:
            if gradient_clip_algorithm == "value":
                return self._lw_fabric.clip_gradients(self, optimizer, clip_val=gradient_clip_val)
            if gradient_clip_algorithm == "agc":
                return self._lw_fabric.clip_gradients(self, optimizer, agc_factor=gradient_clip_val)
            return self._lw_fabric.clip_gradients(self, optimizer, max_norm=gradient_clip_val)
        return self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Disable gradients of the other optimizers' parameters, until `untoggle_optimizer`.

        Raises:
            ModuleError: Optimization is automatic.
        """
        self._lw_require_manual("toggle_optimizer")
        self.trainer._lw_toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Undo `toggle_optimizer`.

        Raises:
            ModuleError: Optimization is automatic.
        """
        self._lw_require_manual("untoggle_optimizer")
        self.trainer._lw_untoggle(optimizer)

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> Iterator[None]:
        """Toggle the optimizer within a `with` block; see `toggle_optimizer`."""
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
        """Save the arguments of `__init__` in `self.hparams`, in checkpoints and in the loggers.

        Args:
            args: Names of arguments to save, or one dict, namespace, dataclass or OmegaConf object that becomes the
                hyperparameters. Without them, every argument is saved.
            ignore: Name or names of arguments to omit.
            frame: Frame to read the arguments from; None is the caller's.
            logger: Whether they are sent to the loggers.

        Raises:
            ConfigError: A name is not an argument, or an object has another type.
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
        """A copy of the hyperparameters from when they were saved."""
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
            checkpoint_path: Path, URL or open file of a checkpoint of Loopwright or Lightning.
            map_location: Device for the tensors, as in torch.load; None is the CPU.
            hparams_file: A .yaml or .csv file with hyperparameters that replace the saved ones.
            strict: Whether keys must match exactly; None is the module's `strict_loading`.
            weights_only: False also unpickles entries that were marked as trusted when saved.
            trusted_classes: Further classes that command-line settings in the file may name; a Python module stands for
                all its classes. By default, settings may only name classes that are imported already and derive from
                the class in the parameter's annotation.
            kwargs: Arguments of `__init__`; they take precedence over the saved ones.

        Raises:
            CheckpointError: The file is damaged, or has no weights.
            ConfigError: An argument of `__init__` is neither saved nor passed, or the file names a class that it may
                not name.
        """
        from ..checkpoint.rebuild import load_module

        return load_module(
            cls, checkpoint_path, map_location, hparams_file, strict=strict, weights_only=weights_only,
            trusted_classes=trusted_classes, overrides=kwargs,
        )  # fmt: skip

    def to_onnx(self, file_path: str | Path | None = None, input_sample: AnyBatch = None, **kwargs: Any) -> Any:
        """Export `forward` in evaluation mode with torch.onnx; requires `pip install 'loopwright[onnx]'`.

        Args:
            file_path: File to write; None only returns the program.
            input_sample: Input of `forward`: a tensor, a tuple of arguments, or a dict of arguments by name. None is
                `example_input_array`.
            kwargs: Further arguments of torch.onnx.export, such as `dynamic_shapes`.

        Returns:
            The torch.onnx.ONNXProgram; None with `dynamo=False`.

        Raises:
            ConfigError: There is no sample input.
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
        """Return `forward` in evaluation mode as TorchScript.

        Args:
            file_path: File to write, for torch.jit.load; None only returns the program.
            method: "script" compiles the source of `forward`, with its branches and loops; "trace" records one call.
            example_inputs: For "trace", the input of `forward`: a tensor, a tuple of arguments, or a dict of arguments
                by name. None is `example_input_array`.
            kwargs: Further arguments of torch.jit.script or torch.jit.trace.

        Raises:
            ConfigError: The method is unknown, or "trace" has no sample input.
        """
        from .exporting import export_script

        return export_script(self, file_path, method, example_inputs, kwargs)

    def to_export(
        self, file_path: str | Path | None = None, example_inputs: AnyBatch = None, **kwargs: Any
    ) -> ExportedProgram:
        """Return `forward` in evaluation mode as a torch.export.ExportedProgram.

        Args:
            file_path: File to write, for torch.export.load; None only returns the program.
            example_inputs: Input of `forward`: a tensor, a tuple of arguments, or a dict of arguments by name. None is
                `example_input_array`.
            kwargs: Further arguments of torch.export.export, such as `dynamic_shapes`.

        Raises:
            ConfigError: There is no sample input.
        """
        from .exporting import export_program

        return export_program(self, file_path, example_inputs, kwargs)

    # --- where it is -----------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The Trainer that this module is attached to.

        Raises:
            RuntimeError: It is not attached to one, or its Trainer no longer exists.
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
        """The Fabric that this module runs on; None if detached."""
        return self._lw_fabric

    @fabric.setter
    def fabric(self, fabric: Fabric | None) -> None:
        for module in self.modules():
            if isinstance(module, Module):
                module.__dict__["_lw_fabric"] = fabric

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs; 0 if detached."""
        return self._lw_trainer.current_epoch if self._lw_trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Number of training steps taken; 0 if detached."""
        return self._lw_trainer.global_step if self._lw_trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes; 0 without a Trainer."""
        return self._lw_trainer.global_rank if self._lw_trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """Rank of this process among the processes of its node; 0 without a Trainer."""
        return self._lw_trainer.local_rank if self._lw_trainer is not None else 0

    @property
    def logger(self) -> Logger | None:
        """The first logger of the Trainer or the Fabric; None without loggers."""
        return next(iter(self.loggers), None) if self._lw_trainer is None else self._lw_trainer.logger

    @property
    def loggers(self) -> list[Logger]:
        """All loggers of the Trainer or the Fabric."""
        if self._lw_trainer is not None:
            return self._lw_trainer.loggers
        return [] if self._lw_fabric is None else self._lw_fabric.loggers

    @property
    def device(self) -> torch.device:
        """Device of the first parameter or buffer. Without any, the Trainer's device; the CPU if detached."""
        first: Tensor | None = next(chain(self.parameters(), self.buffers()), None)
        if first is not None:
            return first.device
        return self._lw_trainer.fabric.device if self._lw_trainer is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter or buffer; torch's default dtype without any."""
        tensors: Iterable[Tensor] = chain(self.parameters(), self.buffers())
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """Whether the module is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Device mesh of a model-parallel strategy; None otherwise."""
        strategy = None if self._lw_trainer is None else self._lw_trainer.strategy
        return strategy.device_mesh if isinstance(strategy, HasMesh) else None


_has_warned_detached = False


def _warn_detached() -> None:
    global _has_warned_detached
    if not _has_warned_detached:
        _has_warned_detached = True
        warn("log() was called on a module that is not in a run; the values are dropped")
