"""`StopPoints`: all ranks of a run stop at the same point, without a collective per step.

A phase is a training window, an evaluation, or the end of an epoch. All ranks go through the same
sequence of them. A signal at one rank, or `should_stop` set on one, becomes a request; fabric/watch/stop_coordinator.py
says how the ranks agree on the phase after which they stop. Without a request, a phase costs one lock and one
addition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .run_signals import FAILED_SAVE

if TYPE_CHECKING:
    from ...fabric.watch import StopCoordinator
    from ..view import TrainerView
    from .run_signals import RunSignals


class StopPoints:
    """The coordination of one run's ranks on where it stops.

    Args:
        trainer: Its `should_stop` becomes a request, and is set if another rank's was set.
        run_signals: Ends the run after a signal.
        coordinator: Agrees with the other ranks on where to stop.

    Attributes:
        is_to_stop: Whether all ranks know that `should_stop` was requested; the fit loop acts on it.
    """

    def __init__(self, trainer: TrainerView, run_signals: RunSignals, coordinator: StopCoordinator) -> None:
        self._trainer = trainer
        self._run_signals = run_signals
        self._stop_coordinator = coordinator
        self.is_to_stop = False

    @property
    def is_by_signal(self) -> bool:
        """Whether all ranks stopped here because of a signal."""
        return self._stop_coordinator.has_stopped and self._stop_coordinator.reason not in ("should_stop", FAILED_SAVE)

    def begin_phase(self, *, may_stop: bool = False) -> None:
        """Begin the next phase, or find out that all ranks stop here. On every rank.

        Args:
            may_stop: Whether `should_stop` counts now; equal on all ranks.

        Raises:
            KeyboardInterrupt, StopBySignal: A signal requested the end, on this rank or on another.
            CheckpointError: A save in the background failed, on this rank or on another.
        """
        if self.is_to_stop:
            return
        if self._run_signals.is_called:  # sooner than the watch's thread would see it
            requested = self._run_signals.requested
            self._stop_coordinator.request(FAILED_SAVE if requested is None else requested.name)
        elif may_stop and self._trainer.should_stop:
            self._stop_coordinator.request("should_stop")
        if not self._stop_coordinator.begin():
            self._stop(self._stop_coordinator.begin)

    def within_phase(self) -> None:
        """Find out whether all ranks stop within the present phase; called between two batches of an evaluation.

        Raises:
            KeyboardInterrupt, StopBySignal: As `begin_phase`.
        """
        # After should_stop, _stop returns: an evaluation is finished before it takes effect.
        if not self.is_to_stop and not self._stop_coordinator.within():
            self._stop(self._stop_coordinator.within)

    def end_evaluation(self) -> None:
        """Find out whether all ranks stop before the present evaluation has a result; called after its last batch.

        Ranks have different numbers of batches: one that is through must not wait for one that stops.

        Raises:
            KeyboardInterrupt, StopBySignal: As `begin_phase`.
        """
        if not self.is_to_stop and not self._stop_coordinator.end():
            self._stop(self._stop_coordinator.end)

    def _stop(self, go_on: Callable[[], bool]) -> None:
        if self.is_by_signal:
            self._run_signals.stop()
        if self._stop_coordinator.reason == FAILED_SAVE:
            self._trainer.wait_for_save()
            # Nothing is raised here: all ranks already know of the failure, from an earlier place.
            self._run_signals.is_called = self._run_signals.requested is not None
            self._stop_coordinator.reset()
            if not go_on():
                self._stop(go_on)
            return
        self._trainer.should_stop = self.is_to_stop = True
