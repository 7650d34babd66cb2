"""States of a module and its optimizers over pipeline stages, under the names of the unsplit module.

Each rank's state has every name; what other stages have is a `StagePart`, until `gather_stages` brings it to rank 0.
A state of any other layout is loaded by names: each stage takes its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ...distributed.collectives import gather_objects
from ...distributed.shards import RemoteShards, full_tensor, is_sharded
from .exchange import Exchange

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from ....protocols import StateDict, Tree
    from .split import StageSplit
    from .window import PipelineRunner

T = TypeVar("T")

# Any in this file: entries of states.

_NAMES = "param_names"  # as checkpoint/content.py has it, which lies above this package


class StagePart:
    """Placeholder of a tensor that another stage has.

    Attributes:
        runner: What runs the stages of that module.
        is_part: Marks that other ranks are needed.
    """

    is_part = True

    def __init__(self, runner: PipelineRunner) -> None:
        self.runner = runner


class StageOptimizer(dict[str, Any]):
    """The state of this rank's optimizer in torch's layout, with the names of its parameters in each group.

    Attributes:
        runner: What runs the stages of that module.
    """

    runner: PipelineRunner


def runner_in(tree: Tree) -> PipelineRunner | None:
    """Return the runner of the placeholders in a structure; None where there are none. The same on all ranks."""
    if isinstance(tree, StagePart | StageOptimizer):
        return tree.runner
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return next((found for value in values if (found := runner_in(value)) is not None), None)


def stages_state(runner: PipelineRunner, own: StateDict) -> StateDict:
    """Return a module's state under all names, from that of this rank's stages."""
    elsewhere = StagePart(runner)
    state = {name: own.get(name, elsewhere) for name in runner.split.state_names}
    return {**state, **{name: value for name, value in own.items() if name not in state}}


def own_module_state(split: StageSplit, state: Mapping[str, Any]) -> StateDict:
    """Return this rank's part of a module's state."""
    here = split.rank
    return {
        name: value
        for name, value in state.items()
        if here in split.owners.get(name, (here,)) and not isinstance(value, StagePart)
    }


def stage_optimizer(runner: PipelineRunner, optimizer: Optimizer, own: StateDict) -> StageOptimizer:
    """Return an optimizer's state with the names of its parameters."""
    names = _names_of(runner.split)
    groups = [
        {**saved, _NAMES: [names[id(one)] for one in group["params"]]}
        for saved, group in zip(own["param_groups"], optimizer.param_groups, strict=True)
    ]
    state = StageOptimizer({**own, "param_groups": groups})
    state.runner = runner
    return state


def own_optimizer_state(split: StageSplit, optimizer: Optimizer, state: Mapping[str, Any]) -> StateDict:
    """Return this rank's part of an optimizer's state, by names; one without names is returned as it is."""
    saved = state["param_groups"]
    if not all(_NAMES in group for group in saved) or len(saved) != len(optimizer.param_groups):
        return dict(state)
    numbers = {name: number for group in saved for name, number in zip(group[_NAMES], group["params"], strict=True)}
    names = _names_of(split)
    entries: dict[int, Any] = {}
    groups = []
    count = 0
    for settings, group in zip(saved, optimizer.param_groups, strict=True):
        members = [names[id(one)] for one in group["params"]]
        for offset, name in enumerate(members):
            if name in numbers and numbers[name] in state["state"]:
                entries[count + offset] = state["state"][numbers[name]]
        kept = {key: value for key, value in settings.items() if key not in ("params", _NAMES)}
        groups.append({**kept, "params": list(range(count, count + len(members)))})
        count += len(members)
    return {**state, "state": entries, "param_groups": groups}


def gather_stages(runner: PipelineRunner, tree: T, *, keep: bool) -> T:
    """Return a checkpoint with full tensors of all stages on global rank 0's CPU. On every rank: it communicates.

    Args:
        runner: Has the stages.
        tree: With `StagePart` in the states of modules and `StageOptimizer` in place of those of optimizers.
        keep: Whether this rank wants them: global rank 0. Elsewhere None stands in place of tensors.
    """
    gathered: T = _Gathering(runner, tree, keep=keep).gather(tree, ())
    return gathered


