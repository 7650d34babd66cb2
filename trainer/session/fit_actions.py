"""`FitActions`: what the Trainer does at events of a fit, after the user's hooks and before checkpoints are taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..loop.non_finite import MOST_KEPT

if TYPE_CHECKING:
    from ..run import FitRun
    from .fit import FitSession


class FitActions:
    """Logs, counts, and steps the schedules that count epochs. Only `after_batch` is called at every step.

    Args:
        session: The fit; its run is there when the first event is fired.
    """

    def __init__(self, session: FitSession) -> None:
        self._session = session
        self._trainer, self._progress, self._metrics = session.trainer, session.progress, session.metrics
        self._every = session.arguments.log_every_n_steps
        self._is_trial = bool(session.arguments.fast_dev_run)

    def after_batch(self, *_: object) -> None:
        """Log the values of the step that the window has ended with, if they are due."""
        run, progress, every = self._session.run, self._progress, self._every
        if not run.at_boundary or not run.has_stepped:
            if run.at_boundary and run.is_automatic and not (run.carried is not None and run.carried.count):
                self._log_skipped(run)
            elif not run.is_automatic and run.metrics.waiting_since is None:
                run.metrics.waiting_since = run.metrics.window
            return
        # On several ranks the step alone decides: whether to stop is not known to all of them yet.
        stops = self._trainer.should_stop and not run.has_ranks
        if every and (progress.steps % every == 0 or stops or self._is_trial):
            timeline = self._trainer.timeline
            timeline.enter("logging")
            row, probed = run.metrics.read_step(run.watch.probe())
            if progress.skipped_steps or progress.parts_per_batch > 1:
                row = {**run.watch.counts(progress), **row}
            if row:
                self._trainer.log_metrics(row)
            timeline.leave()
            run.watch.judge(probed, progress)
            if run.monitored is not None:
                run.monitored.check_step()
                run.monitored = None
        elif progress.steps % MOST_KEPT == 0 if run.has_ranks else len(run.watch.losses) >= MOST_KEPT:
            run.watch.look(progress)
        run.metrics.waiting_since = None

    def _log_skipped(self, run: FitRun) -> None:
        """Log the values of a window that made no step, with the index of the step that it would have made."""
        progress = self._progress
        if self._every and (progress.steps + progress.skipped_steps) % self._every == 0:
            row, probed = run.metrics.read_step(run.watch.probe())
            if row:
                row = {**run.watch.counts(progress), "epoch": progress.epochs, **row}
                self._trainer.log_metrics(row, step=progress.steps)
            run.watch.judge(probed, progress)

    def after_epoch_start(self) -> None:
        """Record that the hooks of the epoch's start have been called."""
        self._progress.epoch_announced = True

    def after_train_epoch(self) -> None:
        """Log the epoch's values, and step the plateau schedules."""
        run, progress, metrics = self._session.run, self._progress, self._metrics
        if metrics.waiting_since is not None and self._every and (progress.steps + 1) % self._every == 0:
            waiting, _ = metrics.read_step()
            if waiting:
                self._trainer.log_metrics({"epoch": progress.epochs, **waiting}, step=progress.steps)
        metrics.waiting_since = None
        row, _ = metrics.finish_epoch("train", progress.steps)
        if progress.skipped_steps:
            row = {**run.watch.counts(progress), **row}
        if row:
            self._trainer.log_metrics(row)
        if run.is_epoch_over:
            run.plan.step_plateaus(run, progress.epochs + 1)
        progress.is_closing_epoch = run.is_epoch_over

    def after_validation(self) -> None:
        """Log the values of a validation, and record that it is done; not of the sanity check."""
        before = self._session.run.before_validation
        if before is not None:
            before.is_over = True
        if self._session.state.stage != "sanity_check":
            self._session.finish_evaluation("validation")
            self._session.loop.mark_validated(self._session.run)
            self._progress.validation_ending = True

    def after_validation_end(self) -> None:
        """Record that the validation is complete."""
        self._progress.validation_ending = False
