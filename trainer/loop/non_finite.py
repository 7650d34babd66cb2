"""The policy on losses that are not finite, and the account of steps that were skipped.

Losses are checked in one packed copy per log boundary. A skipped step is known to the host where it is skipped: it is
counted, logged the first time, and named as a share at the end of fit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import NonFiniteError
from ...messages import warn
from ...protocols import Gather
from ..state import Progress

POLICIES = ("warn", "raise", "skip", "ignore")

logger = logging.getLogger(__name__)

_MANY = 50  # steps after which a warning says that all were skipped
_NOTHING_TRAINED = (
    "Nothing was trained: training_step returned no loss, or one of weight 0, in all %d steps. Does it end with "
    "`return loss`? It returns a tensor, lw.Loss, or a dict with the key 'loss'. To train in training_step itself, set "
    "self.automatic_optimization = False."
)

_REASONS = {
    "nonfinite": "its loss is not finite, and nonfinite_loss='skip'",
    "empty": "training_step returned no loss, or one of weight 0",
    "refused": "the optimizer was not stepped: gradients overflowed, or optimizer_step left it out",
}

# Number of kept losses at which they are checked, if no log boundary comes before.
MOST_KEPT = 256


class LossWatch:
    """Keeps the losses since the last check, on the device.

    Args:
        policy: "warn" (once), "raise", "skip" (the step itself checks each loss), or "ignore".

    Attributes:
        losses: Losses of micro-batches: shape (), detached.
        gather: Returns the objects of all ranks in rank order; None where there is one process. All ranks then act
            alike on the loss of any of them.
        describe: Describes a batch of this rank by its number in the run, for the message; None without a description.
        first_bad: The first batch with a loss that was not finite, and this loss; None without one.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.keeps = policy in ("warn", "raise")
        self.losses: list[Tensor] = []
        self.gather: Gather | None = None
        self.describe: Callable[[int], str] | None = None
        self.first_bad: tuple[int, float] | None = None
        self._has_warned = False
        self._told: set[str] = set()

    def note_skipped(self, progress: Progress, reason: str, *, is_rank_zero: bool) -> None:
        """Count a window without a step, and log the first one for each reason. On every rank alike.

        Args:
            progress: Counts of the run; the window is not counted yet.
            reason: "nonfinite", "empty" or "refused".
            is_rank_zero: Whether this rank logs it.
        """
        progress.skipped_steps += 1
        if reason == "nonfinite":
            progress.nonfinite_steps += 1
        if progress.skipped_steps == _MANY and _is_empty(progress) and is_rank_zero:
            logger.warning(_NOTHING_TRAINED, _MANY)
        if reason in self._told:
            return
        self._told.add(reason)
        if not is_rank_zero:
            return
        if reason == "empty" and not progress.total_batches:  # a step that skips batches seldom skips the first
            logger.warning(
                "training_step returned no loss, or one of weight 0, for the first batch: no step was made. Does it "
                "end with `return loss`?"
            )
            return
        text = (
            f"The step of batch {progress.total_batches} (0 is the first batch of training) is skipped: "
            f"{_REASONS[reason]}. Later ones are counted in trainer.progress and in the rows of the loggers"
        )
        if reason == "nonfinite":
            warn(text)
        else:
            logger.info(text)

    def note_left(self, progress: Progress, *, is_rank_zero: bool) -> None:
        """Log the first time that the rest of an epoch is skipped."""
        if "left" not in self._told and is_rank_zero:
            self._told.add("left")
            logger.info(
                "on_train_batch_start returned -1: epoch %d ends after %d batches.",
                progress.epochs,
                progress.batches_in_epoch,
            )

    def counts(self, progress: Progress) -> dict[str, float]:
        """Return the counts of skipped steps and of split batches for rows of the loggers; empty without any."""
        counts = {} if progress.parts_per_batch == 1 else {"parts_per_batch": float(progress.parts_per_batch)}
        if not progress.skipped_steps:
            return counts
        counts["skipped_steps"] = float(progress.skipped_steps)
        if progress.nonfinite_steps:
            counts["nonfinite_steps"] = float(progress.nonfinite_steps)
        return counts

    def conclude(self, progress: Progress) -> None:
        """Log the share of skipped steps at the end of fit; a warning if losses were not finite, or if it is large."""
        skipped, total = progress.skipped_steps, progress.steps + progress.skipped_steps
        if not skipped:
            return
        if _is_empty(progress):
            logger.warning(_NOTHING_TRAINED, skipped)
            return
        is_notable = progress.nonfinite_steps > 0 or skipped * 10 > total
        logger.log(
            logging.WARNING if is_notable else logging.INFO,
            "%d of %d steps (%.3g %%) were skipped, %d of them for a loss that was not finite.",
            skipped,
            total,
            100 * skipped / total,
            progress.nonfinite_steps,
        )

    def probe(self) -> Tensor | None:
        """Return one number that is finite if all kept losses are: shape (); None when none is kept."""
        return torch.stack([loss.reshape(()) for loss in self.losses]).sum() if self.losses else None

    def judge(self, probed: float, progress: Progress) -> None:
        """Act on the host's value of `probe`."""
        if math.isfinite(probed):
            self.losses.clear()
        else:
            self.look(progress)

    def _first_bad(self, progress: Progress) -> tuple[int, float] | None:
        """Forget the kept losses; return the first that is not finite, with its batch; None without one."""
        if not self.losses:
            return None
        values = torch.stack([loss.reshape(()) for loss in self.losses]).tolist()
        self.losses.clear()
        bad = next((index for index, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is None:
            return None
        return max(progress.total_batches - (len(values) - bad), 0), values[bad]

    def look(self, progress: Progress) -> None:
        """Check the kept losses and forget them. Waits for the device; with several ranks, on every rank.

        Raises:
            NonFiniteError: One is NaN or infinite and the policy is "raise"; the first is named.
        """
        if not self.keeps:
            self.losses.clear()
            return
        found = self._first_bad(progress)
        held = "" if found is None or self.describe is None else self.describe(found[0])
        place = ""
        if self.gather is not None:
            shares = enumerate(self.gather((found, held)))
            everywhere = [(one, rank, theirs) for rank, (one, theirs) in shares if one is not None]
            # A step later the weights are not finite, and so no rank's loss is: the earliest batch is the cause.
            found, rank, held = min(everywhere, key=lambda share: (share[0][0], share[1]), default=(None, 0, ""))
            place = f" of rank {rank}"
        if found is None:
            return
        batch, value = self.first_bad = self.first_bad or found
        what = f"The training loss was {value} at batch {batch}{place} (0 is the first batch of training)"
        what += f", {held}" if held else ""
        if self.policy == "raise":
            raise NonFiniteError(
                f"{what}; now is step {progress.steps}, and nonfinite_loss='raise'.",
                fix="look at that batch and the learning rate; detect_anomaly=True names the operation, "
                "nonfinite_loss='skip' drops such steps.",
            )
        if not self._has_warned:
            self._has_warned = True
            warn(f"{what}. nonfinite_loss='raise' ends the run there, nonfinite_loss='skip' leaves such steps out")


def _is_empty(progress: Progress) -> bool:
    """Return whether all steps were skipped, none of them for a loss that was not finite."""
    return not progress.steps and not progress.nonfinite_steps
