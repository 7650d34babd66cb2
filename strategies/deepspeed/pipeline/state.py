"""The state of a pipeline in Loopwright's own layout: whole float32 tensors of all stages, by the names of layers.

A PipelineModule numbers its layers through all stages, so that a name says which layer is meant however many stages
there are, and is that of the same layer in a `torch.nn.Sequential`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....errors import CheckpointError, ModuleError
from ..engine import EngineOptimizer
from ..fragments import lies_in_parts, own_fragment, state_of
from ..state import Pending, state_entry
from .engine import PipelineRoot

__all__ = [
    "Layout",
    "described",
    "group_names",
    "learn_groups",
    "learn_names",
    "own_state",
    "own_steps",
    "whole_state",
    "whole_steps",
]

# Any in this file: deepspeed has no types; states are of the user's modules and optimizers.


@dataclass
class Layout:
    """What all stages have together; equal on all ranks.

    Attributes:
        shapes: Name -> shape and dtype of a tensor of the state, in the order of one process; None: no tensor.
        owners: Name -> the first stage that has it.
        groups: The names of the parameters in each group of the optimizer; none before there is one.
    """

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype] | None]
    owners: dict[str, int]
    groups: list[list[str]] = field(default_factory=list)

    @property
    def numbers(self) -> dict[str, int]:
        """Name of a parameter -> its number in the optimizer's state."""
        return {name: number for number, name in enumerate(name for group in self.groups for name in group)}


# As what tensors are added up over ranks, where not as what they are.
_SUMMED = {torch.bool: torch.uint8, torch.bfloat16: torch.float32, torch.float16: torch.float32}


class StagePart(Pending):
    """In the place of a tensor that one stage has, until `gather` brings it to rank 0.

    Attributes:
        name: In the module's state.
        value: What this rank has; None in other stages.
    """

    def __init__(self, root: PipelineRoot, name: str, value: Any = None, key: str | None = None) -> None:
        super().__init__(root, value, key)
        self.name = name
        self.value = value

    @property
    def label(self) -> tuple[Any, ...]:
        """What is equal for the same tensor."""
        return (id(self.root), self.name, self.key)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        known = self._root.layout.shapes[self.name]
        return torch.Size(known[0] if known is not None else ())

    @property
    def _root(self) -> PipelineRoot:
        assert isinstance(self.root, PipelineRoot)
        return self.root

    def whole(self) -> Any:
        """Return the whole tensor, or whatever else a stage has. On every rank: it communicates."""
        import torch.distributed as dist

        root = self._root
        known = root.layout.shapes[self.name]
        is_owner = root.grid.get_stage_id() == root.layout.owners[self.name]
        is_first = root.grid.get_data_parallel_rank() == 0
        if known is None:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, self.value if is_owner and is_first else None)
            return next((one for one in everyone if one is not None), None)
        shape, dtype = known
        buffer = torch.zeros(shape, dtype=_SUMMED.get(dtype, dtype), device=root.pipe_device)
        if is_owner and self.value is not None:
            if self.key is not None or (root.engine is not None and lies_in_parts(root, self.value)):
                fragment = own_fragment(root, self.value)
                # In stage 0 replicas have the same; else each has a part of its own.
                if fragment.flat is not None and fragment.size and (root.stage or is_first):
                    source = fragment.flat if self.key is None else state_of(root, fragment.flat)[self.key]
                    target = buffer.reshape(-1).narrow(0, fragment.start, fragment.size)
                    target.copy_(fragment.of(source.detach()))
            elif is_first:
                buffer.copy_(self.value.detach())
        dist.all_reduce(buffer)
        return buffer.bool() if known[1] is torch.bool else buffer


