"""`TrainerAttributes`, the base of `lw.Trainer`: the attributes that users, callbacks and modules read.

Reading them changes nothing in a run. Some arguments and limits can also be assigned, under the argument's name.
"""

from __future__ import annotations

import inspect
import math
import signal
from typing import TYPE_CHECKING, Any, Self, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from ..callbacks import Callback, Checkpoint, GradientAccumulationScheduler
from ..errors import ConfigError, nearest
from ..loggers import Logger
from ..tracebacks import show_trimmed
from .loop.schedule import LRSchedulerConfig
from .run import FitRun, Run
from .state import Progress

if TYPE_CHECKING:
    from datetime import timedelta

    from ..accelerators import Accelerator
    from ..callbacks import EarlyStopping, ProgressBar
    from ..data.module import DataModule
    from ..fabric import Fabric
    from ..precision import Precision
    from ..protocols import Loaders, StateDict
    from ..strategies import Strategy
    from .behavior import Behavior, BehaviorParts
    from .checkpointing.saving import Saving
    from .loop.fit_loop import FitLoop
    from .loop.run_signals import RunSignals
    from .loop.training_rng import TrainingRng
    from .metrics.current_values import CurrentValues
    from .metrics.log_output import LogOutput
    from .metrics.metrics import Metrics
    from .session.arguments import Arguments
    from .session.loaders import StageLoaders
    from .session.session import Session
    from .state import TrainerState
    from .timeline.timeline import Timeline
    from .trainer import Trainer

_READABLE_ARGUMENTS = {
    "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches",
    "check_val_every_n_epoch", "log_every_n_steps", "overfit_batches", "fast_dev_run",
    "reload_dataloaders_every_n_epochs", "num_sanity_val_steps", "barebones", "global_batch_size",
    "max_samples", "max_tokens", "accumulate_across_epochs",
}  # fmt: skip
_LIMITS = {"max_epochs", "min_epochs", "max_steps", "min_steps"}
_STAGES = {
    "training": "train", "validating": "validate", "testing": "test", "predicting": "predict",
    "sanity_checking": "sanity_check",
}  # fmt: skip


class _Counts:
    """`trainer.progress`, which takes counts only. It has no `__get__`: reading costs what any attribute costs."""

    def __set__(self, trainer: TrainerAttributes, value: object) -> None:
        if not isinstance(value, Progress):
            raise self.refuse(value)
        trainer.__dict__["progress"] = value

    @staticmethod
    def refuse(value: object) -> ConfigError:
        return ConfigError(
            f"Expected trainer.progress to be the counts of the run, got {value!r} as its value.",
            fix="use another name for the program's attribute.",
        )


