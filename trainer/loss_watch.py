"""The policy on losses that are not finite: looked at in one packed copy per log boundary. One per Trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import NonFiniteError
from .progress import Progress

__all__ = ["MOST_KEPT", "POLICIES", "LossWatch"]

POLICIES = ("warn", "raise", "skip", "ignore")

# Losses are looked at when so many are kept, if no log boundary comes before.
MOST_KEPT = 256


class LossWatch:
    """Keeps the losses since the last look, on the device.

    Args:
        policy: "warn" (once), "raise", "skip" (the step itself looks, at each loss), or "ignore".

    Attributes:
        losses: Losses of micro-batches: shape (), detached.
        gather: Returns the objects of all ranks in rank order; None where there is one process. All ranks then act
            alike on the loss of any of them.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.keeps = policy in ("warn", "raise")
        self.losses: list[Tensor] = []
        self.gather: Callable[[Any], list[Any]] | None = None
        self._has_warned = False

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
        """Forget the kept losses and return the first that is not finite, behind its batch; None without one."""
        if not self.losses:
            return None
        values = torch.stack([loss.reshape(()) for loss in self.losses]).tolist()
        self.losses.clear()
        bad = next((index for index, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is None:
            return None
        return max(progress.total_batches - (len(values) - bad), 0), values[bad]

    def look(self, progress: Progress) -> None:
        """Look at the kept losses and forget them. Waits for the device; with several ranks, on every rank.

        Raises:
            NonFiniteError: One is NaN or infinite and the policy is "raise"; the first is named.
        """
        if not self.keeps:
            self.losses.clear()
            return
        found = self._first_bad(progress)
        place = ""
        if self.gather is not None:
            everywhere = [(one, rank) for rank, one in enumerate(self.gather(found)) if one is not None]
            # A step later the weights are not finite, and so no rank's loss is: the earliest batch is the cause.
            found, rank = min(everywhere, key=lambda pair: (pair[0][0], pair[1]), default=(None, 0))
            place = f" of rank {rank}"
        if found is None:
            return
        batch, value = found
        what = f"the training loss was {value} at batch {batch}{place} (0 is the first batch of training)"
        if self.policy == "raise":
            raise NonFiniteError(
                f"{what}; now is step {progress.steps}, and nonfinite_loss='raise'.",
                fix="look at that batch and the learning rate; detect_anomaly=True names the operation, "
                "nonfinite_loss='skip' drops such steps.",
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{what}; nonfinite_loss='raise' or 'skip' would act on it", stacklevel=2)
