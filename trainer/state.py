"""Which verb runs, in which stage, and how it ended: `trainer.state`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TrainerState"]


@dataclass(slots=True)
class TrainerState:
    """Where a Trainer is.

    Attributes:
        fn: "fit", "validate", "test", "predict"; None before the first.
        stage: "train", "sanity_check", "validate", "test", "predict"; None outside of a run.
        status: "initializing", "running", "finished" or "interrupted".
    """

    fn: str | None = None
    stage: str | None = None
    status: str = "initializing"

    def begin(self, fn: str) -> None:
        """Enter a verb."""
        self.fn, self.stage, self.status = fn, None, "running"

    def end(self) -> None:
        """Leave a verb that succeeded."""
        self.stage, self.status = None, "finished"