class StageSteps(Pending):
    """In the place of an optimizer's state by numbers, until `gather` asks all stages: each knows its own keys only.

    Attributes:
        entries: Name of a parameter of this stage -> its state, with `StagePart` for what is as long as it.
    """

    def __init__(self, root: PipelineRoot, entries: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(root, None)
        self.entries = entries

    @property
    def label(self) -> tuple[Any, ...]:
        """What is equal for the same state."""
        return (id(self.root), id(self.entries))

    def whole(self) -> dict[int, dict[str, Any]]:
        """Return the state of all stages, whole on rank 0. On every rank: it communicates."""
        import torch.distributed as dist

        root = self.root
        assert isinstance(root, PipelineRoot)
        mine = {
            name: {key: None if isinstance(value, StagePart) else _on_host(value) for key, value in entry.items()}
            for name, entry in self.entries.items()
        }
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        known: dict[str, dict[str, Any]] = {}
        for theirs in everyone:
            for name, entry in theirs.items():
                known.setdefault(name, entry)
        keep = dist.get_rank() == 0
        result: dict[int, dict[str, Any]] = {}
        for name, number in root.layout.numbers.items():
            if name not in known:
                continue
            entry = result[number] = dict(known[name])
            for key in [key for key, value in entry.items() if value is None]:
                own = self.entries.get(name, {}).get(key)
                part = own if own is not None else StagePart(root, name, None, key)
                whole = part.whole()
                entry[key] = whole.cpu() if keep else None
        return result


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


# --- what there is --------------------------------------------------------------------------------------------------


def learn_names(root: PipelineRoot, everyone: Sequence[Any]) -> Layout:
    """Return the layout of a module, of what `described` says on all ranks.

    Raises:
        ModuleError: Replicas of a stage differ, or a stage has no parameter to train.
    """
    of_stage: dict[int, Any] = {}
    for rank, (stage, names, trained) in enumerate(everyone):
        if of_stage.setdefault(stage, (names, trained)) != (names, trained):
            raise ModuleError(
                f"rank {rank} built stage {stage} from other layers than the replica before it.",
                fix="build the PipelineModule from what is equal on all ranks.",
            )
    empty = [stage for stage, (_, trained) in sorted(of_stage.items()) if not trained]
    if empty:
        raise ModuleError(
            f"stages {empty} of the PipelineModule have no parameter to train, and an engine steps each.",
            fix="use fewer stages, or another partition_method.",
        )
    prefix, tied = root.prefix, f"{root.prefix}tied_modules."
    before: list[str] = []
    after: list[str] = []
    shared: list[str] = []
    layers: list[str] = []
    shapes: dict[str, Any] = {}
    owners: dict[str, int] = {}
    for stage, (names, _) in sorted(of_stage.items()):
        for name, shape in names.items():
            if name in shapes:
                continue
            shapes[name], owners[name] = shape, stage
            if name.startswith(tied):
                shared.append(name)
            elif not prefix or name.startswith(prefix):
                layers.append(name)
            else:
                (after if layers or shared else before).append(name)
    ordered = [*before, *shared, *layers, *after]
    return Layout({name: shapes[name] for name in ordered}, owners)


def described(root: PipelineRoot) -> Any:
    """Return what this rank's stage has: its number, names with shapes and dtypes, and how many are trained."""
    state = root.module.state_dict()
    names = {
        name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None for name, value in state.items()
    }
    return root.grid.get_stage_id(), names, len(root.__dict__["_trained"])


def group_names(root: PipelineRoot, groups: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Return the names of the parameters in the groups of this stage's optimizer."""
    names = {id(one): name for name, one in reversed(list(root.module.named_parameters(remove_duplicate=False)))}
    return [[names[id(one)] for one in group] for group in groups]


def learn_groups(layout: Layout, everyone: Sequence[Sequence[Sequence[str]]]) -> None:
    """Put the groups of all stages' optimizers together, of what `group_names` says on all ranks.

    Raises:
        ModuleError: They differ in number, or a stage has nothing of a group.
    """
    counts = sorted({len(groups) for groups in everyone})
    if len(counts) > 1 or any(not group for groups in everyone for group in groups):
        lines = "".join(f"\n  rank {rank}: {[len(group) for group in groups]}" for rank, groups in enumerate(everyone))
        raise ModuleError(
            f"the optimizer has parameter groups of these sizes, and each stage needs something of each group:{lines}",
            fix="use one group; or cut the layers so that every stage has parameters of every group.",
        )
    order = {name: place for place, name in enumerate(layout.shapes)}
    layout.groups = [
        sorted({name for groups in everyone for name in groups[number]}, key=lambda name: order[name])
        for number in range(counts[0])
    ]


# --- out and in -----------------------------------------------------------------------------------------------------


def whole_state(root: PipelineRoot, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of all stages, with `StagePart` for each tensor of the pipeline.

    Args:
        root: Around the module.
        state: What the module's own `state_dict` says.
    """
    parameters = dict(root.module.named_parameters(remove_duplicate=False))
    return {
        name: StagePart(root, name, parameters.get(name, state.get(name)))
        if not root.prefix or name.startswith(root.prefix)
        else state[name]
        for name in root.layout.shapes
    }


def own_state(root: PipelineRoot, state: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return what this stage has of a state of all stages.

    Raises:
        CheckpointError: Names are missing or unexpected, of any stage; on every rank.
    """
    known = root.layout.shapes
    missing = [name for name in known if name not in state]
    unexpected = [name for name in state if name not in known]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"the checkpoint does not fit the module: it lacks {missing}, and has {unexpected} beside.",
            fix="build the PipelineModule with the layers it was saved with, or load with strict=False.",
        )
    own = root.module.state_dict()
    return {name: state[name] for name in own if name in state}


def whole_steps(optimizer: EngineOptimizer) -> dict[str, Any]:
    """Return an optimizer's state over all stages in torch's layout."""
    root, inner = optimizer.root, optimizer.optimizer
    assert isinstance(root, PipelineRoot)
    layout = root.layout
    numbers = layout.numbers
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [numbers[name] for name in names]}
        for names, group in zip(layout.groups, inner.param_groups, strict=True)
    ]
    entries: dict[str, dict[str, Any]] = {}
    for names, members in zip(group_names(root, optimizer.groups), optimizer.groups, strict=True):
        for name, one in zip(names, members, strict=True):
            entry = state_entry(root, inner, one)
            if entry:
                entries[name] = {
                    key: StagePart(root, name, one, key) if isinstance(value, Pending) else value
                    for key, value in entry.items()
                }
    return {"state": StageSteps(root, entries), "param_groups": groups}


