"""`arrange_shards`: what each rank writes of a checkpoint of all stages, where every rank writes its own shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ...distributed.shards import RemoteShards, is_sharded
from .state import Gathering

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .window import PipelineRunner

__all__ = ["arrange_shards"]

# Any in this file: entries of states.


def arrange_shards(runner: PipelineRunner, tree: Any, mesh: DeviceMesh | None, *, keep: bool) -> Any:
    """Return a checkpoint with the names of all stages, in the same structure on all ranks. On every rank.

    A sharded tensor stays on the ranks of the first stage that has it, and is `RemoteShards` on the others. Plain
    tensors, such as buffers and counts of steps, are sent to global rank 0, which writes them.

    Args:
        runner: Has the stages.
        tree: With `StagePart` in the states of modules and `StageOptimizer` in place of those of optimizers.
        mesh: The mesh of this stage where it has one process, whose tensors are plain; None where it has several.
        keep: Whether this rank gets the plain tensors: global rank 0. Elsewhere None stands in their place.
    """
    return _Arranging(runner, tree, mesh, keep=keep).gather(tree, ())


class _Arranging(Gathering):
    """One such arrangement: every rank of the pipeline walks through the same structure."""

    def __init__(self, runner: PipelineRunner, tree: Any, mesh: DeviceMesh | None, *, keep: bool) -> None:
        super().__init__(runner, tree, keep=keep)
        self._mesh = mesh

    def module_state(self, tree: Mapping[str, Any], path: tuple[object, ...]) -> dict[str, Any]:
        """Return the state of a module; parameters that stages share are one tensor under several names."""
        owner_of = {name: ranks[0] for name, ranks in self.split.owners.items() if name in tree}
        own = {name: self.description(tree[name]) for name, rank in owner_of.items() if rank == self.split.rank}
        everyone = self.of_all_ranks(own)
        firsts = {name: shared.names[0] for shared in self.split.shared for name in shared.names}
        found: dict[str, Any] = {}
        extra = self.extra_states(tree)
        state = {}
        for name, value in tree.items():
            if name not in owner_of:
                state[name] = extra[name] if name in extra else self.gather(value, (*path, name))
                continue
            first = firsts.get(name, name)
            first = first if first in owner_of else name
            if first not in found:
                rank = owner_of[first]
                found[first] = self.entry(tree[first], everyone[rank][first], rank)
            state[name] = found[first]
        return state

    def description(self, value: Any) -> Any:
        """Return shape and dtype of what its owners write."""
        if isinstance(value, Tensor) and (is_sharded(value) or (self._mesh is not None and value.numel() > 1)):
            return RemoteShards(value.shape, value.dtype)
        return super().description(value)

    def entry(self, value: Any, described: Any, owner: int) -> Any:
        """Return the owners' sharded tensor, and on other ranks what stands for it."""
        if isinstance(described, RemoteShards) and self.split.rank == owner:
            return value if is_sharded(value) else self._of_one_process(value)
        return super().entry(value, described, owner)

    def _of_one_process(self, value: Tensor) -> DTensor:
        assert self._mesh is not None
        return DTensor.from_local(value.detach(), self._mesh, [Replicate()], run_check=False)
