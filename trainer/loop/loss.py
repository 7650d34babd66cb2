"""The loss of a training step, and how the losses of an accumulation window add up.

A loss is a sum and a weight. Over a window of micro-batches, on one rank or several, the gradient wanted is

    d/dw  (sum_1 + ... + sum_n) / (weight_1 + ... + weight_n)

which does not depend on how the samples were split into ranks and micro-batches. The total weight is known only after
the last forward pass, so each backward pass runs on `sum_i / reference`, and the gradients are multiplied once by
`reference / total`. A plain mean counts as one micro-batch of weight 1.

In one process the reference is chosen at the first micro-batch. For plain means it is the planned size of the window,
which makes a full window bit-equal to `(loss / n).backward()`.

Several ranks use one reference, and the averaged gradients are multiplied once by `ranks * reference / total`. The
total weight travels in its own small reduction, which overlaps with the last backward pass. The reference is a
power of two: dividing by it is exact, so that the bits of a run do not depend on when the reference was chosen, and a
resumed run may choose another.

As long as all ranks have equally many plain means, their average needs no factor and no reduction: a micro-batch that a
rank skips by returning None then counts with a loss of 0. Data with a length and the policies "stop_all" and "cycle"
ensure it. Elsewhere the counts are added up as above.

A window without a loss on any rank makes no step. A rank with a loss needs no communication to know this. Ranks without
one record it before the reduction of gradients, and read the number of such ranks after it
(`NotesAbsence.note_absence`), so that windows with losses have no extra cost.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import ModuleError
from ...protocols import StepOutput
from ...strategies.optional import NotesAbsence
from ..metrics.accumulators import accumulation_dtype

if TYPE_CHECKING:
    from fractions import Fraction

    from ...strategies import Strategy


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a sum over elements and the weight of these elements.

    Args:
        sum: Sum of the element losses: shape (), any floating dtype, with its autograd graph.
        weight: Weight of the sum, in any unit that is the same for all micro-batches of a run (tokens, pixels,
            samples): a non-negative number, or a tensor of shape () on any device, which the host never reads.
    """

    sum: Tensor
    weight: Tensor | float

    def mean(self) -> Tensor:
        """Return sum / weight, or 0 if the weight is 0: shape (), on the device of the sum."""
        weight = self.weight
        if isinstance(weight, Tensor):
            weight = weight.reshape(()).to(self.sum.device, non_blocking=True)
            return torch.where(weight > 0, self.sum / weight, torch.zeros_like(self.sum))
        return self.sum / weight if weight > 0 else torch.zeros_like(self.sum)


def read_loss(output: StepOutput) -> Tensor | Loss | None:
    """Return the loss in what `training_step` returned, or None where the batch is to be skipped.

    Raises:
        ModuleError: The value is none of the accepted forms.
    """
    if output is None or isinstance(output, Tensor | Loss):
        return output
    if isinstance(output, Mapping):
        if "loss_sum" in output and "weight" in output:
            return Loss(output["loss_sum"], output["weight"])
        if "loss" in output:
            loss = output["loss"]
            if isinstance(loss, Tensor | Loss):
                return loss
            raise ModuleError(
                f"training_step returned a dict whose 'loss' is {type(loss).__name__}, expected a tensor or lw.Loss.",
                fix="return {'loss': loss} where loss is a scalar tensor with its graph.",
            )
        raise ModuleError(
            f"training_step returned a dict with the keys {sorted(map(str, output))}, "
            "expected 'loss', or 'loss_sum' and 'weight'.",
            fix="add the key 'loss', or return None to skip the batch.",
        )
    raise ModuleError(
        f"training_step returned {type(output).__name__}, expected a tensor, lw.Loss, a dict with 'loss', or None.",
        fix="return the scalar loss tensor, or None to skip the batch.",
    )


