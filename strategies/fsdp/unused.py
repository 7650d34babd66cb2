"""Parameters that no rank's loss reaches: they get no gradient, as on one process, so that no optimizer steps them.

A rank whose loss does not reach a parameter takes part in the reduction with a gradient of 0, because the losses of
other ranks may reach it. Whether one does, only all ranks together know. They count after the 1st, 2nd, 4th, 8th, ...
backward pass, and after each pass from the first one on in which the loss of some rank left out a parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


class UnusedParameters:
    """Takes gradients away from parameters that no rank's loss has reached.

    Args:
        groups: torch's objects for the parameters that are gathered together, for each such group of a module: the same
            in the same order on all ranks.
        group: The processes over which gradients are averaged; None: all.
    """

    def __init__(self, groups: Sequence[Sequence[FSDPParam]], group: ProcessGroup | None) -> None:
        self._members = [one for members in groups for one in members]
        self._group = group
        # Of the last pass: those that this rank's loss left out and that had no gradient before.
        self._unused: dict[int, FSDPParam] = {}
        self._has_passed = False
        self._num_passes = 0
        self._is_watched = False
        self._has_warned = False
        for members in groups:
            for index, one in enumerate(members):
                one.__class__ = _Noted if index else _FirstNoted
                one.use = self  # type: ignore[attr-defined]  # of the class that it has now

    def note(self, one: FSDPParam, *, is_used: bool) -> None:
        """Note whether this rank's loss has reached a parameter. A unit that was called twice does so twice."""
        if is_used:
            self._unused.pop(id(one), None)
        elif one.sharded_param.grad is None:
            self._unused[id(one)] = one

    def note_pass(self) -> None:
        """Note that a backward pass goes through the module."""
        self._has_passed = True

    def settle(self) -> None:
        """End a backward pass whose gradients are averaged. On every rank: it communicates, after some passes."""
        if not self._has_passed:
            return
        self._has_passed = False
        unused, self._unused = self._unused, {}
        size = dist.get_world_size(self._group)
        if size == 1:
            _drop(unused.values())
            return
        self._num_passes += 1
        is_due = not self._num_passes & (self._num_passes - 1)
        if not (is_due or self._is_watched):
            self._warn(unused)
            return
        counts = torch.tensor([float(id(one) in unused) for one in self._members], device=self._members[0].device)
        dist.all_reduce(counts, group=self._group)
        if is_due or unused:  # else nothing follows from it on this rank, which need not wait for the device
            found = counts.tolist()
            self._is_watched = self._is_watched or any(found)
            _drop(one for one, count in zip(self._members, found, strict=True) if count == size)

    def _warn(self, unused: dict[int, FSDPParam]) -> None:
        if unused and not self._has_warned:
            self._has_warned = True
            names = [str(one._param_fqn).removeprefix("module.") for one in unused.values()]  # it is that of the root
            logger.warning(
                "backward pass %d is the first in which the loss of this rank does not reach some parameters: %s%s. "
                "Until the ranks compare notes, after pass %d, they are stepped with a gradient of 0 (weight decay and "
                "momentum change them), where one process would not step them.",
                self._num_passes,
                ", ".join(names[:5]),
                " ..." if len(names) > 5 else "",
                1 << self._num_passes.bit_length(),
            )


def _drop(members: Any) -> None:  # Any: an iterable of torch's objects
    for one in members:
        one.sharded_param.grad = None


class _Noted(FSDPParam):
    """torch's object for a parameter, which notes that its gradient is reduced, or is missing."""

    use: UnusedParameters

    @property
    def unsharded_zero_grad_data(self) -> Tensor:
        """A gradient of 0, which torch reduces if the loss of this rank has none."""
        self.use.note(self, is_used=False)
        return super().unsharded_zero_grad_data

    @property
    def unsharded_grad_data(self) -> Tensor:
        """The gradient of one pass, which torch reduces."""
        self.use.note(self, is_used=True)
        return super().unsharded_grad_data

    @property
    def unsharded_accumulated_grad_data(self) -> Tensor:
        """The gradient of several passes, which torch reduces."""
        self.use.note(self, is_used=True)
        return super().unsharded_accumulated_grad_data


class _FirstNoted(_Noted):
    """The first of a group, which notes backward passes, too."""

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Called for each parameter at the end of a backward pass through its group."""
        self.use.note_pass()
        super().accumulate_unsharded_grad_if_needed()
