"""`Run` and `FitRun`: the state of one verb. It exists only while that verb runs.

The loops and the step read everything from it; the functions of the hot path are bound once, at the beginning.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .loop.loss import WindowLoss
from .loop.non_finite import LossWatch
from .loop.optimizers import ManagedOptimizer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..callbacks import Callback
    from ..data.module import DataModule
    from ..data.stream import BatchStream
    from ..fabric import Fabric
    from ..protocols import Batch, StateDict, StepFunction, StepOutput
    from ..strategies.base import NoLoss, RunWindow
    from .checkpointing.evaluation_weights import EvaluationWeights
    from .checkpointing.validated_weights import ValidatedWeights
    from .lifecycle import Lifecycle
    from .loop.carried_window import CarriedWindow
    from .loop.own_steps import OwnSteps
    from .loop.run_signals import RunSignals
    from .loop.schedule import LRSchedulerConfig
    from .loop.stop_points import StopPoints
    from .loop.window import Held
    from .metrics.log_output import LogOutput
    from .metrics.metrics import HookTable, Metrics
    from .session.loaders import StageLoaders
    from .session.monitored import MonitoredNames
    from .state import Progress, TrainerState
    from .view import FitView, TrainerView


class _LossAndBackward(Protocol):
    """The type of `StepPlan.loss_and_backward`."""

    def __call__(self, run: FitRun, output: StepOutput, /, *, is_first: bool, is_last: bool) -> Tensor | None: ...


class _LeavesOut(Protocol):
    """The part of `rollback.LeftOutBatches` that the loop needs."""

    def around(self, train_window: Callable[[FitRun, int], bool], /) -> Callable[[FitRun, int], bool]: ...


class _SharesSteps(Protocol):
    """The part of `ReplicaGroups` that checkpoints and the loop need."""

    @property
    def is_within_round(self) -> bool: ...
    def state_dict(self) -> StateDict: ...
    def shared_state(self) -> StateDict: ...


@dataclass(slots=True)
class StepPlan:
    """The functions that one training step calls, bound at the beginning of fit.

    Attributes:
        transfer: Batch on the host -> batch on the device, through the user's transfer hooks where there are any.
        training_step: The module's step under strategy and precision.
        table: Where `self.log` in training_step goes.
        loss_and_backward: Runs backward on what training_step returned, and returns the loss as a value; see
            `window.loss_and_backward`.
        backward: Backward pass, scaled where the precision scales.
        zero_grad: Zeroes the gradients.
        zeroes_early: Whether that comes before a window's first forward pass, so that gradients and activations do not
            take memory at the same time; otherwise after it, where hooks listen that expect that order.
        clip: Clips the gradients, None where nothing clips.
        take_step: Steps the optimizer: `(optimizer) -> whether it stepped`.
        step_by_module: The module's own `optimizer_step`, called instead: `(closure) -> whether it stepped`; None
            without.
        no_sync: Opens the context of a micro-batch whose gradients are not reduced over ranks; None where all are.
        without_data: Takes part in a micro-batch for which only other ranks have data; see `Strategy.without_data`.
        optimizer: The optimizer, None when the module has none.
        needs_outputs: Whether outputs have to be made for on_train_batch_end.
        needs_loss: Whether the loss's value is needed.
        unscale: Unscales gradients before clipping, None where nothing scales.
        step_schedules: Steps the schedules that are due.
        looks_ahead: Whether the last micro-batch of a window has to be known in advance, because ranks synchronize
            gradients in it. Otherwise the next micro-batch is read after the step, as in a handwritten loop: the step
            may fill the source of the data.
        hold: Creates the object that takes the micro-batches of a window that are not run as they come; None if all
            are.
        begin_window: Starts the loss of a window that is planned to have that number of micro-batches.
        finish_window: Scales, clips and steps after the last micro-batch; see `window.finish_window`.
        run_window: The strategy's `run_window` where it takes over the inside of a window; else None.
        needs_closure: Whether the optimizer evaluates the window itself, by its closure.
        step_plateaus: Steps the plateau schedules that count epochs, given the epochs that have ended; called when the
            epoch's metrics are available, before checkpoints are taken.
        count_window: Counts a finished window's samples, and its tokens, where these are limited; else None.
    """

    transfer: Callable[[Batch], Batch]
    training_step: StepFunction
    table: HookTable
    loss_and_backward: _LossAndBackward
    backward: Callable[[Tensor], None]
    zero_grad: Callable[[], object]
    clip: Callable[[], None] | None
    take_step: Callable[[Optimizer], bool]
    step_by_module: Callable[[Callable[[], Tensor | None]], bool] | None
    no_sync: Callable[[], AbstractContextManager[None]] | None
    without_data: Callable[[nn.Module], NoLoss | None]
    optimizer: Optimizer | None
    needs_outputs: bool
    needs_loss: bool
    unscale: Callable[[], None] | None
    step_schedules: Callable[[FitRun], None]
    begin_window: Callable[[int], None]
    finish_window: Callable[[FitRun, Tensor | None], bool]
    step_plateaus: Callable[[FitRun, int], None]
    count_window: Callable[[int], None] | None = None
    zeroes_early: bool = False
    looks_ahead: bool = False
    hold: Callable[[FitRun], Held] | None = None
    run_window: RunWindow | None = None
    needs_closure: bool = False

    def take_optimizer(self, other: StepPlan) -> None:
        """Step another optimizer from now on, with the functions of a plan that was made for it."""
        self.optimizer, self.zero_grad, self.clip = other.optimizer, other.zero_grad, other.clip
        self.unscale, self.step_by_module = other.unscale, other.step_by_module


@dataclass(slots=True)
class BeforeValidation:
    """State that a validation changes, from before it: a resumed run repeats a validation that has not ended.

    Attributes:
        rng: The global random number generators; a validation restores them when it ends.
        generators: The generators in attributes of the validation loaders.
        metric_objects: States of the module's metric objects.
        evaluating: Paths of the modules that were in eval mode.
        eval_batches: Evaluation batches seen in total.
        window: Number of the previous window.
        is_over: Whether on_validation_epoch_end is done.
        loggers: States of the loggers before the first row of the validation; None while there is no row.
    """

    rng: StateDict
    generators: StateDict
    metric_objects: dict[str, StateDict]
    evaluating: set[str]
    eval_batches: int
    window: int
    is_over: bool = False
    loggers: StateDict | None = None


@dataclass(slots=True, weakref_slot=True)
class Run:
    """One validate, test or predict; and the parts that a fit shares with them.

    A checkpoint can be taken of each. What only a fit fills is empty here.

    Attributes:
        trainer: The Trainer, for its arguments.
        fabric: The Fabric: devices, processes, strategy and precision.
        callbacks: The callbacks, in the order in which they are called.
        loaders: The data of each stage.
        output: Sends records to the loggers.
        state: Verb, stage and status of the Trainer.
        seconds_since_validation: Returns the seconds of training since the last validation.
        module: The user's module.
        model: The module as the strategy set it up.
        watch: Keeps losses for the policy on those that are not finite.
        is_automatic: Whether the trainer calls backward and steps the optimizer.
        skips_bad_steps: Whether a loss that is not finite drops the step, which takes a host read per micro-batch.
        before_validation: The state that a checkpoint during a validation has to contain; None outside.
        configured: What `configure_optimizers` returned, as plain values; see checkpointing/optimizer_record.py.
        validated: The weights that the epoch's last validation saw, while hooks may change them; else None.
        evaluation_weights: Of schedule-free optimizers; None without one.
        has_ranks: Whether there are several processes.
        stop_points: Lets all ranks stop at the same point; None with one process.
        is_over: Whether the verb has returned.
        is_after_error: Whether on_exception is being called: the other ranks may be elsewhere.
        at_boundary: False between two micro-batches of one window.
        carried: The window that continues in the next epoch; None without `accumulate_across_epochs`.
        groups: This replica group among the others; None without fault tolerance.
        callback_marks: States of the user's callbacks when training began, pickled; with pipeline stages.
        own_steps: Watches for steps of optimizers that the module steps; None where the trainer makes every one.
        unreduced: Manual optimization on several ranks: the optimizers whose gradients are not averaged yet.
        stepped: The optimizers that the module has stepped itself since the batch began.
        is_counted: Whether the module has counted a step itself since the batch began, with `count_step`.
        batch_idx: Index of the current training batch in its epoch.
        has_stepped: Whether the window that just ended stepped the optimizer.
        is_epoch_over: Whether the epoch that is being closed has seen all its data.
        compares_rates: Whether learning rates must be the same on all ranks; they are compared at the start of each
            epoch.
        monitored: Names of metrics that are still to be checked; None without any.
    """

    trainer: TrainerView
    fabric: Fabric
    module: nn.Module
    model: nn.Module
    datamodule: DataModule | None
    lifecycle: Lifecycle
    metrics: Metrics
    progress: Progress
    run_signals: RunSignals
    callbacks: list[Callback]
    loaders: StageLoaders
    output: LogOutput
    state: TrainerState
    seconds_since_validation: Callable[[], float]
    window_loss: WindowLoss
    watch: LossWatch
    has_ranks: bool = False
    stop_points: StopPoints | None = None
    is_automatic: bool = True
    skips_bad_steps: bool = False
    optimizers: list[Optimizer] = field(default_factory=list)
    managed: list[ManagedOptimizer] = field(default_factory=list)
    managed_type: type[ManagedOptimizer] = ManagedOptimizer
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)
    configured: dict[str, list[StateDict]] = field(default_factory=dict)
    before_validation: BeforeValidation | None = None
    validated: ValidatedWeights | None = None
    evaluation_weights: EvaluationWeights | None = None
    carried: CarriedWindow | None = None
    groups: _SharesSteps | None = None
    own_steps: OwnSteps | None = None
    unreduced: list[Optimizer] = field(default_factory=list)
    stepped: list[Optimizer] = field(default_factory=list)
    is_counted: bool = False
    batch_idx: int = 0
    has_stepped: bool = False
    is_epoch_over: bool = False
    compares_rates: bool = True
    monitored: MonitoredNames | None = None
    callback_marks: dict[str, bytes] = field(default_factory=dict)
    at_boundary: bool = True
    is_over: bool = False
    is_after_error: bool = False

    def release(self) -> None:
        """Leave no cycle behind when the verb has returned: what holds the last reference then frees everything."""
        self.trainer = weakref.proxy(self.trainer)
        self.own_steps = None
        self.lifecycle.release()

    def place(self) -> dict[str, object]:
        """Return where the run is, for messages about a rank that failed; also called from the watch's thread."""
        stage, progress = self.state.stage, self.progress
        place: StateDict = {
            "hook": self.metrics.table.hook,
            "stage": stage,
            "epoch": progress.epochs,
            "step": progress.steps,
        }
        return {**place, "batch": self.batch_idx} if stage == "train" else place

    @property
    def opened(self) -> BatchStream | None:
        """The training data, None before they are opened and outside of fit."""
        return None

    @property
    def ranks_answer(self) -> bool:
        """Whether there are other ranks at the same point: False after an error of this rank alone."""
        if not self.has_ranks:
            return False
        return not self.is_after_error or (self.stop_points is not None and self.stop_points.is_by_signal)

    @property
    def device(self) -> torch.device:
        """Device of the fabric."""
        return self.fabric.device


