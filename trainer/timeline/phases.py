"""Phases of a run and of a step, and `StepRecord`: what was measured of one step."""

from __future__ import annotations

from dataclasses import dataclass

STEP_PHASES = (
    "data", "transfer", "forward", "backward", "communication", "clip", "optimizer", "schedule", "hooks", "loop",
)  # fmt: skip
"""Phases of a step, measured in some steps: waiting for a batch, moving it, ..., and the trainer's own loop."""

WHOLE_PHASES = ("first step", "epoch", "logging", "checkpoint", "validation")
"""Phases that are measured whenever they happen; "epoch" is opening and closing one: its hooks, starting workers."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One measured step.

    Attributes:
        step: Number of the optimizer step, from 0.
        start_s: Seconds from the beginning of the fit.
        phases: Seconds of each phase that took any, in the order of STEP_PHASES.
    """

    step: int
    start_s: float
    phases: dict[str, float]

    @property
    def duration_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.phases.values())
