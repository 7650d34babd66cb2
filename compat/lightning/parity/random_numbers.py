"""Random numbers as in Lightning: one sequence of the global generators for everything that a process does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from ....trainer.loop.training_rng import TrainingRng
from ....trainer.run import BeforeValidation, Run
from ....trainer.trainer import Trainer

__all__ = ["SharedRng", "share_generators"]


class SharedRng(TrainingRng):
    """Leaves the generators where they are, whatever a verb has drawn."""

    def enter(self) -> None:
        """Draw on."""

    def begin_training(self, rank: int, size: int, drawn_as: int | None = None) -> None:
        """Draw on, also after another fit or an evaluation."""

    def resume(self, put_back: Callable[[], None] | None) -> None:
        """Draw on, also after a checkpoint."""

    def leave_validation(self, run: Run, before: BeforeValidation) -> None:
        """Draw on after the validation."""

    def leave(self, *, has_trained: bool) -> None:
        """Draw on."""


def share_generators(trainer: Trainer) -> None:
    """Let evaluations, and loaders that are asked for during fit, draw from the generators of training."""
    trainer.training_rng = SharedRng()
    loaders = trainer.parts.loaders
    loaders.apart, loaders.keeps_generators = nullcontext, False
