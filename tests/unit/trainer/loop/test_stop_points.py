"""`StopPoints` after a background save failed; with real ranks: test_async_checkpoints.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loopwright.errors import CheckpointError
from loopwright.fabric.watch import StopCoordinator
from loopwright.trainer.loop.run_signals import RunSignals
from loopwright.trainer.loop.stop_points import StopPoints


def stop_points(wait_for_save: Any) -> tuple[StopPoints, RunSignals]:
    run_signals = RunSignals()
    run_signals.stop_coordinator = coordinator = StopCoordinator(None, rank=0, size=1)
    trainer: Any = SimpleNamespace(wait_for_save=wait_for_save, should_stop=False)
    return StopPoints(trainer, run_signals, coordinator), run_signals


def test_a_failed_save_is_raised_where_all_ranks_stop() -> None:
    def fail() -> None:
        raise CheckpointError("disk full", fix="free space")

    run, run_signals = stop_points(fail)
    run.begin_phase()
    run_signals.note_failed_save()
    with pytest.raises(CheckpointError, match="disk full"):
        run.begin_phase()
    assert not run.is_by_signal


@pytest.mark.parametrize("where", ["begin_phase", "within_phase", "end_evaluation"])
def test_a_failure_that_was_raised_before_stops_nothing(where: str) -> None:
    run, run_signals = stop_points(lambda: None)
    run.begin_phase()
    run_signals.note_failed_save()
    run.begin_phase() if where == "begin_phase" else run._stop_coordinator.request("failed save")
    for _ in range(3):
        getattr(run, where)()
    run.begin_phase()
    run._stop_coordinator.request("SIGTERM")  # a signal is heard all the same
    with pytest.raises(SystemExit):
        run.begin_phase()