def own_steps(optimizer: EngineOptimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this stage has of an optimizer's state over all stages, by this stage's own numbers.

    Raises:
        CheckpointError: Groups differ in number or size; on every rank.
    """
    root = optimizer.root
    assert isinstance(root, PipelineRoot)
    saved = state["param_groups"]
    sizes, wanted = [len(group["params"]) for group in saved], [len(names) for names in root.layout.groups]
    if sizes != wanted:
        raise CheckpointError(
            f"the checkpoint's state of {type(optimizer.optimizer).__name__} does not fit: it has groups of {sizes} "
            f"parameters, and the optimizer of all stages of {wanted}.",
            fix="configure the optimizer with the parameter groups it was saved with.",
        )
    of_name = {
        name: number
        for names, group in zip(root.layout.groups, saved, strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }
    entries: dict[int, Any] = {}
    groups = []
    count = 0
    for names, group in zip(group_names(root, optimizer.groups), saved, strict=True):
        own = list(range(count, count + len(names)))
        count += len(names)
        for number, name in zip(own, names, strict=True):
            theirs = of_name[name]
            entry = state["state"].get(theirs, state["state"].get(str(theirs)))
            if entry:
                entries[number] = entry
        groups.append({**group, "params": own})
    return {"state": entries, "param_groups": groups}
