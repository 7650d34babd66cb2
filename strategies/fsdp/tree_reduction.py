"""Reduction of sharded gradients by a fixed binary tree over the ranks; see distributed/tree_sum.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ..distributed.tree_sum import sum_scattered, tree_norm
from .root import ShardedRoot, groups_of, units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


class Absence(Protocol):
    """Tells whether this rank adds nothing in the present backward pass."""

    @property
    def is_set(self) -> bool:
        """Whether it adds nothing."""
        ...


class TreeReduceScatter(ReduceScatter):
    """Sums the gradients of a unit over ranks, in place of a reduce-scatter of the communication library.

    Args:
        absence: Whether this rank's gradients are not to be added.
    """

    def __init__(self, absence: Absence) -> None:
        self._absence = absence

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Write this rank's shard of the sum."""
        if self._absence.is_set:
            input_tensor.zero_()
        output_tensor.copy_(sum_scattered(input_tensor.view(group.size(), -1), group))


@contextmanager
def reducing_in_tree(strategy: Any, model: nn.Module, absence: Absence) -> Iterator[None]:  # Any: a ShardedStrategy
    """Return a context in which backward passes sum gradients over ranks, by a tree, and norms do not see the sharding.

    Parameters that every rank has in full keep their gradients: the caller reduces them.

    Args:
        strategy: Whose norms are to be.
        model: The result of `setup_module`.
        absence: See `TreeReduceScatter`.
    """
    assert isinstance(model, ShardedRoot)
    reduction = TreeReduceScatter(absence)
    groups: list[Any] = [group for unit in units_of(model) for group in groups_of(unit)]  # Any: torch's own
    before = [(one, one._reduce_scatter_comm, one.gradient_divide_factor, one.force_sum_reduction_for_comms)
              for one in groups]  # fmt: skip
    replicated, model.replicated = model.replicated, ()
    for group in groups:
        group._reduce_scatter_comm, group.gradient_divide_factor = reduction, 1.0
        group.force_sum_reduction_for_comms = True
    strategy.total_norm = tree_norm
    try:
        yield
    finally:
        del strategy.total_norm
        model.replicated = replicated
        for group, comm, factor, is_forced in before:
            group._reduce_scatter_comm, group.gradient_divide_factor = comm, factor
            group.force_sum_reduction_for_comms = is_forced
