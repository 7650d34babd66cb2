"""`Trainer(accumulate_across_epochs=True)`: a window that an epoch's end cuts short continues in the next epoch.

The part of a window in one epoch ends with a synchronized backward pass and no optimizer step. Its averaged gradients
stay where they are, so that they are equal on all ranks (or sharded as the parameters are) and can be saved. The next
epoch's first micro-batches add to them. The last epoch of a training ends its window, however short.
"""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, cast

from torch import Tensor

from ...errors import CheckpointError, ConfigError
from ...precision.base import evaluates_again
from ...protocols import StateDict
from . import manual
from .loss import RanksWindowLoss
from .window import finish_window

if TYPE_CHECKING:
    from ..run import FitRun
    from ..view import TrainerView

logger = logging.getLogger(__name__)


class CarriedWindow:
    """An accumulation window that continues in the next epoch.

    Args:
        trainer: Its accumulation and limits apply.
        run: Its plan is set up, and is bound to this object here.

    Attributes:
        count: Micro-batches of the window that earlier epochs had; 0 if no window is open, and
            where on_train_batch_start has dropped it.

    Raises:
        ConfigError: The run accumulates in a way that cannot be carried; the message says why.
    """

    def __init__(self, trainer: TrainerView, run: FitRun) -> None:
        _refuse(trainer, run)
        self._trainer = trainer
        self._run = run
        self.count = 0
        plan = run.plan
        self._zero_grad = plan.zero_grad
        plan.zero_grad, plan.begin_window, plan.finish_window = self._zero_unless_carried, self._begin, self._finish

    def _zero_unless_carried(self) -> None:
        if not self.count:
            self._zero_grad()

    def _begin(self, size: int) -> None:
        if not self.count:
            # Where it is known in advance: the last window of the last epoch may be a short one.
            self._run.window_loss.begin(size if self._ends_training() else self._trainer.accumulate_grad_batches)
        elif self._run.has_ranks:
            cast(RanksWindowLoss, self._run.window_loss).begin_part()

    def _ends_training(self) -> bool:
        limit = self._trainer.fit_loop.epoch_limit
        return limit != -1 and self._run.progress.epochs + 1 >= limit

    def _finish(self, run: FitRun, loss: Tensor | None) -> bool:
        """Step if the window is complete, or if no epoch follows; else keep its gradients."""
        window = run.window_loss
        done = self.count + run.batch_idx - run.progress.batches_in_epoch + 1
        if done < window.planned:
            if not self._ends_training():
                self.count = done
                return False
            self._scale_to(run, done)
        self.count = 0
        return finish_window(run, loss)

    def _scale_to(self, run: FitRun, done: int) -> None:
        """Scale the gradients by the number of micro-batches in the window, where its loss does not do so itself."""
        if run.has_ranks and run.plan.optimizer is not None:
            ranks_window = cast(RanksWindowLoss, run.window_loss)
            if ranks_window.gradient_factor() is None:
                run.fabric.strategy.scale_gradients(run.plan.optimizer, ranks_window.planned / done)

    # --- state -----------------------------------------------------------------------------------------------------

    def states(self) -> StateDict:
        """Return the state of the window for a checkpoint, empty where no window is open. On every rank.

        Raises:
            CheckpointError: An error interrupted the window in this epoch, and the gradients of that part are already
                added.
        """
        if not self.count:
            return {}
        run, window = self._run, self._run.window_loss
        if not run.at_boundary:
            raise CheckpointError(
                f"a window with {self.count} micro-batches of an earlier epoch was interrupted: its gradients cannot "
                "be saved.",
                fix="resume from the last checkpoint that was saved before.",
            )
        own = [_plain(window.count), _plain(window.total), _plain(window.reference)]
        state: StateDict = {"count": self.count, "planned": window.planned}
        if run.has_ranks:
            ranks_window = cast(RanksWindowLoss, window)
            state.update(form=ranks_window.form, scale=ranks_window._scale)
        gather = run.has_ranks and run.ranks_answer
        strategy = run.fabric.strategy
        state["losses"] = strategy.topology.reports(strategy.gather_objects(own)) if gather else [own]
        return {"window": state, "gradients": manual.waiting_gradients(run)}

    def load_states(self, states: StateDict, source: str) -> None:
        """Load what `states` returned, including gradients.

        Raises:
            CheckpointError: The window was cut over another number of ranks, or has another size.
        """
        run, state = self._run, states["window"]
        (place, ranks), accumulate = run.fabric.strategy.topology.report_place, self._trainer.accumulate_grad_batches
        if len(state["losses"]) != ranks or state["planned"] != accumulate:
            raise CheckpointError(
                f"{source} was taken within a window of {state['planned']} micro-batches ({state['count']} done) on "
                f"{len(state['losses'])} ranks; now windows have {accumulate} on {ranks} ranks.",
                fix="resume with that number of ranks and that accumulation, or from a checkpoint that was taken after "
                "a step.",
            )
        manual.restore_gradients(run, states["gradients"])
        window = run.window_loss
        window.begin(state["planned"])
        count, total, reference = state["losses"][place]
        window.count = count
        window.total, window.reference = (
            value.to(run.device) if isinstance(value, Tensor) else value for value in (total, reference)
        )
        if run.has_ranks:
            ranks_window = cast(RanksWindowLoss, window)
            ranks_window.form, ranks_window._scale = state["form"], state["scale"]
            ranks_window.begin_part(run.fabric.broadcast(uuid.uuid4().hex))
        self.count = state["count"]


def _plain(value: object) -> object:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _refuse(trainer: TrainerView, run: FitRun) -> None:
    strategy = run.fabric.strategy
    reason = None
    if not run.is_automatic:
        reason = "manual optimization, where the module decides when to step"
    elif run.optimizers and evaluates_again(run.optimizers[0]):
        reason = f"{type(run.optimizers[0]).__name__}, which evaluates all micro-batches of a window several times"
    elif trainer.accumulation_scheduler is not None:
        reason = "a GradientAccumulationScheduler, which changes the size of windows between epochs"
    elif run.skips_bad_steps:
        reason = "nonfinite_loss='skip', which decides on a window as a whole"
    elif strategy.traits.has_stages:
        reason = "pipeline stages, which save no gradients and add those of shared parameters at the end of an epoch"
    elif strategy.traits.owns_optimizers or strategy.traits.traces_lazily:
        reason = f"{type(strategy).__name__}, whose engine keeps the gradients of a window to itself"
    if reason is not None:
        raise ConfigError(f"accumulate_across_epochs=True with {reason}.", fix="leave out one of the two.")
