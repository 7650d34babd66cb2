"""Where a Trainer is: its verb and stage (`trainer.state`), and the counts of completed work (`trainer.progress`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..protocols import StateDict


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
        self.fn, self.stage, self.status = fn, "train" if fn == "fit" else fn, "running"

    def end(self) -> None:
        """Leave a verb that succeeded."""
        self.stage, self.status = None, "finished"


@dataclass(slots=True)
class Progress:
    """Counts of completed work. A fit loop that starts with these counts continues where the run was.

    Attributes:
        epochs: Epochs that ended, their end hooks included.
        batches_in_epoch: Micro-batches of the present epoch that are part of a finished window, or of one that
            continues in the next epoch.
        total_batches: Micro-batches of finished windows since the start of training.
        steps: Training steps that really stepped (`trainer.global_step`).
        skipped_steps: Windows without a step: every batch skipped, no weight, or gradients that were not finite.
        nonfinite_steps: Those of them that `nonfinite_loss="skip"` dropped.
        samples: Samples in finished windows, as far as batches tell their size.
        tokens: Tokens in finished windows; counted where `max_tokens` is given.
        samples_before, tokens_before: These counts at the beginning of fit, or at the checkpoint: with several ranks
            they are of all ranks, and each adds its own. Not part of the state.
        validated_at: `total_batches` when the last validation inside fit ended, -1 before the first.
        validated_s: Training time in seconds at that moment (for a validation interval in time).
        epoch_announced: Whether on_train_epoch_start has fired for an epoch that is not open yet.
        epoch_open: Whether on_train_epoch_start has fired for the present epoch, and its data have begun.
        epoch_left: Whether on_train_batch_start asked to skip the rest of the present epoch.
        epoch_paused: Whether a limit cut the present epoch short and its end hooks have fired; more training continues
            within it.
        is_closing_epoch: Whether the present epoch's end hooks are done but for the checkpoints; a state taken now
            says that the epoch is over.
        validation_ending: Whether on_validation_epoch_end is done in a validation within fit, and on_validation_end is
            due.
        eval_batches: Evaluation batches ever seen, by stage: the x axis of step values logged there.
        parts_per_batch: Parts in which each batch is trained, since `on_oom="shrink"` split them.
    """

    epochs: int = 0
    batches_in_epoch: int = 0
    total_batches: int = 0
    steps: int = 0
    skipped_steps: int = 0
    nonfinite_steps: int = 0
    samples: int = 0
    validated_at: int = -1
    validated_s: float = 0.0
    epoch_announced: bool = False
    epoch_open: bool = False
    epoch_left: bool = False
    epoch_paused: bool = False
    is_closing_epoch: bool = False
    validation_ending: bool = False
    eval_batches: int = 0
    tokens: int = 0
    samples_before: int = 0
    tokens_before: int = 0
    parts_per_batch: int = 1

    @property
    def global_step(self) -> int:
        """Steps as users count them: in `trainer.global_step`, file names, and limits. A subclass may count others."""
        return self.steps

    def end_epoch(self) -> None:
        """Count the present epoch as done."""
        self.epochs += 1
        self.batches_in_epoch = 0
        self.epoch_open = self.epoch_left = self.epoch_paused = False
        self.is_closing_epoch = False

    def begin_epoch_again(self) -> None:
        """Leave the open epoch: it will begin again. What was trained in it counts."""
        self.batches_in_epoch = 0
        self.epoch_open = self.epoch_announced = self.epoch_left = self.epoch_paused = False

    def move_to(self, batches_in_epoch: int) -> None:
        """Count the present epoch's batches as this number of ranks does, after a resume on another one."""
        shift = batches_in_epoch - self.batches_in_epoch
        began_at = self.total_batches - self.batches_in_epoch
        if self.validated_at > began_at:
            self.validated_at = max(began_at, self.validated_at + shift)
        self.batches_in_epoch += shift
        self.total_batches += shift

    def state_dict(self) -> StateDict:
        """Return the counts as plain numbers."""
        state = replace(self)
        if self.is_closing_epoch:
            state.end_epoch()
        counts = asdict(state)
        del counts["samples_before"], counts["tokens_before"]
        if self.parts_per_batch == 1:
            del counts["parts_per_batch"]
        return counts

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Set the counts; names that an older version did not know keep their value."""
        known = {field.name for field in fields(self)}
        for name, value in state_dict.items():
            if name in known:
                setattr(self, name, value)
        self.samples_before, self.tokens_before = self.samples, self.tokens
