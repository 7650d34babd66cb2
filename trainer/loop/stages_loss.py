"""The loss of a window where the ranks hold pipeline stages, and only the last stage has losses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...strategies import Strategy
from ...strategies.optional import HasStages
from ..metrics.accumulators import accumulation_dtype
from .loss import Loss, RanksWindowLoss

_FORMS = (None, "mean", "sum")


class StagesWindowLoss(RanksWindowLoss):
    """The losses of one window over several ranks, where only those with the last pipeline stage have losses.

    These ranks add up what the window weighs, as ranks without stages do. After the backward passes, `join_stages`
    passes the result to the other stages, which then scale their gradients by the same factor and know whether there
    was a loss.

    Plain means need neither where all ranks have equally many, once all stages know that they are means: a step with
    stages that returns no loss is an error.
    """

    __slots__ = ("_joins", "_stages")

    def __init__(self, device: torch.device, strategy: Strategy, *, counts: bool) -> None:
        assert isinstance(strategy, HasStages)
        self._stages = strategy
        super().__init__(device, strategy, counts=counts)

    @property
    def _has_losses(self) -> bool:
        return self._stages.has_last_stage

    def begin(self, planned: int) -> None:
        """Start a window that is planned to have `planned` micro-batches on every rank."""
        super().begin(planned)
        self._joins = self.form != "mean" or self._counts or not self._strategy.traits.reduces_every_step
        self._is_counted = self._joins  # the other stages find out by the counts alone whether there was a loss

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch of any rank had a loss; see `RanksWindowLoss`."""
        return self._joins and super().is_empty

    def synchronize_form(self, loss: Tensor | Loss | None) -> None:
        """Compare the form of losses over ranks; on those with the last stage only, which wait for each other.

        Raises:
            ModuleError: Some ranks return means and others sums.
        """
        form = 0 if loss is None else 2 if isinstance(loss, Loss) else 1
        weight = float(loss.weight) if isinstance(loss, Loss) else 0.0  # once per run: a host read is cheap
        dtype = accumulation_dtype(self.device)
        seen = self._strategy.all_gather(torch.tensor([form, weight], dtype=dtype, device=self.device))
        rows = seen.reshape(-1, 2).tolist()
        self._take_form([_FORMS[int(code)] for code, _ in rows])
        largest = max(weight for _, weight in rows)
        self._scale = 2.0 ** round(math.log2(largest)) if largest > 0 else 1.0

    def join_stages(self) -> None:
        """Take over the last stage's result for the window. On every rank, after the backward passes."""
        if not self._joins:
            return
        dtype = accumulation_dtype(self.device)
        if self._has_losses:
            assert self._finish is not None
            known = torch.tensor([_FORMS.index(self.form), self._scale], dtype=dtype).to(self.device, non_blocking=True)
            self._stages.from_last_stage(torch.cat([self._finish().to(dtype), known]))
            return
        joined = self._stages.from_last_stage(torch.zeros(5, dtype=dtype, device=self.device))
        if self.form is None:
            code, self._scale = joined[3:].tolist()
            self.form = _FORMS[int(code)]
        self._finish = lambda: joined[:3]