@dataclass(slots=True, weakref_slot=True)
class FitRun(Run):
    """One fit.

    Attributes:
        session: Functions that the loop calls between two steps; available while the fit runs.
        plan: The functions of a step, once the data are open and the optimizers are built.
        stream: The training data, once they are open.
        stream_state: Where the training data were when the run ended.
        unfinished: Actions that were due at the event of the resumed checkpoint (checkpointing/unfinished.py).
        after_epoch: Actions of callbacks after the epoch's end and its checkpoints.
        left_out: Batches on which this run does not train; None unless a callback may roll back.
        after_rollback: Called after each rollback, when the state is restored.
    """

    session: FitView = field(init=False)
    plan: StepPlan = field(init=False)
    stream: BatchStream = field(init=False)
    stream_state: StateDict | None = None
    unfinished: StateDict = field(default_factory=dict)
    after_epoch: list[Callable[[], None]] = field(default_factory=list)
    left_out: _LeavesOut | None = None
    after_rollback: list[Callable[[], None]] = field(default_factory=list)

    @property
    def opened(self) -> BatchStream | None:
        """The training data, None before they are opened."""
        return getattr(self, "stream", None)

    @property
    def is_bound(self) -> bool:
        """Whether the functions of a step are bound: not before the loop, nor after it."""
        return hasattr(self, "plan")

    def release(self) -> None:
        """Leave no cycle behind when the verb has returned: what holds the last reference then frees everything."""
        if self.is_bound:
            del self.plan  # its functions hold the run
        del self.session
        self.after_epoch.clear()
        self.after_rollback.clear()
        self.left_out = None
        Run.release(self)
