"""`Behavior`: the seams of a Trainer, at which a layer for programs of another library puts its own functions.

The core has one object, `Behavior()`. A layer derives another with `dataclasses.replace`, and its Trainer returns it
from `make_behavior`, at the beginning of the constructor; sessions and the loop bind it. A type checker sees each
place, and a name that changes here changes there.
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
    """What a Trainer does at its seams.

    Attributes:
        default_callbacks: Returns the callbacks that the arguments ask for and the user did not pass.
        check_hook_names: Refuses methods that look like hooks and are not in the table.
        find_override: Returns an owner's own hook; None where it has only that of a base class.
        managed_optimizer: The class of what `self.optimizers()` returns.
        current_values: Makes what reads the values of the latest step for the bar.
        loop: The seams of fit's loop.
        evaluation_loop: Returns the loop over the data of "validation", "test" or "predict".
        in_order: Returns the predictions of all ranks in the order of the data.
        adopt_callbacks: Lets callbacks that another Trainer has trained with forget that run.
        continue_logs: Lets loggers continue where a checkpoint saw them.
        restore_and_start: Restores training, and fires `on_fit_start`: in this order.
        error_to_raise: Returns what a verb raises, given the error that ended it.
        learning_rate_curve: Makes the curve of a learning-rate search from mode, first rate, last rate and steps; None:
            `LearningRateCurve`. A subclass of that may choose rates and end the search by other rules.
        batch_size_rule: Chooses the sizes that a batch-size search tries, and the result; None: Loopwright's rule. See
            `loopwright.tuner.batch_size.search_sizes`.
        prepare_trial: Called with the searching trainer and that of each trial, before its run; None: nothing is
            changed.
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
        arguments: The arguments, resolved.
        loaders: The data of each stage.
        metrics: What was logged.
        output: Sends rows to the loggers.
        saving: Takes and writes checkpoints.
    """

    arguments: Arguments
    loaders: StageLoaders
    metrics: Metrics
    output: LogOutput
    saving: Saving
