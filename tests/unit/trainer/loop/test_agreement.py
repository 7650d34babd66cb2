"""What `Agreement` does about a save in the background that failed; with real ranks: test_async_checkpoints.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loopwright.errors import CheckpointError
from loopwright.fabric.watch import StopCoordinator
from loopwright.trainer.loop.agreement import Agreement
from loopwright.trainer.loop.run_signals import Guard


def agreement(wait_for_save: Any) -> tuple[Agreement, Guard]:
    guard = Guard()
    guard.stop_coordinator = coordinator = StopCoordinator(None, rank=0, size=1)
    trainer: Any = SimpleNamespace(wait_for_save=wait_for_save, should_stop=False)
    return Agreement(trainer, guard, coordinator), guard


def test_a_failed_save_is_raised_where_all_ranks_stop() -> None:
    def fail() -> None:
        raise CheckpointError("disk full", fix="free space")

    run, guard = agreement(fail)
    run.begin_segment()
    guard.note_failed_save()
    with pytest.raises(CheckpointError, match="disk full"):
        run.begin_segment()
    assert not run.is_by_signal


@pytest.mark.parametrize("where", ["begin_segment", "within_segment", "end_evaluation"])
def test_a_failure_that_was_raised_before_stops_nothing(where: str) -> None:
    run, guard = agreement(lambda: None)
    run.begin_segment()
    guard.note_failed_save()
    run.begin_segment() if where == "begin_segment" else run._stop_coordinator.request("failed save")
    for _ in range(3):
        getattr(run, where)()
    run.begin_segment()
    run._stop_coordinator.request("SIGTERM")  # a signal is heard all the same
    with pytest.raises(SystemExit):
        run.begin_segment()
