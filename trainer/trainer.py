"""`lw.Trainer`: the configuration of a training, and its verbs fit, validate, test and predict.

A verb begins a `Run` (session/begin.py), guards it, and lets a loop run it. Only `_lw_after_batch` is called at every
step.
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import set_detect_anomaly
from torch.optim import Optimizer

from ..accelerators.matmul_precision import BackendModes
from ..callbacks import Callback
from ..checkpoint import content as contents
from ..console import show_logs
from ..data.move import find_batch_size
from ..data.rng import restore_rng
from ..data.tree import are_same_loaders
from ..errors import ConfigError, LoopwrightError, ModuleError, StopBySignal
from ..fabric import Fabric
from ..loggers import Logger
from ..profilers import PassThroughProfiler, Profiler, resolve_profiler
from ..tracebacks import show_trimmed
from .attributes import TrainerAttributes
from .checkpointing import snapshot
from .checkpointing.locate import locate
from .checkpointing.saving import Saving
from .hooks import check_hook_names
from .lifecycle import hook_names
from .loop import manual
from .loop.eval_loader import EvalLoader
from .loop.fit_loop import FitLoop
from .loop.non_finite import MOST_KEPT, LossWatch
from .loop.optimizers import ManagedOptimizer
from .loop.run_signals import RunSignals, add_place
from .metrics.log_output import LogOutput, by_loader, tables_of
from .metrics.metrics import Metrics
from .module import Module
from .run import Run
from .session import assemble, begin
from .session.arguments import Arguments, from_environment
from .session.begin import STAGE_OF, both_given, split_datamodule
from .session.loaders import StageLoaders
from .state import Progress, TrainerState

if TYPE_CHECKING:
    from datetime import timedelta
    from signal import Signals

    from ..data.module import DataModule
    from ..fabric.compiling import Compiler
    from ..protocols import AnyOutput, Batch, Loaders, StateDict
    from .behavior import Behavior
    from .loop.eval_loop import EvalLoop
    from .loop.stop_coordination import StopCoordination
    from .loop.training_rng import TrainingRng
    from .timeline.timeline import Timeline

__all__ = ["Trainer"]

logger_ = logging.getLogger(__name__)
_STEPS = {"training_step", "validation_step", "test_step", "predict_step"}


class Trainer(TrainerAttributes):
    """Train, validate, test and predict with a module.

    All arguments are keyword-only. Each can also be set by an environment variable `LOOPWRIGHT_TRAINER_<NAME>`; a value
    that is passed takes precedence.

    Args:
        accelerator: Kind of device: "auto", "cpu", "gpu", "cuda", "mps", "tpu", or an Accelerator.
        strategy: How the model is spread over devices: "auto", "single_device", another registered name, or a Strategy.
        devices: Number of devices, a list of their indices, -1 for all, or "auto".
        num_nodes: Number of machines.
        precision: "32-true" (default), "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", or another
            registered name.
        logger: True for TensorBoard, False for none, a Logger, a name such as "csv" or "wandb", or a list of these.
        callbacks: A Callback or a list of Callbacks. The list is not changed.
        fast_dev_run: True for one batch of every stage, or a number of batches. Nothing is logged or saved.
        max_epochs: Maximum number of epochs; -1 for no limit. None is 1000 without other limits.
        min_epochs: Minimum number of epochs. Earlier requests to stop are ignored.
        max_steps: Maximum number of optimizer steps; -1 for no limit.
        min_steps: Minimum number of optimizer steps. Earlier requests to stop are ignored.
        max_samples: Maximum number of training samples, over all ranks: training stops at the first step that reaches
            it. -1 or None for no limit.
        max_tokens: Maximum number of training tokens, which `Module.count_tokens` counts; as `max_samples`.
        max_time: Maximum training time: "DD:HH:MM:SS", a timedelta, or a dict of its arguments.
        limit_train_batches: Training batches per epoch: a number, or a fraction from 0.0 to 1.0.
        limit_val_batches: Validation batches per loader; as `limit_train_batches`.
        limit_test_batches: Test batches per loader; as `limit_train_batches`.
        limit_predict_batches: Prediction batches per loader; as `limit_train_batches`.
        overfit_batches: Number or fraction of batches to train and validate on, in order.
        val_check_interval: Time between two validations: a number of training batches, a fraction of an epoch, or a
            duration.
        check_val_every_n_epoch: Number of epochs between two validations; None counts `val_check_interval` across
            epochs.
        num_sanity_val_steps: Validation batches that are run before training (2); -1 for all.
        log_every_n_steps: Optimizer steps between two rows of step values for the loggers (50).
        enable_checkpointing: Whether a ModelCheckpoint is added if none is given.
        enable_progress_bar: Whether a progress bar is shown.
        enable_model_summary: Whether a summary of the model is printed.
        accumulate_grad_batches: Micro-batches per optimizer step.
        accumulate_across_epochs: Whether an accumulation window that is incomplete at the end of an epoch continues in
            the next epoch, instead of ending in a step with fewer micro-batches. The last epoch ends its window.
        grad_accumulation_dtype: dtype in which gradients of 16-bit parameters are summed, over the micro-batches of a
            window and over ranks: "float32", or None for the parameters' dtype.
        global_batch_size: Samples per optimizer step, over all ranks. It replaces `accumulate_grad_batches`, which then
            follows from the loader's batch size and the number of ranks; both must divide it.
        gradient_clip_val: Maximum gradient norm, or maximum absolute value; None or 0 for no clipping.
        gradient_clip_algorithm: "norm" or "value"; None is "norm".
        deterministic: Whether deterministic algorithms are used: True, False, or "warn".
        benchmark: Value of torch.backends.cudnn.benchmark during a run.
        matmul_precision: Precision of float32 matrix products during a run: "highest" (float32), "high" (tf32 if the
            device has it), "medium" (bfloat16). None leaves torch's setting. See `torch.set_float32_matmul_precision`.
        inference_mode: Whether validate, test and predict run under torch.inference_mode instead of no_grad.
            Validations inside fit always run under no_grad: what they leave in the module can be trained with.
        use_distributed_sampler: Whether data are sharded over ranks.
        profiler: "simple", "advanced", "pytorch", "xla", or a Profiler.
        detect_anomaly: Whether autograd reports NaN in fit, with the operation that caused it.
        barebones: Whether everything that costs time is off: checkpoints, logging, progress bar, summary, sanity check.
        plugins: Precision, CheckpointIO or ClusterEnvironment; one, or a list with at most one of each.
        sync_batchnorm: Whether batch norm statistics are synchronized over ranks.
        reload_dataloaders_every_n_epochs: Number of epochs after which loaders are requested again; 0 for never.
        default_root_dir: Directory or URL for logs and checkpoints; the working directory by default.
        enable_autolog_hparams: Whether hyperparameters are sent to the loggers.
        model_registry: Not supported; None only.
        compile: Whether the module's steps, or its repeated blocks if it has some, are compiled with torch.compile:
            True, False, or a dict of arguments of torch.compile such as {"mode": "max-autotune"}. See docs/compile.md.
        nonfinite_loss: Policy for a NaN or infinite loss: "warn" (once, with the step), "raise" (at the next log
            boundary and before a checkpoint is written), "skip" (the step is left out, reported once and counted in
            `trainer.progress.nonfinite_steps` and the rows of the loggers; reads each loss), or "ignore".

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
        )  # fmt: skip
        given = self._lw_read_environment(given)
        self._lw_same_everywhere = {name: value for name, value in given.values().items() if name not in _PER_RANK}
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
        )
        self._lw_loaders = StageLoaders(arguments)
        self._lw_output = LogOutput(
            arguments.logger, root=self.default_root_dir, is_trial=bool(arguments.fast_dev_run)
        )  # fmt: skip
        # Where the data were when the last fit ended, and the step that records of an evaluation belong to.
        self._lw_stream_state: StateDict | None = None
        self._lw_train_source: Loaders = None  # of the last fit: loaders, or who makes them
        self._lw_records_at = (0, 0)
        # The window that was under way when the last fit ended, after an epoch that cut it short.
        self._lw_carried_states: StateDict = {}
        self._lw_metrics = Metrics(self.fabric.device)
        self._lw_metrics.is_disabled = arguments.barebones
        self._lw_watch_losses = LossWatch(arguments.nonfinite_loss)
        self._lw_run: Run | None = None
        self._lw_last_run: Run | None = None
        self._lw_attachment = ExitStack()  # undoes what a verb attaches to its module
        self._lw_last_fit: Run | None = None
        self._lw_run_signals = RunSignals()
        self._lw_timeline: Timeline | None = None
        self._lw_toggles = manual.Toggles()
        self._lw_training_rng: TrainingRng | None = None
        # The module that the user compiled last, with what compiles as the user did; and what ends compiling in a run.
        self._lw_own_compiler: tuple[nn.Module, Compiler | None] | None = None
        self._lw_compiling: ExitStack | None = None
        self._lw_results: Mapping[str, float] = {}
        self._lw_saving = Saving(weak)
        self._lw_identity = os.urandom(8).hex()  # the same in processes that this one starts
        self._lw_is_in_child = False
        self._lw_begun_s = 0.0
        self._lw_revert_layer_sync: Callable[[], object] | None = None
        self._lw_spawned_module: nn.Module | None = None
        self._lw_assigned_datamodule: DataModule | None = None
        self._lw_spawned_checkpoint: StateDict | None = None
        self._lw_backend_modes = BackendModes()
        self.callbacks: list[Callback] = self._lw_make_callbacks(arguments.callbacks)

    def make_behavior(self) -> Behavior:
        """Return what this Trainer does at its seams; called first, and overridden by layers for other libraries."""
        from .behavior import Behavior

        return Behavior()

    def _lw_read_environment(self, given: Arguments) -> Arguments:
        return from_environment(given)

    def _lw_make_fabric(self, arguments: Arguments) -> Fabric:
        fabric = Fabric(
            accelerator=arguments.accelerator,
            strategy=arguments.strategy,
            devices=arguments.devices,
            num_nodes=arguments.num_nodes,
            precision=arguments.precision,
            plugins=arguments.plugins,
        )
        fabric.strategy.accumulate_dtype = None  # another Trainer may have had this strategy
        if arguments.grad_accumulation_dtype is not None:
            from ..fabric.grad_accumulation import set_grad_accumulation_dtype

            set_grad_accumulation_dtype(fabric.strategy, arguments.grad_accumulation_dtype)
        return fabric

    def _lw_make_callbacks(self, callbacks: Any) -> list[Callback]:  # Any: checked here
        own = [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        for callback in own:
            if not isinstance(callback, Callback):
                is_class = isinstance(callback, type)
                raise ConfigError(
                    f"Expected callbacks to be instances of lw.Callback, got "
                    f"{f'the class {callback.__name__}' if is_class else repr(callback)}.",
                    fix=f"pass {callback.__name__}(...)." if is_class else "pass instances of lw.Callback subclasses.",
                )
            check_hook_names(callback, "callbacks", hook_names("callbacks"))
        return assemble.order_callbacks([*own, *self.behavior.default_callbacks(self._lw_arguments, own)])

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
            model: lw.Module, nn.Module with `training_step` and `configure_optimizers`, or transformers or peft model.
            train_dataloaders: A loader, a collection of loaders, or a DataModule.
            val_dataloaders: Validation loaders.
            datamodule: DataModule that provides the loaders instead.
            ckpt_path: Checkpoint to resume from: a path, "last" (the newest complete one; a fresh start if there is
                none), "best", or None.
            weights_only: False also unpickles objects that were marked as trusted in the checkpoint.

        Raises:
            ConfigError, ModuleError, DataError: Before training, with what to change.
            CheckpointError: `ckpt_path` is damaged.
        """
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule, "train_dataloaders")
        if datamodule is not None and (train_dataloaders is not None or val_dataloaders is not None):
            raise both_given("train_dataloaders or val_dataloaders")
        if not self._lw_is_in_child:  # where objects are copies of the user's
            self._lw_compare_data(model if datamodule is None else datamodule, train_dataloaders)
        if self._lw_starts_processes:
            self._lw_launch(
                "fit", model, train_dataloaders=train_dataloaders, val_dataloaders=val_dataloaders,
                datamodule=datamodule, ckpt_path=ckpt_path, weights_only=weights_only,
            )  # fmt: skip
            return
        with self._lw_running("fit"):
            self.should_stop = False  # that of the last fit
            loaders = {"train": train_dataloaders, "validation": val_dataloaders}
            before = self._lw_take_before(model) if ckpt_path is None else None
            run = self._lw_begin("fit", model, datamodule, loaders)
            restore = self._lw_begin_fit(run, ckpt_path, is_trusted=weights_only is False, before=before)
            # Gradients are on, also within an evaluation of another Trainer.
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                set_detect_anomaly(self._lw_arguments.detect_anomaly),
            ):
                self.fit_loop.run(run, restore)
            self._lw_carried_states = run.carried.states() if run.carried is not None else {}
            if self.is_global_zero:
                run.watch.conclude(self.progress)
            run.lifecycle.on_fit_end()
            if run.has_ranks:
                samples, tokens = snapshot.count_data(run)
                self.progress.samples = self.progress.samples_before = samples
                self.progress.tokens = self.progress.tokens_before = tokens
            self._lw_finish(run)

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
            model: The module; None for that of the last run, with its best checkpoint unless ckpt_path is given.
            dataloaders: A loader, a collection of loaders, or a DataModule.
            ckpt_path: Checkpoint whose weights are loaded: a path, "best" or "last".
            verbose: Whether the metrics are printed as a table.
            datamodule: DataModule that provides the loaders instead.
            weights_only: False also unpickles objects that were marked as trusted in the checkpoint.

        Returns:
            The metrics that were logged over the epoch, for each loader.
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
        """Evaluate on the test loaders; arguments and result as in `validate`."""
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
        """Predict each batch of the loaders.

        Args:
            model: See `validate`.
            dataloaders: See `validate`.
            datamodule: See `validate`.
            return_predictions: False returns None and keeps nothing in memory.
            ckpt_path: See `validate`.
            weights_only: See `validate`.

        Returns:
            What `predict_step` returned for each batch, on the CPU, in the order of the data; a list of such lists for
            several loaders.
        """
        keep = return_predictions is not False
        dataloaders, datamodule = split_datamodule(dataloaders, datamodule, "dataloaders")
        if self._lw_starts_processes:
            predictions: list[AnyOutput] | None = self._lw_launch(
                "predict", model, dataloaders=dataloaders, datamodule=datamodule,
                return_predictions=return_predictions, ckpt_path=ckpt_path, weights_only=weights_only,
            )  # fmt: skip
            return predictions
        outputs: list[list[AnyOutput]] = []
        with self._lw_running("predict"):
            run, data = self._lw_begin_evaluation(
                "predict", model, dataloaders, ckpt_path, datamodule, is_trusted=weights_only is False
            )  # fmt: skip
            outputs = self._lw_eval_loop(run, "predict", data).run(run, data, keep=keep)
            if run.stop_coordination is not None:
                run.stop_coordination.begin_phase()
            if keep and run.has_ranks:
                outputs = self.order_predictions(outputs, data)
            self._lw_finish(run)
        if not keep:
            return None
        return outputs[0] if len(outputs) == 1 else outputs

    def order_predictions(self, outputs: list[list[AnyOutput]], data: EvalLoader) -> list[list[AnyOutput]]:
        """Return the predictions of all ranks in the order of the data; on every rank: it communicates.

        Args:
            outputs: Those of this rank, a list for each loader.
            data: The loaders.
        """
        from .loop import rank_coordination

        return rank_coordination.ordered(self.strategy, outputs, data.loaders)

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
        results: list[Mapping[str, float]] = []
        if self._lw_starts_processes:
            return self._lw_launch(  # type: ignore[no-any-return]
                verb, model, dataloaders=dataloaders, ckpt_path=ckpt_path, verbose=verbose,
                datamodule=datamodule, weights_only=weights_only,
            )  # fmt: skip
        with self._lw_running(verb):
            run, data = self._lw_begin_evaluation(
                verb, model, dataloaders, ckpt_path, datamodule, is_trusted=weights_only is False
            )  # fmt: skip
            self._lw_eval_loop(run, STAGE_OF[verb], data).run(run, data)
            if run.stop_coordination is not None:
                run.stop_coordination.begin_phase()
            results = (
                [] if data.is_off else by_loader(self._lw_results, len(data.loaders), self._lw_metrics.loaders_of_keys)
            )
            if verbose and self.is_global_zero and not data.is_off:
                self._lw_show_results(verb, results)
            self._lw_finish(run)
        return results

    def _lw_show_results(self, verb: str, results: list[Mapping[str, float]]) -> None:
        """Print the metrics of each loader."""
        for table in tables_of(verb, results):
            self.print(table)

    # --- the beginning and end of a run ----------------------------------------------------------------------------

    @contextmanager
    def _lw_running(self, verb: str) -> Iterator[None]:
        """Run a verb with signal handlers and the trainer's state set, and clean up when it fails."""
        if self._lw_run is not None:
            raise ConfigError(
                f"trainer.{verb} was called while trainer.{self.state.fn} is running.",
                fix="use a second Trainer for a run within a run.",
            )
        show_logs()
        show_trimmed()
        self._lw_begun_s = time.monotonic()
        self.state.begin(verb)
        self.ckpt_path = None
        self._lw_run_signals = RunSignals(self._lw_requeue_signal() if verb == "fit" and self.can_be_requeued else None)
        modes = self._lw_arguments
        self._lw_backend_modes.set(
            deterministic=modes.deterministic, benchmark=modes.benchmark, matmul_precision=modes.matmul_precision
        )
        course = self.training_rng
        with ExitStack() as at_last, self._lw_run_signals, self._lw_attachment:
            at_last.callback(self._lw_release)
            course.enter()
            try:
                yield
            except BaseException as error:
                self.state.status = "interrupted"
                if isinstance(error, StopBySignal) and self._lw_run_signals.is_to_requeue:
                    from .checkpointing.requeue import requeue

                    requeue(self)
                from .fit_lines import tell_failure

                cause = self._lw_cause_elsewhere(error)
                self._lw_on_failure(error if cause is None else cause)
                tell_failure(self, error if cause is None else cause)
                if cause is not None:
                    raise cause from None
                raise
            finally:
                course.leave(has_trained=verb == "fit")
                self._lw_detach()
        self.state.end()

    def adopt(self, module: nn.Module, datamodule: DataModule | None, train_dataloaders: Loaders) -> None:
        """Show what a search was about, as after a run: `lightning_module`, `datamodule`, `train_dataloader`.

        Args:
            module: The module, which gets this Trainer and its loggers.
            datamodule: The data module, None for none.
            train_dataloaders: What the search trained with, None if it did not train.
        """
        if isinstance(module, Module):
            module.trainer, module.fabric = self, self.fabric
            begin.know_weakly(self, module)
        if self._lw_last_run is None:
            self._lw_spawned_module = module
        self._lw_assigned_datamodule = datamodule
        if train_dataloaders is not None:
            self._lw_loaders.train = train_dataloaders

    def __getstate__(self) -> dict[str, object]:
        """Return what can be pickled: everything but the run. Its module and data module are kept."""
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
            "_lw_attachment": ExitStack(),
        }

    @property
    def _lw_measuring_profiler(self) -> Profiler | None:
        """The profiler, None where there is nothing to measure, so that steps are not bracketed."""
        return None if isinstance(self.profiler, PassThroughProfiler) else self.profiler

    @property
    def training_rng(self) -> TrainingRng:
        """State of training's random number generators."""
        if self._lw_training_rng is None:
            from .loop.training_rng import TrainingRng

            self._lw_training_rng = TrainingRng()
        return self._lw_training_rng

    @training_rng.setter
    def training_rng(self, training_rng: TrainingRng) -> None:
        self._lw_training_rng = training_rng

    @property
    def tells_runs(self) -> bool:
        """Whether this process tells of its runs in lines: on rank 0, without barebones; trials of a search do not."""
        return self.is_global_zero and not self._lw_arguments.barebones

    @property
    def can_be_requeued(self) -> bool:
        """Whether the cluster can put this job back into the queue."""
        return hasattr(self.fabric.cluster_environment, "requeue")

    def _lw_requeue_signal(self) -> Signals | None:
        from .checkpointing.requeue import requeue_signal

        return requeue_signal(self)

    def _lw_connect_ranks(self) -> None:
        """Connect this rank to the others, to detect failures and stop at the same step; a no-op with one process."""
        watch = self.fabric.watch
        if watch is None:
            return
        watch.describe = self._lw_place
        self._lw_run_signals.connect(watch)

    def rejoin_ranks(self) -> None:
        """Continue with the other ranks after a run within this run; on every rank, called by the tuner."""
        if self.fabric.watch is not None and self._lw_run is not None and self._lw_run_signals.watch is not None:
            self.fabric.watch.describe = self._lw_place
            self._lw_run_signals.rejoin()

    def _lw_apply_layer_sync(self, module: nn.Module) -> None:
        """Let batch norms see the batches of all ranks during fit, where that was asked for."""
        sync = self.fabric.layer_sync
        if sync is None and self.sync_batchnorm:
            from ..strategies.distributed.layer_sync import TorchSyncBatchNorm

            sync = TorchSyncBatchNorm(self.strategy.batch_norm_group)
        if sync is not None and self.world_size > 1:
            sync.apply(module)
            self._lw_revert_layer_sync = lambda: sync.revert(module)

    def _lw_place(self) -> dict[str, object]:
        """Return where the run is, for messages about a rank that failed; called from the watch's thread."""
        run = self._lw_run
        if run is None:
            return {}
        hook = run.metrics.table.hook
        place: dict[str, object] = {
            "hook": hook,
            "stage": self.state.stage,
            "epoch": self.progress.epochs,
            "step": self.progress.steps,
        }
        if self.state.stage == "train":
            place["batch"] = run.batch_idx
        return place

    def _lw_cause_elsewhere(self, error: BaseException) -> BaseException | None:
        """Return the failure of another rank, or the agreed stop, that this error only follows from; None for none."""
        watch = self.fabric.watch
        if watch is None:
            return None
        stop_coordination = self.stop_coordination
        if stop_coordination is not None and stop_coordination.is_by_signal:
            return None if isinstance(error, KeyboardInterrupt | StopBySignal) else self._lw_run_signals.stop_error()
        return watch.explain_or_report(error)

    def _lw_plan(self, verb: str, given: dict[str, Loaders]) -> begin.Plan:
        arguments = self._lw_arguments
        return begin.Plan(
            trainer=self,
            verb=verb,
            given=given,
            fabric=self.fabric,
            callbacks=self.callbacks,
            loaders=self._lw_loaders,
            output=self._lw_output,
            metrics=self._lw_metrics,
            progress=self.progress,
            state=self.state,
            run_signals=self._lw_run_signals,
            watch=self._lw_watch_losses,
            profiler=self._lw_measuring_profiler,
            system={
                # Barebones logs nothing, so there is nothing to do after a batch.
                **({} if arguments.barebones else {"on_train_batch_end": self._lw_after_batch}),
                "on_train_epoch_start": self._lw_after_epoch_start,
                "on_train_epoch_end": self._lw_after_train_epoch,
                "on_validation_epoch_end": self._lw_after_validation,
                "on_validation_end": self._lw_after_validation_end,
                "on_test_epoch_end": self._lw_after_test,
            },
            log=_log_nothing if arguments.barebones else self._lw_metrics.log,
            accumulate_grad_batches=self.accumulate_grad_batches,
            is_scheduled=self.accumulation_scheduler is not None,
            global_batch_size=arguments.global_batch_size,
            gradient_clip_val=self.gradient_clip_val,
            gradient_clip_algorithm=self.gradient_clip_algorithm,
            use_distributed_sampler=bool(self.use_distributed_sampler),
            skips_bad_steps=arguments.nonfinite_loss == "skip",
            same_everywhere=self._lw_same_everywhere,
            seconds_since_validation=self.fit_loop.seconds_since_validation,
        )

    def _lw_begin(self, verb: str, model: nn.Module, datamodule: DataModule | None, given: dict[str, Loaders]) -> Run:
        """Attach module and data, start the processes, and run the hooks up to `configure_model`."""
        module = begin.unwrapped(model)
        if datamodule is not None:
            self._lw_assigned_datamodule = None
        self._lw_note_compiler(model, module)
        plan = self._lw_plan(verb, given)
        begin.check(plan, module, datamodule)
        self.fabric.launch()
        self._lw_connect_ranks()
        if verb == "fit":
            from .fit_lines import tell_beginning

            tell_beginning(self)
            rank_drawn_as = self.strategy.topology.data_rank if self.strategy.traits.copies_draw_alike else None
            self.training_rng.begin_training(self.global_rank, self.world_size, rank_drawn_as)
        self._lw_attachment.callback(begin.attach(plan, module, datamodule))
        begin.take_callbacks(plan, module)
        run = self.make_run(plan, module, datamodule)
        begin.set_up(plan, run)
        if verb == "fit":
            self._lw_apply_layer_sync(module)
        self._lw_begin_compiling(run)
        begin.place(run, verb)
        return run

    def make_run(self, plan: begin.Plan, module: nn.Module, datamodule: DataModule | None) -> Run:
        """Return the run of a verb; called once, when the callbacks are known."""
        self._lw_run = begin.make_run(plan, module, datamodule)
        return self._lw_run

    def _lw_begin_fit(
        self, run: Run, ckpt_path: str | Path | None, *, is_trusted: bool, before: StateDict | None
    ) -> Callable[[], None] | None:
        """Restore, build optimizers, open the data; return what puts back random number generators, to be called last.

        Args:
            run: The run, attached.
            ckpt_path: What to resume from; None without.
            is_trusted: Whether objects that were marked as trusted are unpickled.
            before: What the last fit left, where this one continues it.
        """
        path = locate(self, ckpt_path, "fit", has_model=True)
        self._lw_adopt_callbacks()  # `locate` has asked them for files of another run
        content = None
        if path is not None:
            self.ckpt_path = path
            content = begin.load_weights(run, path, is_trusted=is_trusted)
            self.continue_logs(content.states.get("loggers", {}))
        elif self.progress.epoch_open and self._lw_stream_state is None:
            from .session.continuing import begin_epoch_again

            begin_epoch_again(self, run)
        self._lw_synchronize_folders("fit", run)
        begin.build_training(run)
        restore = self.restore_and_start(run, content, path, before)
        if not self.progress.epoch_open:
            self.sanity_check(run)
        self.open_training(run)
        self.accumulation_for_epoch(self.progress.epochs)
        begin.open_loop(run, self.fit_loop, content, path, self._lw_stream_state)
        if self.fit_loop.validates_in_this_epoch:  # else the first validation asks for its loaders again
            self._lw_loaders.epoch_of_validation = self.progress.epochs
        carried, self._lw_carried_states = self._lw_carried_states, {}
        states = carried if content is None else content.states
        begin.carry_window(run, states, self.ckpt_path, is_carrying=self.accumulate_across_epochs)
        begin.set_modes(run, content, self.training_rng)
        return self.training_rng.resume(restore)

    def _lw_compare_data(self, owner: nn.Module | DataModule, loaders: Loaders) -> None:
        """Forget where the last fit's training data were if this fit has other loaders.

        Loaders that a module or data module makes are those of the last fit if the same object makes them.
        """
        before, self._lw_train_source = self._lw_train_source, owner if loaders is None else loaders
        if before is not None and not are_same_loaders(before, self._lw_train_source):
            self._lw_stream_state = None

    def continue_logs(self, states: StateDict) -> None:
        """Let loggers continue where a checkpoint saw them. Called before anything is logged."""
        snapshot.put_back_loggers(self._lw_output, states)

    def restore_and_start(
        self, run: Run, content: contents.Content | None, path: str | None, before: StateDict | None
    ) -> Callable[[], None] | None:
        """Restore training, then fire `on_fit_start`; arguments and result as `begin.restore_training`."""
        restore = begin.restore_training(run, content, path, before)
        self.fit_loop.is_used_up = self.has_used_up_data(run)
        self.write_hyperparameters()
        self.state.stage = "train"
        run.lifecycle.on_fit_start()
        return restore

    def has_used_up_data(self, run: Run) -> bool:
        """Whether `max_samples` or `max_tokens` is reached already."""
        if not self.fit_loop.data_limits:
            return False
        from .loop.data_limits import is_reached

        progress = self.progress  # with several ranks, an interrupted fit has left each rank's own there
        if run.has_ranks:
            return is_reached(self, progress.samples_before, progress.tokens_before)
        return is_reached(self, progress.samples, progress.tokens)

    def _lw_begin_evaluation(
        self, verb: str, model: nn.Module | None, dataloaders: Loaders, ckpt_path: str | Path | None,
        datamodule: DataModule | None, *, is_trusted: bool,
    ) -> tuple[Run, EvalLoader]:  # fmt: skip
        """Attach module and data, load the weights that are meant, and return the run and its loaders."""
        stage = STAGE_OF[verb]
        if datamodule is not None and dataloaders is not None:
            raise both_given("dataloaders")
        module = begin.module_of_evaluation(verb, model, self.lightning_module)
        if model is None and datamodule is None and dataloaders is None:
            datamodule = self.datamodule
        path = locate(self, ckpt_path, verb, has_model=model is not None)
        run = self._lw_begin(verb, module, datamodule, {stage: dataloaders})
        steps, epochs = self.progress.steps, self.progress.epochs
        if path is not None:
            self.ckpt_path = path
            counts = begin.load_weights(run, path, is_trusted=is_trusted).states.get("progress", {})
            # Records belong to the step of the weights, not to that of a training which this Trainer did before.
            steps, epochs = counts.get("steps", steps), counts.get("epochs", epochs)
        self._lw_records_at = (steps, epochs)
        self._lw_synchronize_folders(verb, run)
        self.write_hyperparameters()
        self.state.stage = verb
        return run, self._lw_loaders.open_eval(stage)

    def _lw_synchronize_folders(self, verb: str, run: Run) -> None:
        """Let all ranks know where loggers write, and the profiler where it reports."""
        self._lw_output.agree(self.strategy, checks=verb == "fit")
        profiler = self._lw_measuring_profiler
        if profiler is not None:
            rank = self.global_rank if self.world_size > 1 else None
            profiler.watch(run.module)
            profiler.setup(stage=verb, local_rank=rank, log_dir=self._lw_output.files_dir(self.log_dir))

    def _lw_note_compiler(self, model: nn.Module, module: nn.Module) -> None:
        """Remember how the user compiled a module, if at all; a later verb may be given the module itself, or none."""
        if model is not module or "_lw_compile_options" in vars(module):
            from ..fabric.compiling import without_wrapper

            self._lw_own_compiler = without_wrapper(model)

    def _lw_begin_compiling(self, run: Run) -> None:
        """Compile what the run will call, if the user asked for it; until `_detach`."""
        own, options = self._lw_own_compiler, self._lw_arguments.compile
        given = own[1] if own is not None and own[0] is run.module else None
        if given is None and options is False:
            return
        from .session.compiling import begin_compiling

        if given is not None and options is not False:
            logger_.warning(
                "the module was compiled with torch.compile: it keeps those options, and compile= of the Trainer is "
                "not used"
            )
        self._lw_compiling = begin_compiling(run, given, {} if isinstance(options, bool) else dict(options))

    def _lw_on_failure(self, error: BaseException) -> None:
        """Tell callbacks and data module; close the loggers. A hook that fails here does not hide the first error."""
        run = self._lw_run
        if run is None:
            return
        if isinstance(error, Exception) and not isinstance(error, LoopwrightError):
            from .error_place import place_of

            add_place(error, place_of(self, run, error))
            hook = run.metrics.table.hook
            if hook in _STEPS and run.metrics.batch is not None:
                from .batch_shapes import shapes_of

                add_place(error, f"Loopwright: the batch is {shapes_of(run.metrics.batch)}")
            if isinstance(error, RuntimeError):
                from .graph_advice import advice_on_evaluation, advice_on_graph
                from .inference_tensors import advice_on

                if "DTensor" in str(error) or "invalid python storage" in str(error):
                    from ..strategies.fsdp.steps import explain

                    explain(error)
                if self.state.fn == "fit":
                    advice = advice_on(error, run.module) or advice_on_graph(error, run.module, hook)
                else:
                    advice = advice_on_evaluation(error, self.state.fn, self._lw_arguments.inference_mode)
                if advice is not None:
                    add_place(error, advice)
        self._lw_saving.is_after_error = run.is_after_error = True
        try:
            self._lw_saving.wait_after(error)
            run.metrics.table = run.metrics.nowhere
            run.lifecycle.on_exception(error)
            self._lw_saving.wait_after(error)
        # The first error is the one to see: whatever a hook raises now is added to it as a note.
        except Exception as second:
            logger_.exception("on_exception failed after %s", type(error).__name__)
            add_place(error, f"then on_exception failed: {type(second).__name__}: {second}")
        finally:
            self._lw_saving.is_after_error = run.is_after_error = False
        self._lw_output.finalize("failed")
        if self._lw_measuring_profiler is not None:
            self.profiler.teardown(self.state.fn)
        self._lw_output.send_files()

    def _lw_finish(self, run: Run) -> None:
        """The regular end of a verb."""
        self.wait_for_save()
        run.lifecycle.teardown(self.state.fn)
        self.wait_for_save()
        self._lw_output.finalize("success")
        if self.state.fn == "fit":
            from .describe_run import describe_run
            from .fit_lines import tell_end

            describe_run(self)
            tell_end(self, time.monotonic() - self._lw_begun_s)
        profiler = self._lw_measuring_profiler
        if profiler is not None:
            if self.is_global_zero and profiler.filename is None:
                self.print(profiler.summary())
            profiler.describe()
        self._lw_output.send_files()

    def _lw_adopt_callbacks(self) -> None:
        """Let callbacks that another Trainer has trained with forget that run."""
        for callback in self.callbacks:
            if vars(callback).setdefault("_adopted_by", self._lw_identity) != self._lw_identity:
                if hasattr(callback, "forget_run"):
                    callback.forget_run()
                vars(callback)["_adopted_by"] = self._lw_identity

    def _lw_take_before(self, model: nn.Module) -> StateDict | None:
        """Return what the last fit left for one that continues it; None where there is none."""
        if not self.progress.total_batches:
            return None
        from .session.continuing import take

        return take(self, begin.unwrapped(model))

    def spawned_states(self, module: nn.Module) -> StateDict | None:
        """Return the states with which the last fit in other processes ended; {} if it was of another module."""
        if self._lw_spawned_checkpoint is None:
            return None
        if self._lw_spawned_module is not module:
            return {}
        return contents.read(self._lw_spawned_checkpoint, source="the last fit").states

    def _lw_detach(self) -> None:
        """Undo what beginning the run attached; the module stays on its device."""
        run, self._lw_run = self._lw_run, None
        if run is not None:
            run.is_over = True
        if self._lw_compiling is not None:
            self._lw_compiling.close()
            self._lw_compiling = None
        if self._lw_timeline is not None:
            self._lw_timeline.end(run)
        if run is not None:
            # What a fit built stays readable, and can be saved, after the same module was evaluated.
            if self.state.fn == "fit" or self._lw_last_run is None or self._lw_last_run.module is not run.module:
                self._lw_last_run = run
            if self.state.fn == "fit" and run.configured:
                self._lw_last_fit = run
            if run.own_steps is not None:
                run.own_steps.remove()
            if run.stream is not None:
                if self.state.fn == "fit":
                    self._lw_stream_state = run.stream_state = snapshot.stream_state(run)
                run.stream.shut_down()
        self._lw_loaders.shut_down()
        self._lw_metrics.table = self._lw_metrics.nowhere
        self._lw_metrics.batch = self._lw_metrics.sized = None
        self._lw_backend_modes.put_back()
        if run is not None and run.undo is not None:
            run.undo()
        if self.state.fn == "fit":
            self._lw_toggles.end()
        if self._lw_revert_layer_sync is not None:
            self._lw_revert_layer_sync()
            self._lw_revert_layer_sync = None
        self.fabric.strategy.teardown()
        if run is not None:
            run.release()

    def _lw_release(self) -> None:
        """Let those who were told of this Trainer know it weakly from now on; see `Run.release`."""
        module, datamodule = self.lightning_module, self.datamodule
        if module is not None:
            begin.know_weakly(self, module)
        if datamodule is not None:
            begin.know_weakly(self, datamodule)
        for callback in self.callbacks:
            if vars(callback).get("log") == getattr(module, "log", None):
                vars(callback).pop("log", None)
                vars(callback).pop("log_dict", None)
            if hasattr(callback, "release_run"):
                callback.release_run()

    # --- inside fit ------------------------------------------------------------------------------------------------

    def open_training(self, run: Run) -> None:
        """Ask for the training data, unless that was done already."""
        if run.stream is None:
            self._lw_take_stream(run)

    def reload_loaders_if_due(self, run: Run) -> None:
        """Ask for training loaders when `reload_dataloaders_every_n_epochs` says so. Called before each epoch."""
        every = self._lw_arguments.reload_dataloaders_every_n_epochs
        if every and self.progress.epochs and self.progress.epochs % every == 0:
            self._lw_replace_stream(run)

    def _lw_reload_validation_if_due(self) -> None:
        """Ask for validation loaders when `reload_dataloaders_every_n_epochs` says so. Called before a validation."""
        every, epoch = self._lw_arguments.reload_dataloaders_every_n_epochs, self.progress.epochs
        if not every or self._lw_loaders.epoch_of_validation == epoch:
            return
        # From the epoch alone, so that a resumed run asks where the uninterrupted one does.
        spacing = self._lw_arguments.check_val_every_n_epoch or 1
        if ((epoch + 1) // spacing - 1) % math.ceil(every / spacing) == 0:
            self._lw_loaders.drop_validation()
            self._lw_loaders.open_validation()
            self._lw_loaders.epoch_of_validation = epoch

    def reload_loaders(self, run: Run) -> None:
        """Ask for new loaders now; called between two epochs, by the tuner when it changed the batch size."""
        self._lw_replace_stream(run)
        self._lw_loaders.drop_validation()
        self._lw_loaders.open_validation()

    def _lw_replace_stream(self, run: Run) -> None:
        if run.stream is not None:
            run.stream.shut_down()
        self._lw_take_stream(run)

    def _lw_take_stream(self, run: Run) -> None:
        stream = run.stream = self._lw_loaders.open_training()
        from ..data.batch_size import BatchSizes

        self._lw_metrics.sizes = BatchSizes(stream.loader, stream.count_latest)
        if run.has_ranks:
            from .loop.copies import watch_batches  # not imported where there is one process

            watch_batches(stream, self.strategy)
        stream.next_batch = run.lifecycle.bracketed(stream.next_batch, "[BatchStream].next_batch")
        if self._lw_arguments.global_batch_size is not None:
            from .session.global_batch import derive_accumulation

            self.accumulate_grad_batches = derive_accumulation(self, run)

    def sanity_check(self, run: Run) -> None:
        """Validate a few batches, to find mistakes before an epoch has been spent. Leaves no trace."""
        if self.fit_loop.is_done or not self._lw_arguments.num_sanity_val_steps or not self._lw_loaders.may_validate():
            return
        self._lw_share_buffers(run)
        window = run.metrics.window
        before = run.before_validation = snapshot.before_validation(run)
        self.state.stage = "sanity_check"
        run.lifecycle.on_sanity_check_start()
        # A first call of val_dataloader is part of the check, and what it draws at random is undone with it.
        data = self._lw_loaders.open_sanity()
        generators = before.generators = self._lw_loaders.capture_generators()
        if data is not None and data.num_batches:
            self._lw_eval_loop(run, "validation", data).run(run, data)
        if run.monitored is not None:
            run.monitored.check_validation()
        run.metrics.discard_epoch("validation")
        run.metrics.window = window
        run.lifecycle.on_sanity_check_end()
        self.state.stage = "train"
        run.before_validation = None
        self._lw_loaders.restore_generators(generators)
        restore_rng(before.rng)

    def _lw_share_buffers(self, run: Run) -> None:
        """Let all ranks evaluate the same module: running statistics are of each rank's own data until now."""
        if run.has_ranks:
            self.strategy.sync_buffers(run.model)

    def validate_in_fit(self, run: Run) -> None:
        """Validate between two training steps. Training's random number generators are untouched by it."""
        self._lw_share_buffers(run)
        run.metrics.batch = run.metrics.sized = None  # the last training batch is not kept during the validation
        self.state.stage = "validate"
        self._lw_reload_validation_if_due()
        data = self._lw_loaders.open_validation()
        if data is None or not data.num_batches:
            self.state.stage = "train"
            return
        before = run.before_validation = snapshot.before_validation(run)
        self.free_gradients(run)
        validate = run.lifecycle.bracketed(self._lw_eval_loop(run, "validation", data).run, "[EvalLoop].validation")
        self.timeline.timed("validation", validate)(run, data)
        self.training_rng.leave_validation(run, before)
        run.before_validation = None
        if run.validated is not None and self._lw_has_more_to_train(run):
            run.validated = None
        self.state.stage = "train"

    def free_gradients(self, run: Run) -> None:
        """Zero the gradients before a validation, by the module's hook where it has one."""
        own = run.lifecycle.own("on_validation_model_zero_grad")
        if own is not None:
            own()
        # Else the module may be accumulating, or the window continues after the epoch's end.
        elif run.is_automatic and not (run.carried is not None and run.carried.count):
            run.module.zero_grad()

    def _lw_has_more_to_train(self, run: Run) -> bool:
        """Whether more batches of this epoch follow."""
        return run.stream is not None and run.stream.has_next() and not self.fit_loop.is_done

    def _lw_eval_loop(self, run: Run, stage: str, data: EvalLoader) -> EvalLoop:
        from .loop.eval_loop import EvalLoop

        # What a step in inference mode leaves behind cannot be trained: a buffer or a cache of the user, what a
        # compiled module keeps, gathered parameters. So training's own validations do without.
        keeps_tensors = (
            self.state.fn == "fit"
            or self.strategy.traits.shards_parameters
            or self.strategy.traits.traces_lazily
            or self._lw_compiling is not None
            or any(getattr(m, "_compiled_call_impl", None) is not None for m in run.module.modules())
        )
        return EvalLoop(
            stage,
            transfer=assemble.transfer_of(run),
            step=assemble.bind_step(run, f"{stage}_step", several_loaders=len(data.loaders) > 1),
            context=torch.inference_mode if self._lw_arguments.inference_mode and not keeps_tensors else torch.no_grad,
            log_every_n_steps=cast(int, self._lw_arguments.log_every_n_steps),
        )

    def accumulation_for_epoch(self, epoch: int) -> int:
        """Return the micro-batches of a window in this epoch."""
        scheduler = self.accumulation_scheduler
        size = scheduler.get_accumulate_grad_batches(epoch) if scheduler is not None else self.accumulate_grad_batches
        self._lw_metrics.is_weighing_steps = size > 1 or self.strategy.traits.parts_per_batch > 1
        return size

    # --- what the trainer does at events, between the hooks and the checkpoints -------------------------------

    def _lw_after_batch(self, *_: object) -> None:
        run = self._lw_run
        assert run is not None
        if not run.at_boundary or not run.has_stepped:
            if run.at_boundary and run.is_automatic and not (run.carried is not None and run.carried.count):
                self._lw_log_skipped(run)
            elif not run.is_automatic and run.metrics.waiting_since is None:
                run.metrics.waiting_since = run.metrics.window
            return
        every = self._lw_arguments.log_every_n_steps
        # On several ranks the step alone decides: whether to stop is not known to all of them yet.
        stops = self.should_stop and not run.has_ranks
        if every and (self.progress.steps % every == 0 or stops or self._lw_arguments.fast_dev_run):
            self.timeline.enter("logging")
            row, probed = run.metrics.read_step(run.watch.probe())
            if self.progress.skipped_steps:
                row = {**run.watch.counts(self.progress), **row}
            if row:
                self.log_metrics(row)
            self.timeline.leave()
            run.watch.judge(probed, self.progress)
            if run.monitored is not None:
                run.monitored.check_step()
                run.monitored = None
        elif self.progress.steps % MOST_KEPT == 0 if run.has_ranks else len(run.watch.losses) >= MOST_KEPT:
            run.watch.look(self.progress)
        run.metrics.waiting_since = None

    def _lw_log_skipped(self, run: Run) -> None:
        """Log the values of a window that made no step, with the index of the step that it would have made."""
        every, progress = self._lw_arguments.log_every_n_steps, self.progress
        if every and (progress.steps + progress.skipped_steps) % every == 0:
            row, probed = run.metrics.read_step(run.watch.probe())
            if row:
                row = {**run.watch.counts(progress), "epoch": progress.epochs, **row}
                self.log_metrics(row, step=progress.steps)
            run.watch.judge(probed, progress)

    def _lw_after_epoch_start(self) -> None:
        self.progress.epoch_announced = True

    def _lw_after_train_epoch(self) -> None:
        run = self._lw_run
        assert run is not None
        every = self._lw_arguments.log_every_n_steps
        if run.metrics.waiting_since is not None and every and (self.progress.steps + 1) % every == 0:
            waiting, _ = run.metrics.read_step()
            if waiting:
                self.log_metrics({"epoch": self.progress.epochs, **waiting}, step=self.progress.steps)
        run.metrics.waiting_since = None
        row, _ = run.metrics.finish_epoch("train", self.progress.steps)
        if self.progress.skipped_steps:
            row = {**run.watch.counts(self.progress), **row}
        if row:
            self.log_metrics(row)
        if run.is_epoch_over and run.plan is not None:
            run.plan.step_plateaus(run, self.progress.epochs + 1)
        self.progress.is_closing_epoch = run.is_epoch_over

    def _lw_after_validation(self) -> None:
        if self._lw_run is not None and self._lw_run.before_validation is not None:
            self._lw_run.before_validation.is_over = True
        if not self.sanity_checking:
            self._lw_finish_evaluation("validation")
            if self.state.fn == "fit" and self._lw_run is not None:
                self.fit_loop.mark_validated(self._lw_run)
                self.progress.validation_ending = True

    def _lw_after_validation_end(self) -> None:
        self.progress.validation_ending = False

    def _lw_after_test(self) -> None:
        self._lw_finish_evaluation("test")

    def _lw_finish_evaluation(self, stage: str) -> None:
        row, self._lw_results = self._lw_metrics.finish_epoch(stage, self.progress.steps)
        if row:
            self.log_metrics(row)

    # --- what modules and callbacks call ---------------------------------------------------------------------------

    def _lw_present(self, what: str) -> Run:
        if self._lw_run is None:
            raise ModuleError(f"{what} was called outside of a run.", fix="call it in a hook, or in training_step.")
        return self._lw_run

    def manual_backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run a backward pass in manual optimization; modules call `self.manual_backward`."""
        manual.manual_backward(self._lw_present("manual_backward"), loss, *args, **kwargs)

    def count_step(self) -> None:
        """Count a training step that no optimizer makes; modules call `self.count_step`."""
        manual.count_step(self._lw_present("count_step"))

    def clip_gradients(
        self, optimizer: Optimizer | ManagedOptimizer, value: float | None = None, algorithm: str | None = None
    ) -> Tensor | None:
        """Clip gradients of an optimizer; modules call `self.clip_gradients`."""
        run = self._lw_present("clip_gradients")
        value = self.gradient_clip_val if value is None else value
        return manual.clip_gradients(
            run, manual.plain_optimizer(optimizer), value, algorithm or self.gradient_clip_algorithm
        )  # fmt: skip

    def toggle(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Let only this optimizer's parameters require gradients."""
        run = self._lw_run_to_toggle("toggle_optimizer")
        self._lw_toggles.toggle(manual.plain_optimizer(optimizer), run.optimizers)

    def untoggle(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Undo `toggle`."""
        self._lw_run_to_toggle("untoggle_optimizer")
        self._lw_toggles.untoggle(manual.plain_optimizer(optimizer))

    def _lw_run_to_toggle(self, what: str) -> Run:
        """Return the present run, or the last one, whose optimizers are still there."""
        run = self._lw_run or self._lw_last_run or self._lw_present(what)
        if run is self._lw_run:
            manual.give_back(run)
        return run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send host numbers to all loggers. A logger that fails is reported once and left out; training continues.

        Args:
            metrics: Key -> number. A key `step` sets the x axis.
            step: x axis; None is the index of the last training step, and adds the key `epoch`.
        """
        row = dict(metrics)
        if "step" in row:
            step = int(row.pop("step"))
        elif step is None:
            at = (self.progress.steps, self.progress.epochs) if self.state.fn == "fit" else self._lw_records_at
            row.setdefault("epoch", at[1])
            step = max(at[0] - 1, 0)
        self.timeline.timed("logging", self._lw_output.write)(row, step, samples=self.samples_of_all_ranks())

    def samples_of_all_ranks(self) -> int:
        """Return the samples trained on, without asking the other ranks: each is taken to have as many as this one."""
        before = self.progress.samples_before
        return before + (self.progress.samples - before) * self.strategy.topology.data_size

    def write_hyperparameters(self) -> None:
        """Send hyperparameters of module and data module to the loggers; called once per run."""
        if self.enable_autolog_hparams and not self._lw_arguments.fast_dev_run and self._lw_run is not None:
            module = self._lw_run.module
            graph_of = module if isinstance(module, Module) else None
            self._lw_output.write_hyperparameters([module, self._lw_run.datamodule], graph_of)

    def synchronize_metrics(self, *names: str) -> None:
        """Make `callback_metrics` and `metric_step` equal on all ranks for these keys, until a rank logs them again.

        Call it before a decision that follows from a value that is logged in steps. Each gets the newest value, reduced
        over the ranks that have logged it, as at the end of an epoch: a mean by its weights. Nothing happens with one
        process, nor on a rank that is alone after an error. Otherwise on every rank with the same keys: it
        communicates, once for all keys.

        Args:
            names: Keys of `callback_metrics`; those that were not logged on any rank are left out.
        """
        if self.ranks_answer:
            self._lw_metrics.synchronize(names)

    def managed_schedulers(self) -> list[Any]:  # Any: schedules of any library
        """Return the schedules that a module steps itself; `Module.lr_schedulers` hands them out."""
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
        """Whether the values of the present step go to the loggers."""
        every = self._lw_arguments.log_every_n_steps
        return bool(every) and self._lw_metrics.step % cast(int, every) == 0

    def print(self, *args: object, **kwargs: Any) -> None:  # Any: the arguments of the builtin
        """Print on rank 0, above the progress bar."""
        bar = self.progress_bar_callback
        if bar is not None and not kwargs.get("file"):
            bar.print(*args, **kwargs)
        else:
            self.fabric.print(*args, **kwargs)

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: object = None
    ) -> None:
        """Write a checkpoint, atomically. On every rank.

        In a hook, the remaining listeners of the event (other callbacks, the module, loggers) are called first, so that
        the checkpoint holds the state after the event. The hook cannot log afterwards.

        With `AsyncCheckpointIO` it returns during a run as soon as the state is copied: see `wait_for_save`.

        Args:
            filepath: A path, or an fsspec URL.
            weights_only: Whether to leave out optimizers, schedules, callbacks, and all else that only training needs.
            storage_options: Passed to the checkpoint plugin.

        Raises:
            CheckpointError: Called between two micro-batches of one window, or between the start and the last batch of
                a validation that a callback keeps a state of; or it cannot be written, in which case what was at the
                path before is whole; or an earlier one could not be written in the background.
        """
        self.save_checkpoint_to([filepath], weights_only, storage_options)

    def save_checkpoint_to(
        self, filepaths: Sequence[str | Path], weights_only: bool | None = None, storage_options: object = None
    ) -> None:
        """Write one checkpoint to several paths, one after the other; else as `save_checkpoint`."""
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
        """Return full weights on rank 0's CPU, {} on other ranks. On every rank: it communicates.

        `module.state_dict()` has this rank's part where a strategy shards a model, or is an error. For a model of
        transformers: `state = trainer.full_state_dict(self.model)`, then `self.model.save_pretrained(path,
        state_dict=state)` on rank 0.

        Args:
            module: The module that is trained (None), or a submodule of it, whose names begin there.

        Raises:
            CheckpointError: A rank has gone past this place without calling it.
            ModuleError: It is another module, or none was attached yet.
        """
        run = self.latest_run()
        if run is None:
            raise ModuleError(
                "trainer.full_state_dict was called before a module was attached.", fix="call trainer.fit first."
            )
        return self._lw_saving.full_state(run, module)

    @property
    def saves_in_background(self) -> bool:
        """Whether `save_checkpoint` returns before the file is complete."""
        return self._lw_saving.is_in_background

    def wait_for_save(self, *, before_save: bool = False) -> None:
        """Return when the last checkpoint is complete, and what follows a save is done. On every rank.

        Nothing to wait for without `AsyncCheckpointIO`. Otherwise the Trainer does this before the next save, at the
        end of training, before a verb returns, and after an error. Call it to read a checkpoint during a run.

        Args:
            before_save: Whether the next save is what waits.

        Raises:
            CheckpointError: It could not be written; on every rank.
        """
        self._lw_saving.wait(before_save=before_save)

    def when_saved(self, done: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Call `done` when the last checkpoint is complete: now, or later in the main thread, on all ranks alike.

        Called by callbacks after `save_checkpoint`, on every rank.

        Args:
            done: Removes older files, say. May communicate.
            failed: Called instead if the checkpoint could not be written in the background.
        """
        self._lw_saving.then(done, failed)

    def batch_size_of(self, batch: Batch) -> int | None:
        """Return how many samples a batch of the present loader has; None where it is unknown."""
        sizes = self._lw_metrics.sizes
        return find_batch_size(batch) if sizes is None else sizes.of(batch)

    def after_epoch_end(self, action: Callable[[], None]) -> None:
        """Call `action` after this epoch's end and its checkpoints; for callbacks, in `on_train_epoch_end`."""
        self._lw_present("after_epoch_end").after_epoch.append(action)

    @property
    def ranks_answer(self) -> bool:
        """Whether there are other ranks, and they are at the same point: not so after an error of this rank alone."""
        return self.world_size > 1 and self.fabric.is_connected and (self._lw_run is None or self._lw_run.ranks_answer)

    def _lw_launch(self, verb: str, model: nn.Module | None, **arguments: object) -> Any:  # Any: what the verb returns
        """Run a verb in new processes, and take back what it changed there."""
        from .session import spawned

        return spawned.launch(self, verb, model, **arguments)

    @property
    def _lw_starts_processes(self) -> bool:
        return bool(getattr(self.fabric.launcher, "starts_processes", False)) and not self._lw_is_in_child

    @property
    def stop_coordination(self) -> StopCoordination | None:
        """What the ranks of the present run agree on; None with one process."""
        return self._lw_run.stop_coordination if self._lw_run is not None else None

    def take_back(self, module: nn.Module, result: StateDict) -> None:
        """Take what a verb that ran in other processes changed there."""
        checkpoint = result.get("checkpoint")
        if checkpoint is not None:
            self.progress.load_state_dict(result["progress"])
            self._lw_stream_state = result["stream"]
            self.training_rng.note_left(result["rng_of_ranks"])
            self._lw_timeline = result["timeline"]
            self._lw_spawned_checkpoint = checkpoint
        self._lw_spawned_module = module
        self.state.fn, self.state.status = result["state"]
        self._lw_metrics.take_results(result["metrics"], result["metric_steps"])
        self._lw_metrics.progress_bar.update(result["progress_bar"])
        self._lw_output.latest.update(result["logged"])
        self.should_stop = result["should_stop"]
        self._lw_output.join_versions(result["versions"])
        snapshot.put_back_loggers(self._lw_output, result["loggers"])
        for callback in self.callbacks:
            if self.state.fn == "fit":
                vars(callback)["_adopted_by"] = self._lw_identity
            state = result["callbacks"].get(callback.state_key)
            if state:
                callback.load_state_dict(state)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Training steps that fit will take in all; infinity where no limit is known. Loads the training data."""
        run = self._lw_run
        if run is None:
            raise ModuleError(
                "trainer.estimated_stepping_batches was read outside of fit.", fix="read it in configure_optimizers."
            )
        self.open_training(run)
        assert run.stream is not None
        num_batches, limit = run.stream.num_batches, self.fit_loop.epoch_limit
        max_steps: int | float = self.fit_loop.max_steps if self.fit_loop.max_steps != -1 else math.inf
        if self.max_samples is not None:
            from .loop.data_limits import steps_until_max_samples

            max_steps = min(max_steps, steps_until_max_samples(self, num_batches, limit))
        if limit == -1 or math.isinf(num_batches):
            return max_steps
        scheduler = self.accumulation_scheduler
        if scheduler is None and self.accumulate_across_epochs:
            total = math.ceil(num_batches * limit / self.accumulate_grad_batches)
        elif scheduler is None:
            total = math.ceil(num_batches / self.accumulate_grad_batches) * limit
        else:
            total = sum(math.ceil(num_batches / scheduler.get_accumulate_grad_batches(epoch)) for epoch in range(limit))
        return min(total, max_steps)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[object]:
        """Return a context in which modules are created on the device, with the precision's dtype."""
        return self.fabric.init_module(empty_init=empty_init)


# What may differ over ranks: where they are, and what a person sees.
_PER_RANK = {
    "devices", "default_root_dir", "enable_progress_bar", "enable_model_summary", "logger", "callbacks", "profiler",
}  # fmt: skip


def _log_nothing(*_: object) -> None:
    """Stand for `log` in barebones mode."""
