"""The losses of one window over several ranks.

The gradient wanted is that of the whole global batch, however it was cut into ranks and micro-batches:

    d/dw  (sum over ranks and micro-batches of sum_i) / (sum over ranks and micro-batches of weight_i)

The strategy averages gradients over W ranks. So every rank runs backward on `sum_i / reference`, with one reference for
all ranks, and the averaged gradients are multiplied once by `W * reference / total`, where the total weight travels in
a small reduction of its own that overlaps with the last backward pass. The reference is a power of two: dividing by it
is exact, so that the bits of a run do not depend on when the reference was chosen, and a resumed run may choose
another.

A plain mean counts as one micro-batch of weight 1. As long as all ranks have equally many of them, which data with a
length and the policies "stop_all" and "cycle" make sure, the average needs no factor and no reduction: a micro-batch
that a rank skips by returning None then counts with a loss of 0. Where that cannot be known, the counts are added up as
above.

A window in which no rank had any loss makes no step. Ranks that had one know that there is one; those that had none
note it before the reduction of gradients and look after it how many did (`Strategy.note_absence`), so that windows of
losses cost nothing more.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import ModuleError
from ..metrics.accumulators import accumulation_dtype
from .loss import Loss, WindowLoss

if TYPE_CHECKING:
    from ...strategies import Strategy

__all__ = ["RanksWindowLoss"]


class RanksWindowLoss(WindowLoss):
    """Gives each micro-batch its share, then the factor for the gradients; equal on all ranks.

    Args:
        device: Where losses live.
        strategy: Communicates.
        counts: Whether the ranks may have different numbers of micro-batches, or skip steps together: then the counts
            are added up at each step, also for plain means, and gradients are scaled by them.

    Attributes:
        form: "mean" or "sum", the same on all ranks; None before any rank had a loss.
    """

    __slots__ = (
        "_absent", "_counts", "_finish", "_is_counted", "_name", "_number", "_scale", "_strategy", "form",
        "has_nothing",
    )  # fmt: skip

    def __init__(self, device: torch.device, strategy: Strategy, *, counts: bool) -> None:
        self._strategy = strategy
        self._counts = counts
        # Where gradients are not reduced at each step, ranks count all the same: to know whether any had a loss.
        self._is_counted = counts or not strategy.reduces_every_step
        self._scale = 1.0
        self._finish: Callable[[], Tensor] | None = None
        self._absent: Callable[[], int] | None = None
        self._name = ""
        self._number = 0
        self.form: str | None = None
        super().__init__(device)

    def begin(self, planned: int) -> None:
        """Start a window that is planned to have `planned` micro-batches on every rank."""
        super().begin(planned)
        self._finish = self._absent = None
        self._number += 1
        self.has_nothing = False

    def begin_part(self, name: str | None = None) -> None:
        """Continue the window in another epoch: what ranks add up or note counts for this part of it.

        Args:
            name: The same on all ranks, where an earlier run began the window; no other run has had it.
        """
        self._finish = self._absent = None
        self._number += 1
        self._name = self._name if name is None else name

    def agree(self, loss: Tensor | Loss | None) -> None:
        """Let all ranks know which form losses have. Called on all ranks at once until one has a loss; communicates.

        Raises:
            ModuleError: Some ranks return means and others sums.
        """
        form = None if loss is None else "sum" if isinstance(loss, Loss) else "mean"
        weight = float(loss.weight) if isinstance(loss, Loss) else 0.0  # once per run: a host read is no matter
        seen = self._strategy.gather_objects((form, weight, uuid.uuid4().hex))
        self._name = seen[0][2]
        forms = {form for form, _, _ in seen if form is not None}
        if len(forms) > 1:
            ranks = {form: [rank for rank, (one, _, _) in enumerate(seen) if one == form] for form in sorted(forms)}
            raise ModuleError(
                f"training_step returned a mean on ranks {ranks['mean']} and a sum with a weight on ranks "
                f"{ranks['sum']}.",
                fix="return the same form on every rank: lw.Loss(sum, weight) counts exactly.",
            )
        self.form = next(iter(forms), None)
        largest = max(weight for _, weight, _ in seen)
        self._scale = 2.0 ** round(math.log2(largest)) if largest > 0 else 1.0

    def share(self, loss: Tensor | Loss) -> Tensor:
        """Return what this micro-batch calls backward on: shape (), with graph.

        Raises:
            ModuleError: The loss is no scalar, or means and sums are mixed.
        """
        if (self.form == "sum") != isinstance(loss, Loss):
            raise ModuleError(
                "training_step returned a mean for one batch and a sum with a weight for another.",
                fix="return the same form for every batch and on every rank: lw.Loss(sum, weight) counts exactly.",
            )
        if self.form == "sum":
            self.reference = self._scale
        return super().share(loss)

    def reduce(self, *, is_finite: bool) -> None:
        """Begin to add up over ranks what this window weighs, where it must be known. On every rank, before the last
        backward pass.

        Args:
            is_finite: Whether this rank's losses are; only asked where bad steps are skipped.
        """
        if self.form != "sum" and not self._is_counted:
            if not self.count and self.form is not None:
                self._absent = self._strategy.note_absence(f"{self._name}/{self._number}")
            return
        dtype = accumulation_dtype(self.device)
        weight = self.total if self.form == "sum" else float(self.count)
        rest = [float(not is_finite), float(self.count > 0 or self.reference is not None)]
        numbers = rest if isinstance(weight, Tensor) else [weight, *rest]
        tensor = torch.tensor(numbers, dtype=dtype).to(self.device, non_blocking=True)
        if isinstance(weight, Tensor):
            tensor = torch.cat([weight.to(dtype).reshape(1), tensor])
        self._finish = self._strategy.start_sum(tensor)

    def is_to_be_skipped(self) -> bool:
        """Return whether some rank's loss was not finite, or no rank had one. Waits for the device."""
        assert self._finish is not None
        _, bad, losses = self._finish().tolist()
        self.has_nothing = losses == 0 and not bad > 0
        return bool(bad > 0 or losses == 0)

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch of any rank had a loss. Waits for the device only on a rank without one.

        A rank that had a loss knows the answer; those without find out, and all come to the same.
        """
        if self.count or self.reference is not None:
            return False
        if self._finish is not None:
            return bool(self._finish()[2].item() == 0)
        if self.form is None:  # asked at each micro-batch until there is one: there was none
            return True
        return self._absent is not None and self._absent() == self._strategy.world_size

    def gradient_factor(self) -> Tensor | float | None:
        """Return what the averaged gradients are to be multiplied with, or None where they are right as they are."""
        if self._finish is None or (self.form != "sum" and not self._counts):
            return None
        total = self._finish()[0]
        wanted = self._strategy.topology.data_size * (self._scale if self.form == "sum" else float(self.planned))
        return torch.where(total > 0, wanted / total, torch.zeros_like(total))
