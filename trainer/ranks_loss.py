"""The losses of one window over several ranks. Used by trainer/ranks_step.py in the place of `loss.WindowLoss`.

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
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ModuleError
from .loss import Loss, WindowLoss
from .slots import accumulation_dtype

if TYPE_CHECKING:
    from ..strategies import Strategy

__all__ = ["RanksWindowLoss"]


class RanksWindowLoss(WindowLoss):
    """Gives each micro-batch its share, then the factor for the gradients; equal on all ranks.

    Args:
        device: Where losses live.
        strategy: Communicates.
        counts: Whether the ranks may have different numbers of micro-batches, or skip steps together: then the counts
            are added up at each step, also for plain means.

    Attributes:
        form: "mean" or "sum", the same on all ranks; None before any rank had a loss.
    """

    __slots__ = ("_counts", "_finish", "_scale", "_strategy", "form")

    def __init__(self, device: torch.device, strategy: Strategy, *, counts: bool) -> None:
        self._strategy = strategy
        self._counts = counts
        self._scale = 1.0
        self._finish: Callable[[], Tensor] | None = None
        self.form: str | None = None
        super().__init__(device)

    def begin(self, planned: int) -> None:
        """Start a window that is planned to have `planned` micro-batches on every rank."""
        super().begin(planned)
        self._finish = None

    def agree(self, loss: Tensor | Loss | None) -> None:
        """Let all ranks know which form losses have. Called on all ranks at once until one has a loss; communicates.

        Raises:
            ModuleError: Some ranks return means and others sums.
        """
        form = None if loss is None else "sum" if isinstance(loss, Loss) else "mean"
        weight = float(loss.weight) if isinstance(loss, Loss) else 0.0  # once per run: a host read is no matter
        seen = self._strategy.gather_objects((form, weight))
        forms = {form for form, _ in seen if form is not None}
        if len(forms) > 1:
            ranks = {form: [rank for rank, (one, _) in enumerate(seen) if one == form] for form in sorted(forms)}
            raise ModuleError(
                f"training_step returned a mean on ranks {ranks['mean']} and a sum with a weight on ranks "
                f"{ranks['sum']}.",
                fix="return the same form on every rank: lw.Loss(sum, weight) counts exactly.",
            )
        self.form = next(iter(forms), None)
        largest = max(weight for _, weight in seen)
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
        if self.form != "sum" and not self._counts:
            return
        dtype = accumulation_dtype(self.device)
        weight = self.total if self.form == "sum" else float(self.count)
        if isinstance(weight, Tensor):
            pair = torch.stack([weight.to(dtype), torch.full((), float(not is_finite), dtype=dtype).to(self.device)])
        else:
            pair = torch.tensor([weight, float(not is_finite)], dtype=dtype).to(self.device, non_blocking=True)
        self._finish = self._strategy.start_sum(pair)

    def is_to_be_skipped(self) -> bool:
        """Return whether some rank's loss was not finite, or nothing counts on any rank. Waits for the device."""
        assert self._finish is not None
        weight, bad = self._finish().tolist()
        return bool(bad > 0 or weight == 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing counts on any rank, as far as hosts know. Waits for the device only where nothing does here.

        A rank with something that counts knows the answer; those without ask, and all come to the same.
        """
        if isinstance(self.total, Tensor) or self.total > 0 or self.form != "sum":
            return False  # plain means whose counts nobody adds up: the others' are not known
        assert self._finish is not None
        return bool(self._finish()[0].item() == 0)

    def gradient_factor(self) -> Tensor | float | None:
        """Return what the averaged gradients are to be multiplied with, or None where they are right as they are."""
        if self._finish is None:
            return None
        total = self._finish()[0]
        wanted = self._strategy.topology.data_size * (self._scale if self.form == "sum" else float(self.planned))
        return torch.where(total > 0, wanted / total, torch.zeros_like(total))
