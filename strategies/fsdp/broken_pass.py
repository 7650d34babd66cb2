"""A pass through a sharded module that an error interrupted on one rank, while others wait for it in collectives.

The collectives of a pass do not depend on the samples in its batch. So the rank runs the pass again on fewer samples:
those collectives that it was in before are skipped, and the others meet those in which the other ranks wait. What is
computed has no meaning; every rank drops it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from .deferred_reduction import forget
from .root import ShardedRoot, groups_of, reshard, units_of

# Any in this file: arguments of torch's operators, and its own objects without public types.


def count_collectives() -> dict[str, int]:
    """Return how many collectives this rank has begun in each process group, by the group's name."""
    groups: list[Any] = [one for one in distributed_c10d._world.pg_map if isinstance(one, dist.ProcessGroup)]
    return {one.group_name: one._get_sequence_number_for_group() for one in groups}


class SkippedCollectives(TorchDispatchMode):
    """Leaves out the next collectives of this rank.

    Args:
        counts: How many of each process group, by its name.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._left = dict(counts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        objects = [one for one in args if isinstance(one, torch.ScriptObject)]
        (group,) = [one for one in objects if str(one._type()).endswith(".ProcessGroup")]
        name = dist.ProcessGroup.unbox(group).group_name
        if not self._left.get(name):
            return func(*args, **(kwargs or {}))
        self._left[name] -= 1
        work = distributed_c10d.Work.boxed(torch._C._distributed_c10d.FakeWork())
        return (args[0], work) if len(func._schema.returns) == 2 else work


def break_off(root: ShardedRoot) -> None:
    """Free what a pass has left that an error interrupted, so that another one can begin. Does not communicate."""
    states = [unit._get_fsdp_state() for unit in units_of(root)]
    for state, unit in zip(states, units_of(root), strict=True):
        state._training_state = type(state._training_state).IDLE
        context = state._state_ctx
        context.iter_forward_root, context.post_backward_final_callback_queued = None, False
        for group in groups_of(unit):
            if group._all_gather_result is not None:  # gathered ahead
                group.wait_for_unshard()
            group._training_state = type(group._training_state).IDLE
            communication = group.comm_ctx
            getattr(communication, "reduce_scatter_states", []).clear()
            if getattr(communication, "reduce_scatter_state", None) is not None:  # torch 2.12 and older keep one
                communication.reduce_scatter_state = None
            communication.all_gather_state = None
            group._all_reduce_state = group._post_reduce_event = group._partial_reduce_output = None
    forget([one for unit in units_of(root) for group in groups_of(unit) for one in group.fsdp_params])
    root.output = None
    root.has_deferred = root.reached.is_set = root.running.is_set = False
    reshard(root)