class WindowLoss:
    """The losses of one window as they come: gives each micro-batch its share, then the factor for the gradients.

    One object serves a run: `begin` starts the next window.

    Attributes:
        is_finite: Whether the losses are finite, where bad steps are skipped: this rank's, and after the last
            micro-batch those of all ranks.
        has_parts: Whether batches are trained in several parts each.
        is_divided: Whether the gradients need no factor after the last backward pass: those of one plain mean do not,
            nor those that were multiplied with it already.
    """

    __slots__ = ("count", "device", "has_parts", "is_divided", "is_finite", "planned", "reference", "total")
    form: str | None = "any"  # "mean" or "sum" where all ranks must have the same; None before any of them had a loss
    has_nothing = False  # whether the window is skipped on all ranks because none of them has a loss

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin(1)

    def begin(self, planned: int) -> None:
        """Start a window that is planned to have `planned` micro-batches on every rank; it may end earlier."""
        self.planned = planned
        self.count: Fraction | int = 0  # batches with a plain mean, or parts of them
        self.reference: Tensor | float | None = None
        self.total: Tensor | float = 0.0
        self.is_finite = True
        self.is_divided = self.has_parts = False

    def synchronize_form(self, loss: Tensor | Loss | None) -> None:
        """Compare the form of losses over ranks, until one has a loss."""

    def reduce(self) -> None:
        """Begin to add up over ranks what the window weighs: when its losses are known, before the last backward."""

    def join_stages(self) -> None:
        """Pass the result of the last pipeline stage to stages without losses; see `StagesWindowLoss`."""

    def is_to_be_skipped(self) -> bool:
        """Return whether some loss was not finite, where bad steps are skipped."""
        return not self.is_finite

    def share(self, loss: Tensor | Loss, part: Fraction | int = 1) -> Tensor:
        """Return what this micro-batch calls backward on: shape (), with graph.

        Args:
            loss: Its loss.
            part: The part of its batch that it is, by samples: what a mean counts for.

        Raises:
            ModuleError: The loss is not a scalar, or means and sums are mixed in one window.
        """
        if isinstance(loss, Loss):
            return self._share_of_sum(loss)
        if self.reference is not None:
            raise _mixed_forms()
        if loss.ndim and loss.numel() != 1:
            raise ModuleError(
                f"training_step returned a loss of shape {tuple(loss.shape)}, expected a scalar.",
                fix="reduce it, for example with loss.mean(), or return lw.Loss(losses.sum(), losses.numel()).",
            )
        self.count += part
        divisor = self.planned if part == 1 else float(self.planned / part)
        return loss if divisor == 1 else loss / divisor

    def _share_of_sum(self, loss: Loss) -> Tensor:
        if self.count:
            raise _mixed_forms()
        total, weight = loss.sum, loss.weight
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise ModuleError(
                f"the sum of a loss is {_describe(total)}, expected a scalar tensor.",
                fix="pass the sum over all elements, for example losses.sum().",
            )
        if isinstance(weight, Tensor) and weight.numel() == 1:
            weight = weight.detach().reshape(()).to(self.device, non_blocking=True)
        elif isinstance(weight, Tensor) or not isinstance(weight, int | float) or not weight >= 0:
            raise ModuleError(
                f"the weight of a loss is {_describe(weight)}, expected a number of at least 0.",
                fix="pass the number of elements in the sum, as a number or a tensor of one element.",
            )
        if self.reference is None:
            if isinstance(weight, Tensor):
                if self.planned == 1 and not self.has_parts:
                    # No factor comes after it: a sum that weighs nothing gets its gradient of 0 here.
                    self.reference = torch.where(weight > 0, weight.to(total.dtype), math.inf)
                else:
                    self.reference = torch.where(weight > 0, weight, torch.ones_like(weight))
            else:
                self.reference = float(weight) if weight > 0 else 1.0
        self.total = self.total + weight
        return total / self.reference

    def weigh(self, num_batches: int) -> tuple[float, float]:
        """Return the weight of all losses of the window over ranks, and the divisor of their backward passes.

        It waits for the device where weights are tensors.

        Args:
            num_batches: Micro-batches that were run, of those that were planned.
        """
        if self.is_divided:
            return 1.0, 1.0
        if self.reference is None:
            return float(self.count), float(self.planned)
        return float(self.total), float(self.reference)

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch of this window had a loss, so that there is nothing to step with.

        A loss of weight 0 is a loss: its gradient is 0. Whether a weight is 0 may be known to the device only.
        """
        return self.reference is None and self.count == 0

    def gradient_factor(self) -> Tensor | float | None:
        """Return what the accumulated gradients are to be multiplied with, or None where they are right as they are."""
        if self.reference is None:
            return None if self.count == self.planned else float(self.planned / self.count)
        if isinstance(self.total, Tensor):
            if self.planned == 1 and not self.has_parts:
                return None
            # Counts are integers, and torch would divide those in float32.
            total = self.total.to(accumulation_dtype(self.device))
            return torch.where(total > 0, self.reference / total, torch.zeros_like(total))
        if not self.total:
            return 0.0
        return None if self.total == self.reference else self.reference / self.total


class RanksWindowLoss(WindowLoss):
    """The losses of one window over several ranks: shares for micro-batches, and one factor for all ranks.

    Args:
        device: Where losses live.
        strategy: Communicates.
        counts: Whether the ranks may have different numbers of micro-batches, or skip steps together: then the counts
            are added up at each step, also for plain means, and gradients are scaled by them.

    Attributes:
        form: "mean" or "sum", the same on all ranks; None before any rank had a loss.
    """

    __slots__ = (
        "_absent", "_counts", "_finish", "_is_counted", "_name", "_note_absence", "_number", "_scale", "_strategy",
        "form", "has_nothing",
    )  # fmt: skip

    def __init__(self, device: torch.device, strategy: Strategy, *, counts: bool) -> None:
        self._strategy = strategy
        self._counts = counts
        self._note_absence = strategy.note_absence if isinstance(strategy, NotesAbsence) else None
        # Where gradients are not reduced at each step, ranks count all the same: to know whether any had a loss.
        self._is_counted = counts or not strategy.traits.reduces_every_step
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
        """Continue the window in another epoch: sums and notes of ranks count for this part of it.

        Args:
            name: The same on all ranks, where an earlier run began the window; no other run has had it.
        """
        self._finish = self._absent = None
        self._number += 1
        self._name = self._name if name is None else name

    def synchronize_form(self, loss: Tensor | Loss | None) -> None:
        """Compare the form of losses over ranks. Called on all ranks at once until one has a loss; communicates.

        Raises:
            ModuleError: Some ranks return means and others sums.
        """
        form = None if loss is None else "sum" if isinstance(loss, Loss) else "mean"
        weight = float(loss.weight) if isinstance(loss, Loss) else 0.0  # once per run: a host read is cheap
        self._name = self._strategy.broadcast(uuid.uuid4().hex)
        exponent = round(math.log2(weight)) if weight > 0 else None  # alike on most ranks, unlike the weight
        seen = self._strategy.gather_objects((form, exponent))
        self._take_form([form for form, _ in seen])
        self._scale = 2.0 ** max((one for _, one in seen if one is not None), default=0)

    def _take_form(self, seen: Sequence[str | None]) -> None:
        """Take the form that all ranks with a loss have.

        Args:
            seen: The form of each rank's loss, in rank order; None where it had none.
        """
        forms = {form for form in seen if form is not None}
        if len(forms) > 1:
            ranks = {form: [rank for rank, one in enumerate(seen) if one == form] for form in sorted(forms)}
            raise ModuleError(
                f"training_step returned a mean on ranks {ranks['mean']} and a sum with a weight on ranks "
                f"{ranks['sum']}.",
                fix="return the same form on every rank: lw.Loss(sum, weight) counts exactly.",
            )
        self.form = next(iter(forms), None)

    def share(self, loss: Tensor | Loss, part: Fraction | int = 1) -> Tensor:
        """Return what this micro-batch calls backward on; see `WindowLoss.share`."""
        if (self.form == "sum") != isinstance(loss, Loss):
            raise ModuleError(
                "training_step returned a mean for one batch and a sum with a weight for another.",
                fix="return the same form for every batch and on every rank: lw.Loss(sum, weight) counts exactly.",
            )
        if self.form == "sum":
            self.reference = self._scale
        return super().share(loss, part)

    def reduce(self) -> None:
        """Begin to add up over ranks what the window weighs, where it must be known. On every rank."""
        if self.form != "sum" and not self._is_counted:
            if self._note_absence is not None and not self.count and self.form is not None:
                self._absent = self._note_absence(f"{self._name}/{self._number}")
            return
        dtype = accumulation_dtype(self.device)
        weight = self.total if self.form == "sum" else float(self.count)
        rest = [float(not self.is_finite), float(self.count > 0 or self.reference is not None)]
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

        A rank that had a loss knows the answer; the others find out, and all get the same.
        """
        if self.count or self.reference is not None:
            return False
        if self._finish is not None:
            return bool(self._finish()[2].item() == 0)
        if self.form is None:  # compared at each micro-batch until one has a loss: none had
            return True
        return self._absent is not None and self._absent() == self._strategy.world_size

    def weigh(self, num_batches: int) -> tuple[float, float]:
        """Return the weight of all losses of the window over ranks, and their divisor; see `WindowLoss.weigh`."""
        divisor = self._scale if self.form == "sum" else float(self.planned)
        if self._finish is None or (self.form != "sum" and not self._counts):
            return float(num_batches * self._strategy.topology.data_size), divisor
        return float(self._finish()[0]), divisor

    def gradient_factor(self) -> Tensor | float | None:
        """Return what the averaged gradients are to be multiplied with, or None where they are right as they are."""
        if self._finish is None or (self.form != "sum" and not self._counts):
            return None
        total = self._finish()[0]
        wanted = self._strategy.topology.data_size * (self._scale if self.form == "sum" else float(self.planned))
        return torch.where(total > 0, wanted / total, torch.zeros_like(total))


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _mixed_forms() -> ModuleError:
    return ModuleError(
        "training_step returned a mean for one micro-batch and a sum with a weight for another of the same window.",
        fix="return the same form for every batch: lw.Loss(sum, weight) counts exactly, a mean counts as one batch.",
    )
