"""The policy on losses that are not finite: looked at in one packed copy per log boundary. One per Trainer."""

from __future__ import annotations

import math
import warnings

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
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.keeps = policy in ("warn", "raise")
        self.losses: list[Tensor] = []
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

    def look(self, progress: Progress) -> None:
        """Look at the kept losses and forget them. Waits for the device.

        Raises:
            NonFiniteError: One is NaN or infinite and the policy is "raise"; the first is named.
        """
        losses = self.losses
        if not losses:
            return
        values = torch.stack([loss.reshape(()) for loss in losses]).tolist()
        self.losses.clear()
        bad = next((index for index, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is None or not self.keeps:
            return
        batch = progress.total_batches - (len(values) - bad)
        what = f"the training loss was {values[bad]} at batch {max(batch, 0)} of training (0 is the first)"
        if self.policy == "raise":
            raise NonFiniteError(
                f"{what}; now is step {progress.steps}, and nonfinite_loss='raise'.",
                fix="look at that batch and the learning rate; detect_anomaly=True names the operation, "
                "nonfinite_loss='skip' drops such steps.",
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{what}; nonfinite_loss='raise' or 'skip' would act on it", stacklevel=2)
