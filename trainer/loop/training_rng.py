"""The random numbers of training, separate from everything else that draws from the global generators.

Training draws as a handwritten loop does: samplers and dropout from the global generators, one after the other. So that
the order of samples depends on the seed, the epoch and training alone, nothing else may move them in between:

- A fit that continues another of the same Trainer begins where that one stopped, as a resumed run does. What was drawn
  in between, by evaluations, other Trainers or the user, does not count. A new seed (`seed_everything`,
  `torch.manual_seed`) does: then training begins again from it.
- A first fit that follows evaluations begins where the generators were before them.
- A verb that is called within a hook of another Trainer's run puts the generators back when it ends.

Evaluations themselves continue from each other: predictions that are drawn at random differ from call to call.

A Trainer whose random numbers follow other rules has a subclass of `TrainingRng`: `trainer.training_rng = OtherRng()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...data.rng import capture_rng, derive_key, kinds_that_moved, restore_rng, seed_global_generators
from . import rank_rng

if TYPE_CHECKING:
    from ...strategies import Strategy
    from ..run import BeforeValidation, Run

RngState = dict[str, object]  # what `capture_rng` returns


class _Process:
    """What this process's verbs have done to its global generators: there is one set of them, however many Trainers.

    Attributes:
        num_running: Verbs under way, one within another.
        evaluated: The generators before the latest evaluations and after them; None when training has drawn since.
    """

    num_running = 0
    evaluated: tuple[RngState, RngState] | None = None


class TrainingRng:
    """The position of one Trainer's training in its random numbers.

    A verb calls `enter` first and `leave` last; fit calls `begin_training` when its rank is known. Subclasses may
    override any method.

    Attributes:
        left: The generators at the end of the last fit: one state, or one for each rank where other processes ran it;
            None before.
        separates_ranks: Whether ranks that read different data draw different numbers.
    """

    separates_ranks = True

    def __init__(self) -> None:
        self.left: RngState | list[RngState] | None = None
        self._seed = torch.initial_seed()
        self._is_of_seed = True
        self._at_entry: RngState = {}

    def note_left(self, left: RngState | list[RngState]) -> None:
        """Record the generators at the end of a fit, under the seed of this process."""
        self.left, self._seed = left, torch.initial_seed()

    def enter(self) -> None:
        """Record the generators when a verb begins."""
        _Process.num_running += 1
        self._at_entry = capture_rng()
        self._is_of_seed = torch.initial_seed() == self._seed

    def begin_training(self, rank: int, size: int, drawn_as: int | None = None) -> None:
        """Put the generators where training continues.

        Args:
            rank: Of this process.
            size: Number of processes.
            drawn_as: Which of the ranks that draw different numbers this one is; None: `rank`.
        """
        left, evaluated = self.left, _Process.evaluated
        if left is not None and self._is_of_seed:
            is_own = not isinstance(left, list) or len(left) == size
            restore_rng(left[rank if is_own else 0] if isinstance(left, list) else left)
            drawn_as = rank if drawn_as is None else drawn_as
            if drawn_as and not is_own:
                seed_global_generators(derive_key(capture_rng(), "rank", drawn_as, "of", size))
        elif _Process.num_running == 1 and evaluated is not None and not kinds_that_moved(evaluated[1], self._at_entry):
            restore_rng(evaluated[0])

    def separate_ranks(self, strategy: Strategy) -> None:
        """Give ranks that read different data different random numbers. On every rank, before its first step."""
        if self.separates_ranks:
            rank_rng.separate(strategy)

    def resume(self, put_back: Callable[[], None] | None) -> Callable[[], None] | None:
        """Return a function that restores the generators of a checkpoint; called last before training continues.

        Args:
            put_back: Restores the generators of the checkpoint; None if it has none.
        """
        return put_back

    def leave_validation(self, run: Run, before: BeforeValidation) -> None:
        """Restore the generators for training after a validation within fit.

        Args:
            run: The run; its loaders may hold generators, too.
            before: The state of all generators before the validation.
        """
        run.loaders.restore_shared_generators(before.generators)
        restore_rng(before.rng)

    def leave(self, *, has_trained: bool) -> None:
        """Record what a verb has drawn; if it ran within another one, undo it."""
        _Process.num_running -= 1
        if has_trained:
            self.note_left(capture_rng())
        elif self._is_of_seed:
            self._seed = torch.initial_seed()  # a step that seeds does not restart training
        if _Process.num_running:
            restore_rng(self._at_entry)
        elif has_trained:
            _Process.evaluated = None
        else:
            evaluated = _Process.evaluated
            is_next = evaluated is not None and not kinds_that_moved(evaluated[1], self._at_entry)
            before = evaluated[0] if evaluated is not None and is_next else self._at_entry
            _Process.evaluated = (before, capture_rng())
