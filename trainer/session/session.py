"""`Session`: one call of a verb, from its arguments to its end. What lies between is in fit.py and evaluation.py."""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import nn

from ...accelerators.matmul_precision import BackendModes
from ...callbacks import Callback
from ...console import show_logs
from ...errors import ConfigError
from ...fabric.child_signals import without_child_signals
from ...profilers import PassThroughProfiler, Profiler
from ...strategies.optional import changing, stages_of
from ...tracebacks import show_trimmed
from ..checkpointing import snapshot
from ..lifecycle import Lifecycle, hook_names
from ..loop.eval_loader import EvalLoader
from ..loop.eval_loop import EvalLoop
from ..loop.fit_loop import estimate_steps
from ..loop.loss import RanksWindowLoss, WindowLoss
from ..loop.run_signals import RunSignals
from ..module import Module
from ..run import Run
from . import assemble
from .attach import attach, know_weakly
from .checks import builders, check, check_layers, check_packages, unwrapped

if TYPE_CHECKING:
    from signal import Signals

    from ...checkpoint.content import Content
    from ...data.module import DataModule
    from ...protocols import Loaders
    from ..loop.stop_points import StopPoints
    from ..trainer import Trainer

logger_ = logging.getLogger(__name__)


class Session(ABC):
    """The actions of every verb before, around and after its loop.

    `with session:` sets signal handlers, backend modes and the Trainer's state. At its end it undoes in reverse order
    what this and `begin` have set. After an error it notifies callbacks and loggers first.

    Args:
        trainer: Its arguments apply, and it keeps the results of the verb.
        verb: "fit", "validate", "test" or "predict".
        datamodule: The user's data module, or None.
        given: The loaders that were passed to the verb, by stage.

    Attributes:
        module: The user's module; known from `begin` on.
        run: The state that loops and steps read; there from the middle of `begin` on.
        ckpt_path: What the user passed.
        profiler: None where there is nothing to measure, so that steps are not bracketed.
        log: Where `self.log` of modules goes.
        ending: Undoes, when the verb ends, what it has begun.
        attachment: Detaches the module and its data after that.
        behavior: The functions at the seams, which a layer for another library may replace.
        begun_s: When the verb began, in seconds of the monotonic clock.
        is_compiled: Whether what the run calls was compiled.
    """

    run_type: type[Run] = Run
    lifecycle_type: type[Lifecycle] = Lifecycle
    module: nn.Module
    run: Run
    ckpt_path: str | Path | None

    def __init__(
        self, trainer: Trainer, verb: str, *, datamodule: DataModule | None, given: dict[str, Loaders]
    ) -> None:
        self.trainer, self.verb, self.datamodule, self.given = trainer, verb, datamodule, given
        self.fabric, self.strategy, self.arguments = trainer.fabric, trainer.fabric.strategy, trainer._lw_arguments
        self.loaders, self.output, self.metrics = trainer._lw_loaders, trainer._lw_output, trainer._lw_metrics
        self.progress, self.state, self.behavior = trainer.progress, trainer.state, trainer.behavior
        self.profiler: Profiler | None = None if isinstance(trainer.profiler, PassThroughProfiler) else trainer.profiler
        self.log: Callable[..., object] = _log_nothing if self.arguments.barebones else self.metrics.log
        self.ending, self.attachment = ExitStack(), ExitStack()
        self.begun_s = time.monotonic()
        self.is_compiled = False

    # --- around a verb ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Set the state of the verb."""
        trainer, arguments = self.trainer, self.arguments
        if trainer._lw_run is not None:
            raise ConfigError(
                f"trainer.{self.verb} was called while trainer.{self.state.fn} is running.",
                fix="use a second Trainer for a run within a run.",
            )
        show_logs()
        show_trimmed()
        self.state.begin(self.verb)
        trainer.ckpt_path = None
        trainer._lw_run_signals = signals = RunSignals(self.requeue_signal())
        modes, training_rng = BackendModes(), trainer.training_rng
        with ExitStack() as ending:
            ending.callback(self.release_trainer)
            ending.enter_context(signals)
            ending.push(self.attachment)
            modes.set(
                deterministic=arguments.deterministic,
                benchmark=arguments.benchmark,
                matmul_precision=arguments.matmul_precision,
            )
            ending.callback(lambda: self.strategy.teardown())
            ending.callback(modes.put_back)
            ending.callback(self.detach)
            training_rng.enter()
            ending.callback(training_rng.leave, has_trained=self.verb == "fit")
            self.ending = ending.pop_all()
        trainer._lw_session = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Notify listeners of an error, and undo what the session has set."""
        with self.ending:
            if error is not None:
                with without_child_signals(error):  # a worker's end may arrive, also within the import
                    from .failure import fail

                    fail(self, error)
        if error is None:
            self.state.end()
            self.trainer._lw_run_signals.raise_late(self.verb)

    def requeue_signal(self) -> Signals | None:
        """Return the signal with which the cluster asks to save and requeue the job; None without."""
        return None

    # --- the beginning ---------------------------------------------------------------------------------------------

    def begin(self, model: nn.Module) -> None:
        """Attach module and data, start the processes, and run the hooks up to `configure_model`.

        The order is the same for every verb:

            check       what was passed, before processes start
            launch      the processes, which watch each other from here on
            attach      the module belongs to this session; it may bring callbacks
            make_run    who listens to what is settled: the lifecycle is compiled
            set_up      prepare_data, setup, configure_model; ranks compare what they have
            compile     what the run will call
            place       the module on its device, as the strategy runs it
        """
        self.module = module = unwrapped(model)
        if self.datamodule is not None:
            self.trainer._lw_assigned_datamodule = None
        self._note_compiler(model)
        self.check()
        self.launch()
        self.launched()
        self.attachment.callback(attach(self, module, self.datamodule))
        self._take_callbacks()
        self.make_run()
        self.set_up()
        self._compile()
        self.place()

    def check(self) -> None:
        """Refuse what cannot run."""
        check(self, self.module, self.datamodule)
        self.loaders.begin(self.module, self.datamodule, self.given)
        self.check_verb()
        check_layers(self.strategy, self.module)
        check_packages(self.trainer, self.verb, self.ckpt_path)

    @abstractmethod
    def check_verb(self) -> None:
        """Refuse a module or data that do not suit this verb."""

    def launch(self) -> None:
        """Start the processes, unless they exist, and connect this one."""
        self.fabric.launch()

    def launched(self) -> None:
        """Connect this rank to the others, to detect failures and stop at the same step; a no-op with one process."""
        watch = self.fabric.watch
        if watch is not None:
            watch.describe = self.place_of_run
            self.trainer._lw_run_signals.connect(watch)

    def rejoin_ranks(self) -> None:
        """Continue with the other ranks after a run within this run; on every rank."""
        watch, signals = self.fabric.watch, self.trainer._lw_run_signals
        if watch is not None and signals.watch is not None:
            watch.describe = self.place_of_run
            signals.rejoin()

    def _take_callbacks(self) -> None:
        """Take the callbacks that the module configures. On every rank."""
        extra = self.module.configure_callbacks() if isinstance(self.module, Module) else None
        if extra:
            for callback in [extra] if isinstance(extra, Callback) else extra:
                self.behavior.check_hook_names(callback, "callbacks", hook_names("callbacks"))
            self.trainer.callbacks[:] = assemble.merge_callbacks(self.trainer.callbacks, extra)

    def make_run(self) -> Run:
        """Compile the lifecycle and return the run; the callbacks are known."""
        trainer, fabric, strategy, metrics, module = self.trainer, self.fabric, self.strategy, self.metrics, self.module
        metrics.device = fabric.device
        self.output.set_rank(fabric.global_rank)
        for callback in trainer.callbacks:
            if isinstance(module, Module):
                callback.__dict__.update(log=module.log, log_dict=module.log_dict)
        lifecycle = self.lifecycle_type(
            trainer=trainer,
            module=module,
            callbacks=trainer.callbacks,
            datamodule=self.datamodule,
            metrics=metrics,
            profiler=self.profiler,
            system=self.actions(),
        )
        has_ranks = fabric.world_size > 1
        topology = strategy.topology
        rank, size = topology.log_place
        metrics.connect(
            (lambda obj: topology.logs(strategy.gather_objects(obj))) if has_ranks else None,
            rank=rank,
            size=size,
            module=module,
            has_silent_ranks=strategy.traits.has_stages,
        )
        if self.arguments.reproducible:
            from ..reproducible_world.metrics import use_exact_metrics

            use_exact_metrics(metrics, rank=rank, size=size, module=module)
        trainer._lw_watch_losses.gather = strategy.gather_objects if has_ranks else None
        self.run = trainer._lw_run = self.run_type(
            trainer=trainer,
            fabric=fabric,
            module=module,
            model=module,
            datamodule=self.datamodule,
            lifecycle=lifecycle,
            metrics=metrics,
            progress=self.progress,
            run_signals=trainer._lw_run_signals,
            callbacks=trainer.callbacks,
            loaders=self.loaders,
            output=self.output,
            state=self.state,
            seconds_since_validation=trainer.fit_loop.seconds_since_validation,
            window_loss=self._window_loss() if has_ranks else WindowLoss(fabric.device),
            watch=trainer._lw_watch_losses,
            is_automatic=bool(getattr(module, "automatic_optimization", True)),
            skips_bad_steps=self.arguments.nonfinite_loss == "skip",
            has_ranks=has_ranks,
            managed_type=self.behavior.managed_optimizer,
            stop_points=self._stop_coordination() if has_ranks else None,
        )
        return self.run

    def _window_loss(self) -> WindowLoss:
        """Return the `WindowLoss` of the run."""
        strategy = self.strategy
        counts = strategy.uneven == "zero_weight" or self.arguments.nonfinite_loss == "skip"
        kind: type[RanksWindowLoss] = RanksWindowLoss
        if stages_of(strategy) is not None:
            from ..loop.stages_loss import StagesWindowLoss

            kind = StagesWindowLoss
        return kind(self.fabric.device, strategy, counts=counts)

    def _stop_coordination(self) -> StopPoints | None:
        """Return the object through which all ranks stop at the same point; None without a watch."""
        signals = self.trainer._lw_run_signals
        if signals.stop_coordinator is None:
            return None
        from ..loop.stop_points import StopPoints

        return StopPoints(weakref.proxy(self.trainer), signals, signals.stop_coordinator)

    @abstractmethod
    def actions(self) -> Mapping[str, Callable[..., object]]:
        """Return what the Trainer does at events, after the user's hooks, by the name of the event."""

    def set_up(self) -> None:
        """Run the hooks up to `configure_model`, and let the ranks compare what they have. On every rank."""
        run, module, strategy = self.run, self.module, self.strategy
        self.loaders.pins = run.device.type == "cuda"
        self._prepare_data()
        run.lifecycle.setup(self.verb)
        names = builders(module, self.behavior.find_override)
        if names:
            with self.fabric.init_module():
                for name in names:
                    getattr(module, name)()
        if strategy.traits.has_stages and getattr(module, "exclude_frozen_parameters", False):
            raise ConfigError(
                f"{type(module).__name__} sets exclude_frozen_parameters, which pipeline stages do not support.",
                fix="set exclude_frozen_parameters = False, or train without pipeline stages.",
            )
        if run.has_ranks:
            from ..loop import rank_coordination, rank_rng

            facts = rank_coordination.facts_of(self.fabric, self.verb, module, self.trainer._lw_same_everywhere)
            rank_coordination.compare(strategy, facts)
            rank_rng.align_copies(strategy)
            splits = bool(self.trainer.use_distributed_sampler)
            uneven = "zero_weight" if self.arguments.reproducible else strategy.uneven
            rank_coordination.distribute_loaders(self.loaders, strategy, splits=splits, uneven=uneven)

    def _prepare_data(self) -> None:
        """Let one rank of each node (or of all, with `prepare_data_per_node=False`) download; the others wait."""
        hooks = self.run.lifecycle.all_own("prepare_data")
        if not hooks:
            return
        owner = self.datamodule if self.datamodule is not None else self.module
        per_node = bool(getattr(owner, "prepare_data_per_node", True))
        with self.fabric.rank_zero_first(local=per_node):
            if (self.fabric.local_rank if per_node else self.fabric.global_rank) == 0:
                for hook in hooks:
                    hook()

    def _note_compiler(self, model: nn.Module) -> None:
        """Remember how the user compiled a module, if at all; a later verb may be given the module itself, or none."""
        if model is not self.module or "_lw_compile_options" in vars(self.module):
            from ...fabric.compiling import without_wrapper

            self.trainer._lw_own_compiler = without_wrapper(model)

    def _compile(self) -> None:
        """Compile what the run will call, if the user asked for it, until the verb ends."""
        own, options = self.trainer._lw_own_compiler, self.arguments.compile
        given = own[1] if own is not None and own[0] is self.module else None
        if given is None and options is False:
            return
        from .compiling import begin_compiling

        if given is not None and options is not False:
            logger_.warning(
                "the module was compiled with torch.compile: it keeps those options, and compile= of the Trainer is "
                "not used"
            )
        compiled = begin_compiling(self.run, given, {} if isinstance(options, bool) else dict(options))
        self.ending.push(compiled)
        self.is_compiled = True

    def place(self) -> None:
        """Set the module up on its device, as the strategy runs it."""
        self.run.model = self.place_alone() if self.run.has_ranks else self.fabric.prepare_module(self.module)

    def place_alone(self) -> nn.Module:
        """Return the module, set up so that no backward pass reduces its gradients."""
        with changing(self.strategy, self.module):
            module = self.fabric.precision.convert_module(self.module)
        self.strategy.module_to_device(module)
        return self.strategy.place_module(module)

    def load_weights(self, path: str, *, is_trusted: bool) -> Content:
        """Restore the module of a checkpoint, with data module and callbacks; return the checkpoint. On every rank."""
        self.trainer.ckpt_path = path
        content = snapshot.read(self.fabric, path, is_trusted=is_trusted)
        snapshot.restore_module(self.run, content)
        return content

    def synchronize_folders(self) -> None:
        """Let all ranks know where loggers write, and set the folder of the profiler."""
        self.output.agree(self.strategy, checks=self.verb == "fit")
        if self.profiler is not None:
            rank = self.fabric.global_rank if self.run.has_ranks else None
            self.profiler.watch(self.module)
            folder = self.output.files_dir(self.trainer.log_dir)
            self.profiler.setup(stage=self.verb, local_rank=rank, log_dir=folder)

    def write_hyperparameters(self) -> None:
        """Send hyperparameters of module and data module to the loggers; called once per run."""
        if self.trainer.enable_autolog_hparams and not self.arguments.fast_dev_run:
            graph_of = self.module if isinstance(self.module, Module) else None
            self.output.write_hyperparameters([self.module, self.datamodule], graph_of)

    def num_training_batches(self) -> int | float:
        """Return the training batches of an epoch, also where nothing is trained; opens the data."""
        stream = self.loaders.open_training()
        stream.shut_down()
        return stream.num_batches

    def estimate_steps(self) -> int | float:
        """Return the training steps that fit will take in all; infinity where no limit is known. Opens the data."""
        return estimate_steps(self.trainer, self.num_training_batches())

    # --- evaluations -----------------------------------------------------------------------------------------------

    def evaluation_loop(self, stage: str, data: EvalLoader) -> EvalLoop:
        """Return the loop over the data of "validation", "test" or "predict"; called through `behavior`."""
        # Tensors from a step in inference mode cannot be trained: buffers or caches of the user, or of a compiled
        # module, gathered parameters. So validations within fit do not use it.
        keeps_tensors = (
            self.verb == "fit"
            or self.strategy.traits.shards_parameters
            or self.strategy.traits.traces_lazily
            or self.is_compiled
            or any(getattr(m, "_compiled_call_impl", None) is not None for m in self.module.modules())
        )
        return EvalLoop(
            stage,
            transfer=assemble.transfer_of(self.run),
            step=assemble.bind_step(self.run, f"{stage}_step", several_loaders=len(data.loaders) > 1),
            context=torch.inference_mode if self.arguments.inference_mode and not keeps_tensors else torch.no_grad,
            log_every_n_steps=cast(int, self.arguments.log_every_n_steps),
        )

    def finish_evaluation(self, stage: str) -> None:
        """Send the metrics of an evaluation to the loggers, and keep them."""
        row, results = self.metrics.finish_epoch(stage, self.progress.steps)
        self.trainer._lw_results = self.results_to_keep(results)
        if row:
            self.trainer.log_metrics(row)

    def results_to_keep(self, results: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of an evaluation that the verb returns."""
        return results

    # --- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End a verb that has succeeded."""
        trainer = self.trainer
        trainer.wait_for_save()
        self.run.lifecycle.teardown(self.verb)
        trainer.wait_for_save()
        self.output.finalize("success")
        self.report()
        self.output.send_files()

    def report(self) -> None:
        """Print the measurements of the profiler, or write them to its folder."""
        if self.profiler is not None:
            if self.trainer.is_global_zero and self.profiler.filename is None:
                self.trainer.print(self.profiler.summary())
            self.profiler.describe()

    def place_of_run(self) -> dict[str, object]:
        """Return where the run is, for messages about a rank that failed; called from the watch's thread."""
        run = self.trainer._lw_run
        return {} if run is None else run.place()

    def detach(self) -> None:
        """End the run: what it has built stays readable, the module stays on its device."""
        trainer = self.trainer
        run, trainer._lw_run, trainer._lw_session = trainer._lw_run, None, None
        if run is not None:
            run.is_over = True
            self.keep(run)
        self.loaders.shut_down()
        self.metrics.table = self.metrics.nowhere
        self.metrics.batch = self.metrics.sized = None
        if run is not None:
            run.release()

    def keep(self, run: Run) -> None:
        """Keep the results of the verb."""
        # What a fit built stays readable, and can be saved, after the same module was evaluated.
        if self.trainer._lw_last_run is None or self.trainer._lw_last_run.module is not run.module:
            self.trainer._lw_last_run = run

    def release_trainer(self) -> None:
        """Keep only weak references to this Trainer from now on; see `Run.release`."""
        trainer = self.trainer
        module, datamodule = trainer.lightning_module, trainer.datamodule
        for owner in (module, datamodule):
            if owner is not None:
                know_weakly(trainer, owner)
        for callback in trainer.callbacks:
            if vars(callback).get("log") == getattr(module, "log", None):
                vars(callback).pop("log", None)
                vars(callback).pop("log_dict", None)
            if hasattr(callback, "release_run"):
                callback.release_run()


def _log_nothing(*_: object) -> None:
    """Do nothing, in place of `log` in barebones mode."""