class TrainerAttributes:
    """The attributes of a Trainer: the position of its run, the objects in it, and its results.

    Attributes:
        behavior: The functions that a layer for another library can replace.
        fabric: The Fabric: devices, processes, strategy and precision.
        fit_loop: Runs epochs and steps, and holds `max_epochs`, `min_epochs`, `max_steps` and `min_steps`.
        state: Verb, stage and status.
        progress: Counts of completed epochs, batches, steps, samples and tokens.
        callbacks: The callbacks, in the order in which they are called.
        default_root_dir: Directory or URL for logs and checkpoints.
        accumulate_grad_batches: Micro-batches per optimizer step.
    """

    behavior: Behavior
    fabric: Fabric
    fit_loop: FitLoop
    state: TrainerState
    callbacks: list[Callback]
    default_root_dir: str
    accumulate_grad_batches: int
    _lw_arguments: Arguments
    _lw_loaders: StageLoaders
    _lw_output: LogOutput
    _lw_metrics: Metrics
    _lw_saving: Saving
    _lw_current_values: CurrentValues | None = None
    _lw_run_signals: RunSignals
    _lw_timeline: Timeline | None
    _lw_run: Run | None
    _lw_session: Session | None
    _lw_training_rng: TrainingRng | None
    _lw_last_run: Run | None
    _lw_spawned_module: nn.Module | None
    _lw_settled: StateDict | None = None  # the strategy that was chosen by a plan, and why
    _lw_assigned_datamodule: DataModule | None

    @property
    def parts(self) -> BehaviorParts:
        """The objects created from the arguments, for layers on top of the Trainer; programs do not need them."""
        from .behavior import BehaviorParts

        return BehaviorParts(self._lw_arguments, self._lw_loaders, self._lw_metrics, self._lw_output, self._lw_saving)

    if TYPE_CHECKING:
        progress: Progress
    else:  # type checkers know the arguments from __init__
        progress = _Counts()

        # Here and not in Trainer, whose __init__ is then the signature that `inspect` shows.
        def __new__(cls, *args, **kwargs):
            """Refuse arguments that the constructor does not take, with what to write instead."""
            show_trimmed()
            if not isinstance(cls.progress, _Counts):
                raise _Counts.refuse(cls.progress)
            code, known = cls.__init__.__code__, cls.__init__.__kwdefaults__ or {}
            is_closed = code.co_argcount == 1 and not code.co_flags & inspect.CO_VARKEYWORDS
            if is_closed and code.co_kwonlyargcount == len(known) and not kwargs.keys() <= known.keys():
                from .session.unknown_arguments import refuse_arguments

                refuse_arguments(kwargs.keys() - known.keys(), known)
            return super().__new__(cls)

    @property
    def _lw_itself(self) -> Self:
        """This Trainer itself, also when it is read through a weak reference."""
        return self

    def _lw_settle_strategy(self, module: nn.Module, data: Loaders | DataModule) -> None:
        """Choose the strategy by a plan of a fit, if it is left open; see `settle_strategy`."""
        if self.fabric.leaves_choice and self.fabric.world_size > 1:
            from .session.automatic_strategy import settle_strategy

            settle_strategy(cast("Trainer", self), module, data)

    def present_run(self) -> Run | None:
        """Return the run in progress; None between two verbs."""
        return self._lw_run

    def latest_run(self) -> Run | None:
        """Return the run in progress, else the last one; None before the first."""
        return self._lw_run or self._lw_last_run

    _lw_is_trial = False  # of a search, such as the tuner's
    _lw_told_logs = ""  # the place of the logs, as the last line about it says
    _lw_is_in_child: bool

    @property
    def _lw_reports_runs(self) -> bool:
        """Whether this process logs lines about its runs: on rank 0, without barebones, and not in a search's trial."""
        return self.is_global_zero and not self._lw_arguments.barebones

    @property
    def training_rng(self) -> TrainingRng:
        """State of the random number generators of training."""
        if self._lw_training_rng is None:
            from .loop.training_rng import TrainingRng

            self._lw_training_rng = TrainingRng()
        return self._lw_training_rng

    @training_rng.setter
    def training_rng(self, training_rng: TrainingRng) -> None:
        self._lw_training_rng = training_rng

    @property
    def at_step_boundary(self) -> bool:
        """Whether no accumulation window is in progress, so that a checkpoint can be saved."""
        return self._lw_run is None or self._lw_run.at_boundary

    @property
    def validation_is_due(self) -> bool:
        """Whether a validation runs right after the hooks of the current step."""
        return isinstance(self._lw_run, FitRun) and self.fit_loop.is_validation_due(self._lw_run)

    @property
    def accumulation_scheduler(self) -> GradientAccumulationScheduler | None:
        """The callback that schedules accumulation, or None."""
        return next((c for c in self.callbacks if isinstance(c, GradientAccumulationScheduler)), None)

    @property
    def _lw_batches_until_max_samples(self) -> int | float:
        """Micro-batches until `max_samples` on each rank; infinity without that limit, or if the number is unknown."""
        if self._lw_arguments.max_samples is None:
            return math.inf
        from .loop.data_limits import batches_until_limit

        return batches_until_limit(cast("Trainer", self))

    @property
    def val_check_batch(self) -> int | float:
        """Training batches between two validations; infinity if the interval is a time or there is no training data."""
        return self._lw_loaders.interval_batches

    @property
    def enable_validation(self) -> bool:
        """Whether fit validates: the module has a `validation_step`, and there is at least one validation batch."""
        data = self._lw_loaders.eval.get("validation")
        if data is None:
            return self._lw_loaders.waits_for_validation and self._lw_loaders.may_validate()
        return data.num_batches > 0

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs, which is the index of the current epoch."""
        return self.progress.epochs

    @property
    def global_step(self) -> int:
        """Number of training steps taken. A step of several optimizers counts once; skipped steps do not count."""
        return self.progress.global_step

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of each logged key: shape (), on the device. `float()` of one waits for the device.

        With several ranks, the value of a step is this rank's; see `synchronize_metrics`.
        """
        return self._lw_metrics.callback_metrics()

    def _lw_may_log_at_epoch_end(self, name: str) -> bool:
        """Whether a metric of this name may be logged at the end of the current training epoch."""
        from .session.monitored import may_log_at_epoch_end

        return self._lw_run is not None and may_log_at_epoch_end(self._lw_run, name)

    @property
    def timeline(self) -> Timeline:
        """The time of the current or last fit, in seconds by phase. Its settings apply to the next fit."""
        if self._lw_timeline is None:
            from .timeline.timeline import Timeline

            self._lw_timeline = Timeline()
            self._lw_timeline.is_enabled = not self._lw_arguments.barebones
        return self._lw_timeline

    def metric_step(self, name: str) -> int | None:
        """Return the `global_step` at which `callback_metrics[name]` was computed; None for an unknown key."""
        return self._lw_metrics.metric_step(name)

    @property
    def logged_metrics(self) -> dict[str, float]:
        """The latest value of each key that was sent to the loggers, as host numbers."""
        return dict(self._lw_output.latest)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Host values for the progress bar: of the latest step if on the host, else of the last log boundary."""
        metrics = self._lw_metrics
        if self._lw_current_values is None or self._lw_current_values.metrics is not metrics:
            self._lw_current_values = self.behavior.current_values(metrics)
        return {**metrics.progress_bar, **metrics.bar_at_end, **self._lw_current_values.read()}

    def __repr__(self) -> str:
        limits = {name: getattr(self, name) for name in ("max_epochs", "max_steps")}
        shown = [
            f"{type(self).__name__}({type(self.strategy).__name__}",
            f"devices={self.num_devices}",
            *([f"num_nodes={self.num_nodes}"] if self.num_nodes > 1 else []),
            f"accelerator={type(self.accelerator).__name__.removesuffix('Accelerator').lower()!r}",
            f"precision={self.precision!r}",
            *(f"{name}={value}" for name, value in limits.items() if value not in (None, -1)),
        ]
        return f"{', '.join(shown)})"

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self.fabric.strategy

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator."""
        return self.fabric.accelerator

    @property
    def precision(self) -> str:
        """Name of the precision, such as "bf16-mixed"."""
        return str(self.fabric.precision.precision)

    @property
    def precision_plugin(self) -> Precision:
        """The precision object."""
        return self.fabric.precision

    @property
    def scaler(self) -> object:  # torch's GradScaler, or one of another library
        """The gradient scaler of 16-mixed; None otherwise."""
        return getattr(self.fabric.precision, "scaler", None)

    @property
    def model(self) -> nn.Module | None:
        """The module as the strategy returned it, wrapped or sharded; None before the first run."""
        run = self.latest_run()
        return run.model if run is not None else None

    @property
    def lightning_module(self) -> nn.Module | None:
        """The user's module; None before the first run."""
        run = self.latest_run()
        return run.module if run is not None else self._lw_spawned_module

    @property
    def datamodule(self) -> DataModule | None:
        """The user's data module, of the current or last run, or the one assigned since; None without one."""
        if self._lw_assigned_datamodule is not None:
            return self._lw_assigned_datamodule
        run = self.latest_run()
        return run.datamodule if run is not None else None

    @datamodule.setter
    def datamodule(self, datamodule: DataModule | None) -> None:
        self._lw_assigned_datamodule = datamodule

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers of the current or last fit; empty in an evaluation, and after one of another module."""
        run = self.latest_run()
        return list(run.optimizers) if run is not None else []

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """Schedules of the current or last fit; empty in an evaluation, and after one of another module."""
        run = self.latest_run()
        return run.schedulers if run is not None else []

    @property
    def logger(self) -> Logger | None:
        """The first logger; None without loggers. Assigning one replaces all loggers."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self._lw_output.loggers = [] if logger is None else [logger]

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._lw_output.loggers

    @loggers.setter
    def loggers(self, loggers: list[Logger] | None) -> None:
        self._lw_output.loggers = list(loggers or [])

    @property
    def log_dir(self) -> str | None:
        """Directory of the first logger; `default_root_dir` without loggers, or if the logger writes no local files."""
        if not self.loggers:
            return self.default_root_dir
        first = self.loggers[0]
        directory = getattr(first, "log_dir", None) or getattr(first, "save_dir", None)
        return str(directory) if directory is not None else self.default_root_dir

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first checkpoint callback; None without one."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """All checkpoint callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first early-stopping callback; None without one."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All early-stopping callbacks."""
        from ..callbacks import EarlyStopping

        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar; None without one."""
        from ..callbacks import ProgressBar

        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes."""
        return self.fabric.global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process among the processes of its node."""
        return self.fabric.local_rank

    @property
    def node_rank(self) -> int:
        """Rank of this node."""
        return self.fabric.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.fabric.world_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return int(getattr(self.fabric, "num_nodes", 1))

    @property
    def num_devices(self) -> int:
        """Number of processes per node, at least 1."""
        return max(1, self.world_size // self.num_nodes)

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices of this node, one for each process; CPU processes are numbered from 0."""
        return [number if one.index is None else one.index for number, one in enumerate(self.fabric.devices)]

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has global rank 0."""
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """`num_replicas` and `rank` for a DistributedSampler: the data size and data rank; None with one process."""
        topology = self.fabric.strategy.topology
        return None if self.world_size == 1 else {"num_replicas": topology.data_size, "rank": topology.data_rank}

    @property
    def received_sigterm(self) -> bool:
        """Whether SIGTERM, or a callback through `run_signals`, requested the end of the run."""
        return self._lw_run_signals.requested is signal.SIGTERM

    @property
    def interrupted(self) -> bool:
        """Whether the last run failed or was interrupted."""
        return self.state.status == "interrupted"

    @property
    def run_signals(self) -> RunSignals:
        """The signal handling of the current or last run; callbacks may use it to end the run."""
        return self._lw_run_signals

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last one of the epoch."""
        run = self._lw_run
        stream = None if run is None else run.opened
        return stream is not None and not stream.has_next()

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of an epoch on this rank; infinity if unknown, and before the training data are opened."""
        run = self.latest_run()
        stream = None if run is None else run.opened
        return math.inf if stream is None else stream.num_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Validation batches of each loader."""
        return self._lw_loaders.num_batches("validation")

    @property
    def num_test_batches(self) -> list[int | float]:
        """Test batches of each loader."""
        return self._lw_loaders.num_batches("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Prediction batches of each loader."""
        return self._lw_loaders.num_batches("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each loader in the sanity check; empty before the validation loaders are opened."""
        count = self._lw_arguments.num_sanity_val_steps or 0
        limit = math.inf if count == -1 else count
        return [min(limit, num_batches) for num_batches in self.num_val_batches]

    @property
    def train_dataloader(self) -> Loaders:
        """The training loaders as the user passed them."""
        return self._lw_loaders.train

    @property
    def val_dataloaders(self) -> Loaders:
        """The validation loaders as the user passed them."""
        return self._lw_loaders.original("validation")

    @property
    def test_dataloaders(self) -> Loaders:
        """The test loaders as the user passed them."""
        return self._lw_loaders.original("test")

    @property
    def predict_dataloaders(self) -> Loaders:
        """The prediction loaders as the user passed them."""
        return self._lw_loaders.original("predict")

    # Arguments that can be read back under their own names.
    def __getattr__(self, name: str) -> Any:  # Any: arguments differ in type
        if name in _READABLE_ARGUMENTS and "_lw_arguments" in self.__dict__:
            return getattr(self._lw_arguments, name)
        if name in _LIMITS and "fit_loop" in self.__dict__:
            return getattr(self.fit_loop, name)
        if name in _STAGES and "state" in self.__dict__:
            return self.state.stage == _STAGES[name]
        raise AttributeError(f"Trainer has no attribute {name!r}{nearest(name, dir(type(self)))}")

    def __dir__(self) -> list[str]:
        """List what can be read now: `inspect.getmembers`, notebooks and fire read all of it."""
        outside = {"estimated_stepping_batches"} if self.__dict__.get("_lw_run") is None else set()
        return sorted({*super().__dir__(), *_READABLE_ARGUMENTS, *_LIMITS, *_STAGES} - outside)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _LIMITS and "fit_loop" in self.__dict__:
            setattr(self.fit_loop, name, value)
        elif name in _READABLE_ARGUMENTS:
            setattr(self._lw_arguments, name, value)
        elif name in _STAGES:
            self.state.stage = _STAGES[name] if value else None
        else:
            object.__setattr__(self, name, value)

    @property
    def evaluating(self) -> bool:
        """Whether the run is in a validation, a test or the sanity check; False in a prediction."""
        return self.state.stage in ("validate", "test", "sanity_check")

    @property
    def val_check_interval(self) -> int | float | str | timedelta | dict[str, float] | None:
        """The argument `val_check_interval`; 1.0 if it was not passed."""
        return self._lw_arguments.val_check_interval