def _states_in(tree: Tree, path: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    if isinstance(tree, Mapping):
        if any(isinstance(value, StagePart) for value in tree.values()):
            yield path
        for key, value in tree.items():
            yield from _states_in(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for key, value in enumerate(tree):
            yield from _states_in(value, (*path, key))


class _Gathering:
    """One gathering: every rank of the pipeline walks through the same structure. Communicates.

    Args:
        runner: Has the stages.
        tree: See `gather_stages`.
        keep: See `gather_stages`.
    """

    def __init__(self, runner: PipelineRunner, tree: Tree, *, keep: bool) -> None:
        self.split = runner.split
        self.group = runner.group
        self.keep = keep
        # A part of a state may have nothing of some stages: it is one where any rank sees that.
        found = self.of_all_ranks((list(_states_in(tree, ())), runner.copies.marks()))
        runner.copies.check([marks for _, marks in found])
        self._states = {path for paths, _ in found for path in paths}
        self._exchange = Exchange(runner.group, runner.device)
        # Rank 0 has coordinate 0 on all axes; others of a stage help to gather shards, and send nothing.
        self._is_in_line = dist.get_process_group_ranks(runner.group)[0] == 0
        self._full: dict[tuple[object, ...], Tensor] = {}

    def gather(self, tree: Any, path: tuple[object, ...]) -> Any:
        """Return a part of the checkpoint."""
        if isinstance(tree, StageOptimizer):
            return self._optimizer(tree)
        if isinstance(tree, Mapping):
            if path in self._states:
                return self.module_state(tree, path)
            kept = {key: self.gather(value, (*path, key)) for key, value in tree.items()}
            return kept if type(tree) is dict else _as(tree, kept)
        if isinstance(tree, list | tuple):
            items = [self.gather(value, (*path, key)) for key, value in enumerate(tree)]
            return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
        if is_sharded(tree):
            full = self._of_shards(tree)
            return full if self.keep else None
        return tree

    def of_all_ranks(self, value: T) -> list[T]:
        """Return the objects of the ranks of the pipeline."""
        return gather_objects(value, self.group)

    def module_state(self, tree: Mapping[str, Any], path: tuple[object, ...]) -> StateDict:
        """Return the state of a module from its stages' states."""
        owners, extra = self.split.owners, self.extra_states(tree)
        return {
            key: self.tensor(value, owners[key][0])
            if key in owners
            else extra[key]
            if key in extra
            else self.gather(value, (*path, key))
            for key, value in tree.items()
        }

    def extra_states(self, tree: Mapping[str, Any]) -> StateDict:
        """Return what modules return from `get_extra_state`, from the ranks that run them: others have it, too."""
        names = [name for name in self.split.state_names if name not in self.split.owners and name in tree]
        if not names:  # the same on all ranks
            return {}
        everyone = self.of_all_ranks(
            {name: tree[name] for name in names if self.split.owner_of(name) == self.split.rank}
        )
        return {name: value for theirs in everyone for name, value in theirs.items()}

    def description(self, value: Tree) -> Tree:
        """Return what other ranks get to know of an entry of an optimizer's state; None: it is a tensor."""
        return None if isinstance(value, Tensor) else value

    def entry(self, value: Any, described: Tree, owner: int) -> Tree:
        """Return an entry from that of this rank, if it has one, and the owner's description."""
        return self.tensor(value, owner) if described is None else described

    def tensor(self, value: Any, owner: int) -> Tensor | None:
        """Return a tensor that a rank of the pipeline has, on rank 0; None elsewhere."""
        if self.split.rank == owner:
            full = self._of_shards(value) if is_sharded(value) else value
            if owner and self._is_in_line:
                self._exchange.send(full.detach().to(self._exchange.device), 0)
                self._exchange.settle()
            return full if self.keep else None
        return self._exchange.receive(owner).cpu() if self.keep else None

    def _of_shards(self, tensor: Any) -> Tensor:
        part = tensor.to_local()
        full = full_tensor(tensor)
        if not self.keep:
            return full
        key = (part.data_ptr(), tuple(tensor.shape), tensor.dtype) if part.numel() else (id(tensor),)
        return self._full.setdefault(key, full.cpu())

    def _optimizer(self, own: StageOptimizer) -> Any:
        """Return the state of the optimizers of all stages as one, numbered in the order of the module."""
        described = {
            name: {key: self.description(value) for key, value in entry.items()}
            for name, entry in _entries(own).items()
        }
        groups = [{key: value for key, value in group.items() if key != "params"} for group in own["param_groups"]]
        everyone = self.of_all_ranks((described, groups))
        entries = _entries(own)
        order = {name: place for place, name in enumerate(self.split.owners)}
        known: dict[str, tuple[int, StateDict]] = {}
        for rank, (theirs, _) in reversed(list(enumerate(everyone))):
            known.update({name: (rank, entry) for name, entry in theirs.items()})  # of shared ones the first rank's
        states: dict[str, StateDict] = {}
        for name in sorted(known, key=order.__getitem__):
            rank, entry = known[name]
            mine = entries.get(name, {})
            states[name] = {key: self.entry(mine.get(key), value, rank) for key, value in entry.items()}
        merged = []
        numbers: dict[str, int] = {}
        for index, group in enumerate(everyone[0][1]):
            names = sorted({name for _, theirs in everyone for name in theirs[index][_NAMES]}, key=order.__getitem__)
            for name in names:
                numbers.setdefault(name, len(numbers))
            merged.append({**group, _NAMES: names, "params": [numbers[name] for name in names]})
        rest = {key: self.gather(value, ()) for key, value in own.items() if key not in ("state", "param_groups")}
        return {"state": {numbers[name]: one for name, one in states.items()}, "param_groups": merged, **rest}


def arrange_shards(runner: PipelineRunner, tree: T, mesh: DeviceMesh | None, *, keep: bool) -> T:
    """Return a checkpoint with the names of all stages, in the same structure on all ranks. On every rank.

    A sharded tensor stays on the ranks of the first stage that has it, and is `RemoteShards` on the others. Plain
    tensors, such as buffers and counts of steps, are sent to global rank 0, which writes them.

    Args:
        runner: Has the stages.
        tree: With `StagePart` in the states of modules and `StageOptimizer` in place of those of optimizers.
        mesh: The mesh of this stage where it has one process, whose tensors are plain; None where it has several.
        keep: Whether this rank gets the plain tensors: global rank 0. Elsewhere None stands in their place.
    """
    arranged: T = _Arranging(runner, tree, mesh, keep=keep).gather(tree, ())
    return arranged


class _Arranging(_Gathering):
    """One such arrangement: every rank of the pipeline walks through the same structure."""

    def __init__(self, runner: PipelineRunner, tree: Tree, mesh: DeviceMesh | None, *, keep: bool) -> None:
        super().__init__(runner, tree, keep=keep)
        self._mesh = mesh

    def module_state(self, tree: Mapping[str, Any], path: tuple[object, ...]) -> StateDict:
        """Return the state of a module; parameters that stages share are one tensor under several names."""
        owner_of = {name: ranks[0] for name, ranks in self.split.owners.items() if name in tree}
        own = {name: self.description(tree[name]) for name, rank in owner_of.items() if rank == self.split.rank}
        everyone = self.of_all_ranks(own)
        firsts = {name: shared.names[0] for shared in self.split.shared for name in shared.names}
        found: StateDict = {}
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

    def description(self, value: Tree) -> Tree:
        """Return shape and dtype of what its owners write."""
        if isinstance(value, Tensor) and (is_sharded(value) or (self._mesh is not None and value.numel() > 1)):
            return RemoteShards(value.shape, value.dtype)
        return super().description(value)

    def entry(self, value: Any, described: Tree, owner: int) -> Tree:
        """Return the owners' sharded tensor, and on other ranks what stands for it."""
        if isinstance(described, RemoteShards) and self.split.rank == owner:
            return value if is_sharded(value) else self._of_one_process(value)
        return super().entry(value, described, owner)

    def _of_one_process(self, value: Tensor) -> DTensor:
        assert self._mesh is not None
        return DTensor.from_local(value.detach(), self._mesh, [Replicate()], run_check=False)


def _entries(own: Mapping[str, Any]) -> dict[str, StateDict]:
    """Return the entries of an optimizer's state by the names of parameters."""
    names = {n: name for group in own["param_groups"] for name, n in zip(group[_NAMES], group["params"], strict=True)}
    return {names[number]: entry for number, entry in own["state"].items()}


def _names_of(split: StageSplit) -> dict[int, str]:
    """Return the names of this rank's parameters by id: of shared ones the first name in the unsplit module."""
    first = {name: shared.names[0] for shared in split.shared for name in shared.names}
    return {id(one): first.get(name, name) for name, one in split.module.named_parameters()}


def _as(tree: Any, kept: dict[object, Any]) -> Any:
    changed = copy.copy(tree)
    changed.clear()
    changed.update(kept)
    return changed
