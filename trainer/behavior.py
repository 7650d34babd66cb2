"""`Behavior`: the functions of a Trainer that a layer for programs of another library can replace.

The core has one object, `Behavior()`. A layer derives another one with `dataclasses.replace`, and its Trainer returns
it from `make_behavior`, which the constructor calls first. Sessions and the loop bind it. Type checkers see each use,
so that a renamed field is found everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..callbacks import Callback
from ..protocols import Owner
from .hooks import Hook, check_hook_names, find_override
from .loop.fit_loop import LoopSeams
from .loop.optimizers import ManagedOptimizer
from .metrics.current_values import CurrentValues
from .session.arguments import Arguments
from .session.assemble import default_callbacks

if TYPE_CHECKING:
    from ..checkpoint.content import Content
    from ..protocols import AnyOutput, StateDict
    from ..tuner.batch_size import Search, Trials
    from ..tuner.lr_curve import LearningRateCurve
    from .checkpointing.saving import Saving
    from .loop.eval_loader import EvalLoader
    from .loop.eval_loop import EvalLoop
    from .metrics.log_output import LogOutput
    from .metrics.metrics import Metrics
    from .session.evaluation import EvaluationSession
    from .session.fit import FitSession
    from .session.loaders import StageLoaders
    from .session.session import Session
    from .trainer import Trainer

_PutBack = Callable[[], None]


_LOOP = LoopSeams()


# Sessions are imported when a verb begins: their methods are the defaults.


def _evaluation_loop(session: Session, stage: str, data: EvalLoader) -> EvalLoop:
    return session.evaluation_loop(stage, data)


def _in_order(session: EvaluationSession, outputs: list[list[AnyOutput]]) -> list[list[AnyOutput]]:
    return session.in_order(outputs)


def _adopt_callbacks(session: FitSession) -> None:
    session.adopt_callbacks()


def _continue_logs(session: FitSession, states: StateDict) -> None:
    session.continue_logs(states)


def _as_it_is(error: BaseException) -> BaseException:
    return error


def _restore_and_start(
    session: FitSession, content: Content | None, path: str | None, before: StateDict | None
) -> Callable[[], None] | None:
    return session.restore_and_start(content, path, before)


@dataclass(frozen=True, slots=True)
class Behavior:
    """The replaceable functions of a Trainer.

    Attributes:
        default_callbacks: Returns the callbacks that the arguments require and the user did not pass.
        check_hook_names: Raises an error for methods that look like hooks but are unknown.
        find_override: Returns an owner's override of a hook; None if it only inherits the base class's.
        managed_optimizer: Class of the optimizers that `self.optimizers()` returns.
        current_values: Creates the reader of the latest step's values for the progress bar.
        loop: The replaceable functions of fit's loop.
        evaluation_loop: Returns the loop over the data of "validation", "test" or "predict".
        in_order: Returns the predictions of all ranks in the order of the data.
        adopt_callbacks: Resets callbacks that hold the state of another Trainer's run.
        continue_logs: Restores the loggers' states from a checkpoint.
        restore_and_start: Restores training, then calls `on_fit_start`.
        error_to_raise: Returns the error that a verb raises, given the error that ended it.
        learning_rate_curve: Creates the curve of a learning-rate search from mode, first rate, last rate and number of
            steps. None is `LearningRateCurve`; a subclass of it may choose rates and end the search by other rules.
        batch_size_rule: Chooses the sizes that a batch-size search tries, and its result. None is Loopwright's rule;
            see `loopwright.tuner.batch_size.search_sizes`.
        prepare_trial: Called with the searching Trainer and the Trainer of each trial, before its run. None changes
            nothing.
    """

    default_callbacks: Callable[[Arguments, list[Callback]], list[Callback]] = default_callbacks
    check_hook_names: Callable[[Owner, str, set[str]], None] = check_hook_names
    find_override: Callable[[Owner, str, tuple[type, ...]], Hook | None] = find_override
    managed_optimizer: type[ManagedOptimizer] = ManagedOptimizer
    current_values: Callable[[Metrics], CurrentValues] = CurrentValues
    loop: LoopSeams = _LOOP
    evaluation_loop: Callable[[Session, str, EvalLoader], EvalLoop] = _evaluation_loop
    in_order: Callable[[EvaluationSession, list[list[AnyOutput]]], list[list[AnyOutput]]] = _in_order
    adopt_callbacks: Callable[[FitSession], None] = _adopt_callbacks
    continue_logs: Callable[[FitSession, StateDict], None] = _continue_logs
    restore_and_start: Callable[[FitSession, Content | None, str | None, StateDict | None], _PutBack | None] = (
        _restore_and_start
    )
    error_to_raise: Callable[[BaseException], BaseException] = _as_it_is
    learning_rate_curve: Callable[[str, float, float, int], LearningRateCurve] | None = None
    batch_size_rule: Callable[[Search, int, Trials], int] | None = None
    prepare_trial: Callable[[Trainer, Trainer], None] | None = None


@dataclass(frozen=True, slots=True)
class BehaviorParts:
    """The objects of a Trainer whose public attributes a layer on top of it reads and sets.

    Attributes:
        arguments: The resolved arguments.
        loaders: The loaders of each stage.
        metrics: The logged values.
        output: Sends rows to the loggers.
        saving: Collects and writes checkpoints.
    """

    arguments: Arguments
    loaders: StageLoaders
    metrics: Metrics
    output: LogOutput
    saving: Saving
