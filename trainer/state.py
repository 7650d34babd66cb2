"""Position of a Trainer: its verb and stage (`trainer.state`), and counts of completed work (`trainer.progress`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..protocols import StateDict


@dataclass(slots=True)
class TrainerState:
    """The verb, stage and status of a Trainer.

    Attributes:
        fn: "fit", "validate", "test" or "predict"; None before the first verb.
        stage: "train", "sanity_check", "validate", "test" or "predict"; None outside of a run.
        status: "initializing", "running", "finished" or "interrupted".
    """

    fn: str | None = None
    stage: str | None = None
    status: str = "initializing"

    def begin(self, fn: str) -> None:
        """Begin a verb."""
        self.fn, self.stage, self.status = fn, "train" if fn == "fit" else fn, "running"

    def end(self) -> None:
        """End a verb that succeeded."""
        self.stage, self.status = None, "finished"


@dataclass(slots=True)
class Progress:
    """Counts of completed work. A fit loop that starts with these counts continues from that point.

    Attributes:
        epochs: Completed epochs, including their end hooks.
        batches_in_epoch: Micro-batches of the current epoch in a completed window, or in one that continues in the
            next epoch.
        total_batches: Micro-batches in completed windows since the start of training.
        steps: Training steps that were taken (`trainer.global_step`).
        skipped_steps: Windows without a step: all batches skipped, a total weight of 0, or non-finite gradients.
        nonfinite_steps: The skipped steps that `nonfinite_loss="skip"` caused.
        samples: Samples in completed windows, as far as batch sizes are known.
        tokens: Tokens in completed windows; counted only with `max_tokens`.
        samples_before, tokens_before: The counts at the beginning of fit or at the checkpoint, over all ranks; each
            rank adds its share. Not part of the state.
        validated_at: `total_batches` at the end of the last validation inside fit; -1 before the first.
        validated_s: Training time in seconds at that moment, for a validation interval in time.
        epoch_announced: Whether on_train_epoch_start was called for an epoch that is not open yet.
        epoch_open: Whether on_train_epoch_start was called for the current epoch, and its data are being read.
        epoch_left: Whether on_train_batch_start returned -1, which skips the rest of the current epoch.
        epoch_paused: Whether a limit interrupted the current epoch and its end hooks were called. Further training
            continues within it.
        is_closing_epoch: Whether the end hooks of the current epoch are done except for the checkpoints. A state saved
            now records that the epoch is over.
        validation_ending: Whether on_validation_epoch_end is done in a validation inside fit, and on_validation_end is
            due.
        eval_batches: Evaluation batches seen in total: the x value of step values that are logged there.
        parts_per_batch: Number of parts of each batch since `on_oom="shrink"` split batches; 1 before.
        rolled_back_ns: Time of the training's first rollback, by which it knows its list of them; 0 before.
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
    rolled_back_ns: int = 0

    @property
    def global_step(self) -> int:
        """The step count of `trainer.global_step`, file names and limits. A subclass may count differently."""
        return self.steps

    def end_epoch(self) -> None:
        """Count the current epoch as completed."""
        self.epochs += 1
        self.batches_in_epoch = 0
        self.epoch_open = self.epoch_left = self.epoch_paused = False
        self.is_closing_epoch = False

    def begin_epoch_again(self) -> None:
        """Restart the open epoch. The steps already taken in it still count."""
        self.batches_in_epoch = 0
        self.epoch_open = self.epoch_announced = self.epoch_left = self.epoch_paused = False

    def move_to(self, batches_in_epoch: int) -> None:
        """Convert the current epoch's batch counts after a resume on another number of ranks."""
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
        if not self.rolled_back_ns:
            del counts["rolled_back_ns"]
        return counts

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Set the counts; a count that is missing in the state keeps its value."""
        known = {field.name for field in fields(self)}
        self.rolled_back_ns = 0
        for name, value in state_dict.items():
            if name in known:
                setattr(self, name, value)
        self.samples_before, self.tokens_before = self.samples, self.tokens
