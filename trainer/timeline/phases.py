"""Phases of a run and of a step, `StepRecord`: what was measured of one step, and times as text."""

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


def readable_time(seconds: float) -> str:
    """Return seconds as text with a unit and three digits: "93 us", "1.25 ms", "2.5 s"."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
