"""`lw.Trainer`: the configuration of a training, and its verbs fit, validate, test and predict.

Each verb runs a loop within a session (session/), which sets the run up and restores the state that it changed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..callbacks import Callback
from ..data.move import find_batch_size
from ..errors import ModuleError
from ..fabric import Fabric
from ..loggers import Logger
from ..profilers import PassThroughProfiler, Profiler, resolve_profiler
from ..protocols import StorageOptions
from .attributes import TrainerAttributes
from .checkpointing.saving import Saving
from .lifecycle import hook_names
from .loop import manual
from .loop.fit_loop import FitLoop
from .loop.non_finite import LossWatch
from .loop.optimizers import ManagedOptimizer
from .loop.run_signals import RunSignals
from .metrics.log_output import LogOutput, tables_of
from .metrics.metrics import Metrics
from .run import FitRun, Run
from .session.arguments import Arguments, from_environment
from .session.assemble import order_callbacks, require_callbacks
from .session.checks import both_given, compare_data, split_datamodule
from .session.loaders import StageLoaders
from .state import Progress, TrainerState

if TYPE_CHECKING:
    from datetime import timedelta

    from ..data.module import DataModule
    from ..fabric.compiling import Compiler
    from ..planning import Plan
    from ..protocols import AnyOutput, Batch, Loaders, StateDict
    from .behavior import Behavior
    from .loop.training_rng import TrainingRng
    from .replica_groups import TorchFT
    from .session.evaluation import EvaluationSession
    from .session.fit import FitSession
    from .session.session import Session
    from .timeline.timeline import Timeline


class Trainer(TrainerAttributes):
    """Train, validate, test and predict with a module.

    All arguments are keyword-only. Each can also be set by an environment variable `LOOPWRIGHT_TRAINER_<NAME>`; a value
    that is passed takes precedence.

    Args:
        accelerator: Kind of device: "auto", "cpu", "gpu", "cuda", "mps", "tpu", or an Accelerator.
        strategy: How the model is distributed over devices: "auto", "single_device", another registered name, or a
            Strategy.
        devices: Number of devices per node, a list of their indices, -1 for all, or "auto".
        num_nodes: Number of nodes (machines).
        when_short: Reaction to fewer devices than `devices` on this machine: "raise", or "fewer", which uses them.
        precision: "32-true" (default), "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "float8" or
            "mxfp8".
        logger: True for TensorBoard, False for none, a Logger, a name such as "csv" or "wandb", or a list of these.
        callbacks: A Callback or a list of Callbacks. The list is not changed.
        fast_dev_run: True for one batch of every stage, or a number of batches. Nothing is logged or saved.
        max_epochs: Maximum number of epochs; -1 for no limit. None is 1000 without other limits.
        min_epochs: Minimum number of epochs. Earlier requests to stop are ignored.
        max_steps: Maximum number of optimizer steps; -1 for no limit.
        min_steps: Minimum number of optimizer steps. Earlier requests to stop are ignored.
        max_samples: Maximum number of training samples, over all ranks: training stops at the first step that reaches
            it. -1 or None for no limit.
        max_tokens: Maximum number of training tokens, counted by `Module.count_tokens`; as `max_samples`.
        max_time: Maximum training time: "DD:HH:MM:SS", a timedelta, or a dict of its arguments.
        limit_train_batches: Training batches per epoch: a number, or a fraction from 0.0 to 1.0.
        limit_val_batches: Validation batches per loader; as `limit_train_batches`.
        limit_test_batches: Test batches per loader; as `limit_train_batches`.
        limit_predict_batches: Prediction batches per loader; as `limit_train_batches`.
        overfit_batches: Number or fraction of batches to train and validate on, without shuffling; 0 for no limit.
        val_check_interval: Interval between two validations: a number of training batches, a fraction of an epoch, or
            a duration (a timedelta, "DD:HH:MM:SS", or a dict of timedelta's arguments). None is 1.0, once per epoch.
        check_val_every_n_epoch: Number of epochs between two validations; None counts `val_check_interval` across
            epochs.
        num_sanity_val_steps: Validation batches to run before training; -1 for all, 0 for none. None is 2.
        log_every_n_steps: Optimizer steps between two rows of step values for the loggers; 0 for none. None is 50.
        enable_checkpointing: Whether a ModelCheckpoint is added if none is passed.
        enable_progress_bar: Whether a progress bar is shown.
        enable_model_summary: Whether a summary of the model is printed.
        accumulate_grad_batches: Micro-batches per optimizer step.
        accumulate_across_epochs: Whether an accumulation window that is incomplete at the end of an epoch continues in
            the next epoch. Otherwise it ends in a step with fewer micro-batches, as it does in the last epoch.
        grad_accumulation_dtype: dtype in which gradients of 16-bit parameters are summed, over the micro-batches of a
            window and over ranks: "float32", or None for the parameters' dtype.
        global_batch_size: Samples per optimizer step, over all ranks. It replaces `accumulate_grad_batches`, which is
            then derived from the loader's batch size and the number of ranks; their product must divide it.
        gradient_clip_val: Maximum gradient norm, or maximum absolute value; None or 0 for no clipping.
        gradient_clip_algorithm: "norm", "value", or "agc" (adaptive: `gradient_clip_val` is the factor, such as 0.01);
            None is "norm".
        deterministic: Whether deterministic algorithms are used: True, False, or "warn".
        benchmark: Value of torch.backends.cudnn.benchmark during a run; None leaves it unchanged.
        matmul_precision: Precision of float32 matrix products during a run: "highest" (float32), "high" (tf32 if the
            device has it), "medium" (bfloat16). None leaves torch's setting. See `torch.set_float32_matmul_precision`.
        inference_mode: Whether validate, test and predict run under torch.inference_mode instead of no_grad.
            Validations inside fit always run under no_grad, because training cannot use inference tensors that they
            leave in the module.
        use_distributed_sampler: Whether the data are sharded over ranks.
        profiler: "simple", "advanced", "pytorch", "xla", or a Profiler.
        detect_anomaly: Whether autograd's anomaly detection is on in fit: a NaN in a backward pass raises an error that
            names the operation.
        barebones: Whether to turn off every feature that costs time: checkpoints, logging, progress bar, model summary
            and sanity check.
        plugins: A Precision, CheckpointIO, ClusterEnvironment or LayerSync, or a list with at most one of each.
        sync_batchnorm: Whether batch norm statistics are synchronized over ranks.
        reload_dataloaders_every_n_epochs: Number of epochs after which the loader hooks are called again; 0 for never.
        default_root_dir: Directory or URL for logs and checkpoints; None is the working directory.
        enable_autolog_hparams: Whether hyperparameters are sent to the loggers.
        model_registry: Not supported; None only.
        compile: Whether to compile the module's repeated blocks, or its steps if it has none, with torch.compile: True,
            False, or a dict of arguments of torch.compile such as {"mode": "max-autotune"}. See docs/compile.md.
        nonfinite_loss: Policy for a NaN or infinite loss: "warn" (once, with the step), "raise" (at the next log
            boundary and before a checkpoint is written), "skip" (the step is skipped, reported once and counted in
            `trainer.progress.nonfinite_steps` and the rows of the loggers; reads each loss on the host), or "ignore".
        activation_checkpointing: Modules whose activations are recomputed in the backward pass instead of stored: True
            for all repeated blocks, the fraction of blocks that store theirs (0.5), classes or their names, or a
            function of a module. With `compile`, a fraction is the memory budget of torch's partitioner.
        offload_activations: Whether activations of 1 MiB or more are moved to host memory until the backward pass.
        on_oom: Reaction to an out-of-memory error in training: "raise"; or "shrink", which splits each batch of the
            window in two on all ranks and repeats the window with the same gradient. Later windows start with the
            smaller parts. See docs/guides/out-of-memory.md.
        fault_tolerance: `TorchFT(...)` for replica groups, which continue when one of them dies; see docs/torchft.md.
        reproducible: "world" for the same bits on every number of ranks; see docs/reproducible-world.md. None: not so.
        micro_shards: Batches of the loader in each step over all ranks, a power of two, for `reproducible`.

    Raises:
        ConfigError: Names every invalid argument.
    """

    def __init__(
        self,
        *,
        # Any: a name or number for the command line, or an object that the program passes
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Logger | str | Sequence[Logger | str] | bool | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, float] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, float] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,  # Any: as `accelerator`
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        nonfinite_loss: str = "warn",
        global_batch_size: int | None = None,
        max_samples: int | None = None,
        max_tokens: int | None = None,
        accumulate_across_epochs: bool = False,
        grad_accumulation_dtype: str | torch.dtype | None = None,
        matmul_precision: str | None = None,
        compile: bool | dict[str, Any] = False,  # Any: arguments of torch.compile
        activation_checkpointing: Any = None,  # Any: as `accelerator`
        offload_activations: bool = False,
        on_oom: str = "raise",
        when_short: str = "raise",
        fault_tolerance: TorchFT | None = None,
        reproducible: str | None = None,
        micro_shards: int | None = None,
    ) -> None:
        self.behavior = self.make_behavior()
        given = Arguments(
            accelerator=accelerator, strategy=strategy, devices=devices, num_nodes=num_nodes, precision=precision,
            logger=logger, callbacks=callbacks, fast_dev_run=fast_dev_run, max_epochs=max_epochs,
            min_epochs=min_epochs, max_steps=max_steps, min_steps=min_steps, max_time=max_time,
            limit_train_batches=limit_train_batches, limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches, limit_predict_batches=limit_predict_batches,
            overfit_batches=overfit_batches, val_check_interval=val_check_interval,
            check_val_every_n_epoch=check_val_every_n_epoch, num_sanity_val_steps=num_sanity_val_steps,
            log_every_n_steps=log_every_n_steps, enable_checkpointing=enable_checkpointing,
            enable_progress_bar=enable_progress_bar, enable_model_summary=enable_model_summary,
            accumulate_grad_batches=accumulate_grad_batches, gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm, deterministic=deterministic, benchmark=benchmark,
            inference_mode=inference_mode, use_distributed_sampler=use_distributed_sampler, profiler=profiler,
            detect_anomaly=detect_anomaly, barebones=barebones, plugins=plugins, sync_batchnorm=sync_batchnorm,
            reload_dataloaders_every_n_epochs=reload_dataloaders_every_n_epochs, default_root_dir=default_root_dir,
            enable_autolog_hparams=enable_autolog_hparams, model_registry=model_registry,
            nonfinite_loss=nonfinite_loss, global_batch_size=global_batch_size, max_samples=max_samples,
            max_tokens=max_tokens, accumulate_across_epochs=accumulate_across_epochs,
            grad_accumulation_dtype=grad_accumulation_dtype, matmul_precision=matmul_precision, compile=compile,
            activation_checkpointing=activation_checkpointing, offload_activations=offload_activations,
            on_oom=on_oom, when_short=when_short, fault_tolerance=fault_tolerance,
            reproducible=reproducible, micro_shards=micro_shards,
        )  # fmt: skip
        given = self._lw_read_environment(given)
        self._lw_same_everywhere = given.same_everywhere()
        self._lw_arguments = arguments = given.resolve()
        self.fabric = self._lw_make_fabric(arguments)
        self.state = TrainerState()
        self.progress = Progress()
        self.profiler: Profiler = resolve_profiler(arguments.profiler) or PassThroughProfiler()
        self.default_root_dir = os.path.expanduser(str(arguments.default_root_dir or os.getcwd()))
        self.use_distributed_sampler = arguments.use_distributed_sampler
        self.sync_batchnorm = arguments.sync_batchnorm
        self.enable_autolog_hparams = arguments.enable_autolog_hparams
        self.should_stop = False
        self.ckpt_path: str | None = None
        self.accumulate_grad_batches = arguments.accumulate_grad_batches
        self.gradient_clip_val = arguments.gradient_clip_val
        self.gradient_clip_algorithm = arguments.gradient_clip_algorithm
        # Here and in a run that has ended: no cycle, so that `del trainer, module` frees memory at once.
        weak: Trainer = weakref.proxy(self)
        self.fit_loop = FitLoop(
            weak,
            max_epochs=arguments.max_epochs,
            min_epochs=arguments.min_epochs,
            max_steps=arguments.max_steps,
            min_steps=arguments.min_steps,
            seams=self.behavior.loop,
        )
        self._lw_loaders = StageLoaders(arguments)
        self._lw_output = LogOutput(arguments.logger, root=self.default_root_dir, is_trial=bool(arguments.fast_dev_run))
        # Where the data were when the last fit ended.
        self._lw_stream_state: StateDict | None = None
        self._lw_train_source: Loaders = None  # of the last fit: loaders, or who makes them
        # The window that was under way when the last fit ended, after an epoch that cut it short.
        self._lw_carried_states: StateDict = {}
        self._lw_metrics = Metrics(self.fabric.device)
        self._lw_metrics.is_disabled = arguments.barebones
        self._lw_watch_losses = LossWatch(arguments.nonfinite_loss)
        self._lw_session: Session | None = None
        self._lw_run: Run | None = None
        self._lw_last_run: Run | None = None
        self._lw_last_fit: Run | None = None
        self._lw_run_signals = RunSignals()
        self._lw_timeline: Timeline | None = None
        self._lw_toggles = manual.Toggles()
        self._lw_training_rng: TrainingRng | None = None
        # The module that the user compiled last, with what compiles as the user did.
        self._lw_own_compiler: tuple[nn.Module, Compiler | None] | None = None
        self._lw_results: Mapping[str, float] = {}
        self._lw_saving = Saving(weak)
        self._lw_identity = os.urandom(8).hex()  # the same in processes that this one starts
        self._lw_is_in_child = False
        self._lw_spawned_module: nn.Module | None = None
        self._lw_assigned_datamodule: DataModule | None = None
        self._lw_spawned_checkpoint: StateDict | None = None
        self.callbacks: list[Callback] = self._lw_make_callbacks(arguments.callbacks)

    def make_behavior(self) -> Behavior:
        """Return this Trainer's `Behavior`. The constructor calls it first; layers for other libraries override it."""
        from .behavior import Behavior

        return Behavior()

    def _lw_read_environment(self, given: Arguments) -> Arguments:
        return from_environment(given)

    def _lw_make_fabric(self, arguments: Arguments) -> Fabric:
        return arguments.make_fabric()

    def _lw_make_callbacks(self, callbacks: Any) -> list[Callback]:  # Any: checked here
        own = [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        require_callbacks(own)
        for callback in own:
            self.behavior.check_hook_names(callback, "callbacks", hook_names("callbacks"))
        return order_callbacks([*own, *self.behavior.default_callbacks(self._lw_arguments, own)])

    # --- the four verbs --------------------------------------------------------------------------------------------

    def fit(
        self,
        model: nn.Module,
        train_dataloaders: Loaders = None,
        val_dataloaders: Loaders = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train the module.

        Args:
            model: An lw.Module, an nn.Module with `training_step` and `configure_optimizers`, or a transformers or peft
                model.
            train_dataloaders: A loader, a collection of loaders, or a DataModule. None calls the module's hook.
            val_dataloaders: A loader or a collection of loaders. None calls the module's hook, if it has one.
            datamodule: DataModule that provides the loaders instead.
            ckpt_path: Checkpoint to resume from: a path; "last", the newest complete one, or a fresh start without one;
                "best"; or None.
            weights_only: False also unpickles objects that were marked as trusted in the checkpoint.

        Raises:
            ConfigError, ModuleError, DataError: Before training: arguments, module or data are invalid; the message
                contains the remedy.
            CheckpointError: The checkpoint at `ckpt_path` is missing, damaged or does not fit.
        """
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule, "train_dataloaders")
        if datamodule is not None and (train_dataloaders is not None or val_dataloaders is not None):
            raise both_given("train_dataloaders or val_dataloaders")
        if not self._lw_is_in_child:  # where objects are copies of the user's
            compare_data(self, model if datamodule is None else datamodule, train_dataloaders)
        if self._lw_starts_processes:
            self._lw_launch(
                "fit", model, train_dataloaders=train_dataloaders, val_dataloaders=val_dataloaders,
                datamodule=datamodule, ckpt_path=ckpt_path, weights_only=weights_only,
            )  # fmt: skip
        else:
            with self._lw_fit_session(
                model,
                datamodule=datamodule,
                given={"train": train_dataloaders, "validation": val_dataloaders},
                ckpt_path=ckpt_path,
                is_trusted=weights_only is False,
            ) as session:
                session.start()
                with session.gradients():
                    self.fit_loop.run(session.run, session.put_back)
                session.finish()
        if not self._lw_is_in_child:
            for callback in self.callbacks:
                if hasattr(callback, "_lw_after_fit"):
                    callback._lw_after_fit()

    def plan(
        self,
        model: nn.Module,
        data: Loaders | DataModule = None,
        *,
        devices: int = 1,
        num_nodes: int = 1,
        memory: str | float | None = None,
        bandwidth: str | float = "50GB",
    ) -> Plan:
        """Return the memory and communication that `fit` would need per device with each strategy; see `lw.plan`.

        Nothing is launched or trained. Precision, accumulation and optimizers come from the Trainer and the module.

        Args:
            model: The module, which is not changed.
            data: Training loader or DataModule, whose first batch is read. None calls the module's hook.
            devices: Number of devices per node; this machine need not have them.
            num_nodes: Number of nodes.
            memory: Memory of a device: bytes, or a text such as "80GB". None if unknown.
            bandwidth: Bytes per second, or a text such as "50GB", that a device sends to the next one in a ring.
        """
        from .plan_fit import plan_fit

        return plan_fit(self, model, data, devices=devices, num_nodes=num_nodes, memory=memory, bandwidth=bandwidth)

    def validate(
        self,
        model: nn.Module | None = None,
        dataloaders: Loaders = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Evaluate on the validation loaders.

        Args:
            model: The module. None is the module of the last run, with the weights of its best checkpoint unless
                `ckpt_path` is passed.
            dataloaders: A loader, a collection of loaders, or a DataModule. None calls the module's hook.
            ckpt_path: Checkpoint whose weights are loaded: a path, "best" or "last".
            verbose: Whether the metrics are printed as a table.
            datamodule: DataModule that provides the loaders instead.
            weights_only: False also unpickles objects that were marked as trusted in the checkpoint.

        Returns:
            For each loader, the metrics that were logged over the epoch: key -> host number.
        """
        return self._lw_evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def test(
        self,
        model: nn.Module | None = None,
        dataloaders: Loaders = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Evaluate on the test loaders.

        Args:
            model: The module; None as in `validate`.
            dataloaders: A loader, a collection of loaders, or a DataModule. None calls the module's hook.
            ckpt_path: Checkpoint whose weights are loaded: a path, "best" or "last".
            verbose: Whether the metrics are printed as a table.
            datamodule: DataModule that provides the loaders instead.
            weights_only: False also unpickles objects that were marked as trusted in the checkpoint.

        Returns:
            As `validate`.
        """
        return self._lw_evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def predict(
        self,
        model: nn.Module | None = None,
        dataloaders: Loaders = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[AnyOutput] | list[list[AnyOutput]] | None:
        """Run `predict_step` on each batch of the loaders.

        Args:
            model: The module; None as in `validate`.
            dataloaders: A loader, a collection of loaders, or a DataModule. None calls the module's hook.
            datamodule: DataModule that provides the loaders instead.
            return_predictions: Whether to collect and return the predictions; None is True. False keeps none in memory.
            ckpt_path: Checkpoint whose weights are loaded: a path, "best" or "last".
            weights_only: False also unpickles objects that were marked as trusted in the checkpoint.

        Returns:
            The output of `predict_step` for each batch, on the CPU, in the order of the data; a list of such lists for
            several loaders; None with `return_predictions=False`.
        """
        keep = return_predictions is not False
        dataloaders, datamodule = split_datamodule(dataloaders, datamodule, "dataloaders")
        if self._lw_starts_processes:
            predictions: list[AnyOutput] | None = self._lw_launch(
                "predict", model, dataloaders=dataloaders, datamodule=datamodule,
                return_predictions=return_predictions, ckpt_path=ckpt_path, weights_only=weights_only,
            )  # fmt: skip
            return predictions
        with self._lw_evaluation_session(
            "predict", model, datamodule=datamodule, dataloaders=dataloaders, ckpt_path=ckpt_path,
            is_trusted=weights_only is False,
        ) as session:  # fmt: skip
            session.start()
            outputs = session.evaluate(keep=keep)
            session.finish()
        if not keep:
            return None
        return outputs[0] if len(outputs) == 1 else outputs

    def _lw_evaluate(
        self,
        verb: str,
        model: nn.Module | None,
        dataloaders: Loaders,
        ckpt_path: str | Path | None,
        verbose: bool,
        datamodule: DataModule | None,
        weights_only: bool | None,
    ) -> list[Mapping[str, float]]:
        dataloaders, datamodule = split_datamodule(dataloaders, datamodule, "dataloaders")
        if self._lw_starts_processes:
            return self._lw_launch(  # type: ignore[no-any-return]
                verb, model, dataloaders=dataloaders, ckpt_path=ckpt_path, verbose=verbose,
                datamodule=datamodule, weights_only=weights_only,
            )  # fmt: skip
        with self._lw_evaluation_session(
            verb, model, datamodule=datamodule, dataloaders=dataloaders, ckpt_path=ckpt_path,
            is_trusted=weights_only is False,
        ) as session:  # fmt: skip
            session.start()
            session.evaluate()
            results = session.results()
            if verbose and self.is_global_zero and results:
                self._lw_show_results(verb, results)
            session.finish()
        return results

    def _lw_fit_session(self, model: nn.Module, **arguments: Any) -> FitSession:  # Any: see FitSession
        from .session.fit import FitSession

        return FitSession(self, model, **arguments)

    def _lw_evaluation_session(self, verb: str, model: nn.Module | None, **arguments: Any) -> EvaluationSession:
        from .session.evaluation import EvaluationSession

        return EvaluationSession(self, verb, model, **arguments)

    def _lw_show_results(self, verb: str, results: list[Mapping[str, float]]) -> None:
        """Print the metrics of each loader."""
        for table in tables_of(verb, results):
            self.print(table)

    def __getstate__(self) -> dict[str, object]:
        """Return what can be pickled: everything but the present session. Its module and data module are kept."""
        return {
            **self.__dict__,
            "_lw_run": None,
            "_lw_last_run": None,
            "_lw_last_fit": None,
            "_lw_train_source": None,
            "_lw_spawned_module": self.lightning_module,
            "_lw_assigned_datamodule": self.datamodule,
            "_lw_run_signals": RunSignals(),
            "_lw_own_compiler": None,
            "_lw_session": None,
        }

    # --- what modules and callbacks call ---------------------------------------------------------------------------

    def _lw_present(self, what: str) -> Run:
        if self._lw_run is None:
            raise ModuleError(f"{what} was called outside of a run.", fix="call it in a hook, or in training_step.")
        return self._lw_run

    def manual_backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run a backward pass in manual optimization; modules call `self.manual_backward`.

        Args:
            loss: The loss: shape (), on the device.
            args: Positional arguments of `Tensor.backward`.
            kwargs: Keyword arguments of `Tensor.backward`.

        Raises:
            ModuleError: No run is in progress.
        """
        manual.manual_backward(self._lw_present("manual_backward"), loss, *args, **kwargs)

    def _lw_count_step(self) -> None:
        manual.count_step(self._lw_present("count_step"))

    def clip_gradients(
        self, optimizer: Optimizer | ManagedOptimizer, value: float | None = None, algorithm: str | None = None
    ) -> Tensor | None:
        """Clip the gradients of an optimizer's parameters; modules call `self.clip_gradients`.

        Args:
            optimizer: The optimizer.
            value: Maximum norm or absolute value; None is the Trainer's. 0 and None clip nothing.
            algorithm: "norm", "value" or "agc"; None is the Trainer's, else "norm".

        Returns:
            By norm, the total norm before clipping: shape (), on the device. Otherwise None.

        Raises:
            ConfigError: The algorithm is unknown.
            ModuleError: No run is in progress.
        """
        run = self._lw_present("clip_gradients")
        value = self.gradient_clip_val if value is None else value
        algorithm = algorithm or self.gradient_clip_algorithm
        return manual.clip_gradients(run, manual.plain_optimizer(optimizer), value, algorithm)

    def _lw_toggle(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Let only this optimizer's parameters require gradients."""
        run = self._lw_run_to_toggle("toggle_optimizer")
        self._lw_toggles.toggle(manual.plain_optimizer(optimizer), run.optimizers)

    def _lw_untoggle(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Undo `_lw_toggle`."""
        self._lw_run_to_toggle("untoggle_optimizer")
        self._lw_toggles.untoggle(manual.plain_optimizer(optimizer))

    def _lw_run_to_toggle(self, what: str) -> Run:
        """Return the run in progress, else the last one, whose optimizers still exist."""
        run = self._lw_run or self._lw_last_run or self._lw_present(what)
        if run is self._lw_run:
            manual.give_back(run)
        return run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send host numbers to all loggers. A logger that fails is reported once and skipped; training continues.

        Args:
            metrics: Key -> number. A key `step` sets the x value.
            step: The x value. None is the index of the last training step, and adds the key `epoch`.
        """
        row = dict(metrics)
        if "step" in row:
            step = int(row.pop("step"))
        elif step is None:
            at = (self.progress.steps, self.progress.epochs) if self.state.fn == "fit" else self._lw_output.records_at
            row.setdefault("epoch", at[1])
            step = max(at[0] - 1, 0)
        self.timeline.timed("logging", self._lw_output.write)(row, step, samples=self._lw_samples_of_all_ranks())

    def _lw_samples_of_all_ranks(self) -> int:
        """Return the number of samples trained on, without communication: other ranks are assumed to have as many."""
        before = self.progress.samples_before
        return before + (self.progress.samples - before) * self.strategy.topology.data_size

    def synchronize_metrics(self, *names: str) -> None:
        """Make `callback_metrics` and `metric_step` equal on all ranks for these keys, until a rank logs them again.

        Call it before a decision that depends on a value that is logged in steps. Each key gets the newest value,
        reduced over the ranks that have logged it as at the end of an epoch: a mean is weighted. Call it on every rank
        with the same keys: it communicates, once for all keys. It does nothing with one process, or on a rank that is
        alone after an error.

        Args:
            names: Keys of `callback_metrics`; a key that no rank has logged is ignored.
        """
        if self.ranks_answer:
            self._lw_metrics.synchronize(names)

    def managed_schedulers(self) -> list[Any]:  # Any: schedules of any library
        """Return the schedules that a module steps itself; modules call `self.lr_schedulers`."""
        if self.world_size == 1:
            return [config.scheduler for config in self.lr_scheduler_configs]
        from .loop.ranks_schedule import RanksPlateau

        gather = self.strategy.gather_objects
        return [
            RanksPlateau(config.scheduler, gather) if config.reduce_on_plateau else config.scheduler
            for config in self.lr_scheduler_configs
        ]

    @property
    def should_log(self) -> bool:
        """Whether the values of the current step are sent to the loggers."""
        every = self._lw_arguments.log_every_n_steps
        return bool(every) and self._lw_metrics.step % cast(int, every) == 0

    def print(self, *args: object, **kwargs: Any) -> None:  # Any: the arguments of the builtin
        """Print on rank 0 above the progress bar; without a bar, or with `file=`, on local rank 0 of each node."""
        bar = self.progress_bar_callback
        if bar is not None and not kwargs.get("file"):
            bar.print(*args, **kwargs)
        else:
            self.fabric.print(*args, **kwargs)

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: StorageOptions | None = None
    ) -> None:
        """Write a checkpoint atomically. Call it on every rank.

        In a hook, the remaining listeners of the event (other callbacks, the module, loggers) are called first, so that
        the checkpoint holds the state after the event. The hook cannot log afterwards.

        With `AsyncCheckpointIO`, it returns during a run as soon as the state is copied; see `wait_for_save`.

        Args:
            filepath: A path, or an fsspec URL.
            weights_only: Whether to omit optimizers, schedules, callbacks and other state that only training needs;
                None is False.
            storage_options: Passed to the checkpoint plugin.

        Raises:
            CheckpointError: It is called between two micro-batches of one window, or within a validation for which a
                callback keeps state. Or the checkpoint cannot be written; an earlier file at the path stays intact. Or
                an earlier background save failed.
            ModuleError: No module was attached yet.
        """
        self.save_checkpoint_to([filepath], weights_only, storage_options)

    def save_checkpoint_to(
        self,
        filepaths: Sequence[str | Path],
        weights_only: bool | None = None,
        storage_options: StorageOptions | None = None,
    ) -> None:
        """Write one checkpoint to several paths, one after the other; otherwise as `save_checkpoint`."""
        run = self.latest_run()
        if run is None and self._lw_spawned_checkpoint is not None and not weights_only:
            self._lw_saving.write(self._lw_spawned_checkpoint, filepaths, storage_options)
            return
        if run is None:
            raise ModuleError(
                "trainer.save_checkpoint was called before a module was attached.", fix="call trainer.fit first."
            )
        self._lw_saving.save(run, filepaths, is_weights_only=bool(weights_only), storage_options=storage_options)

    def full_state_dict(self, module: nn.Module | None = None) -> StateDict:
        """Return the full weights: on the CPU of rank 0, and {} on other ranks. Call it on every rank: it communicates.

        If a strategy shards the model, `module.state_dict()` returns the shards of this rank, or raises an error. For a
        transformers model: `state = trainer.full_state_dict(self.model)`, then `self.model.save_pretrained(path,
        state_dict=state)` on rank 0.

        Args:
            module: A submodule of the trained module, whose names are relative to it; None for the trained module.

        Raises:
            CheckpointError: A rank did not call it.
            ModuleError: It is another module, or no module was attached yet.
        """
        run = self.latest_run()
        if run is None:
            raise ModuleError(
                "trainer.full_state_dict was called before a module was attached.", fix="call trainer.fit first."
            )
        return self._lw_saving.full_state(run, module)

    def wait_for_save(self, *, before_save: bool = False) -> None:
        """Wait until the last checkpoint is complete, and the actions after its save are done. Call it on every rank.

        Without `AsyncCheckpointIO`, it returns at once. Otherwise the Trainer calls it before the next save, at the end
        of training, before a verb returns, and after an error. Call it to read a checkpoint during a run.

        Args:
            before_save: Whether it is called before the next save.

        Raises:
            CheckpointError: The checkpoint could not be written; raised on every rank.
        """
        self._lw_saving.wait(before_save=before_save)

    def _lw_batch_size_of(self, batch: Batch) -> int | None:
        """Return the number of samples in a batch of the current loader; None if unknown."""
        sizes = self._lw_metrics.sizes
        return find_batch_size(batch) if sizes is None else sizes.of(batch)

    def _lw_after_epoch_end(self, action: Callable[[], None]) -> None:
        """Call `action` after the end of this epoch and its checkpoints; for callbacks, in `on_train_epoch_end`."""
        run = self._lw_present("after_epoch_end")
        if isinstance(run, FitRun):
            run.after_epoch.append(action)

    @property
    def ranks_answer(self) -> bool:
        """Whether there are other ranks, at the same point of the run; False after an error of this rank alone."""
        return self.world_size > 1 and self.fabric.is_connected and (self._lw_run is None or self._lw_run.ranks_answer)

    def _lw_launch(self, verb: str, model: nn.Module | None, **arguments: object) -> Any:  # Any: what the verb returns
        """Run a verb in new processes, and apply their changes to the module here."""
        from .session import spawned

        return spawned.launch(self, verb, model, **arguments)

    @property
    def _lw_starts_processes(self) -> bool:
        return bool(getattr(self.fabric.launcher, "starts_processes", False)) and not self._lw_is_in_child

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Total number of training steps of this fit; infinity without a limit. Reading it opens the training data.

        Raises:
            ModuleError: No run is in progress.
        """
        session = self._lw_session
        if session is None or self._lw_run is None:
            raise ModuleError(
                "trainer.estimated_stepping_batches was read outside of fit.", fix="read it in configure_optimizers."
            )
        return session.estimate_steps()

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[object]:
        """Return a context that creates module parameters on the device and in the precision's dtype.

        Args:
            empty_init: See `Fabric.init_module`.
        """
        return self.fabric.init_module(empty_init=empty_init)
