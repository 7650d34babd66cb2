"""The state of a pipeline in Loopwright's layout: full float32 tensors of all pipeline stages, by the names of layers.

A PipelineModule numbers its layers through all stages. So a name means the same layer with any number of stages, and is
that of the same layer in a `torch.nn.Sequential`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....errors import CheckpointError, ModuleError
from ..engine import EngineOptimizer
from ..state import Pending, check_groups, entry_of, local_fragment, needs_gathering, state_entry
from .engine import PipelineRoot

if TYPE_CHECKING:
    from ..engine_types import State

__all__ = ["Layout", "describe", "full_state", "full_steps", "group_names", "learn_groups", "learn_names",
           "local_state", "local_steps"]  # fmt: skip

# Any in this file: entries of states, of the user's modules and optimizers.

Description = tuple[int, dict[str, tuple[tuple[int, ...], torch.dtype] | None], int]
"""Number of a pipeline stage, shape and dtype of the tensors of its state, and number of trained parameters."""


@dataclass
class Layout:
    """Names and shapes of all pipeline stages; equal on all ranks.

    Attributes:
        shapes: Name -> shape and dtype of a tensor of the state, in the order of one process; None: not a tensor.
        owners: Name -> the first pipeline stage that has it.
        groups: Names of the parameters in each group of the optimizer; empty before there is one.
    """

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype] | None]
    owners: dict[str, int]
    groups: list[list[str]] = field(default_factory=list)

    @property
    def numbers(self) -> dict[str, int]:
        """Name of a parameter -> its number in the optimizer's state."""
        return {name: number for number, name in enumerate(name for group in self.groups for name in group)}


# Dtypes in which tensors are summed over ranks, where not in their own.
_SUMMED = {torch.bool: torch.uint8, torch.bfloat16: torch.float32, torch.float16: torch.float32}


class StagePart(Pending):
    """Placeholder of a tensor of one pipeline stage, until `gather` brings it to rank 0.

    Attributes:
        name: Name in the module's state.
    """

    root: PipelineRoot

    def __init__(self, root: PipelineRoot, name: str, value: Any = None, key: str | None = None) -> None:
        super().__init__(root, value, key)
        self.name = name

    @property
    def label(self) -> tuple[object, ...]:
        """A value that is equal for the same tensor."""
        return (id(self.root), self.name, self.key)

    @property
    def shape(self) -> torch.Size:
        """The shape of the full tensor."""
        known = self.root.layout.shapes[self.name]
        return torch.Size(known[0] if known is not None else ())

    def full(self) -> Any:
        """Return the full tensor, or the stage's value of another kind. On every rank: it communicates."""
        root, value = self.root, self.parameter
        known = root.layout.shapes[self.name]
        is_owner = root.grid.get_stage_id() == root.layout.owners[self.name] and value is not None
        is_first = root.grid.get_data_parallel_rank() == 0
        if known is None:
            found = _of_all_ranks(value if is_owner and is_first else None)
            return next((one for one in found if one is not None), None)
        shape, dtype = known
        buffer = torch.zeros(shape, dtype=_SUMMED.get(dtype, dtype), device=root.pipe_device)
        if is_owner and (self.key is not None or (root.has_engine and needs_gathering(root, value))):
            if root.stage or is_first:  # in stage 0 replicas have the same
                self.fill(buffer, local_fragment(root, value))
        elif is_owner and is_first:
            buffer.copy_(value.detach())
        dist.all_reduce(buffer)
        return buffer.bool() if dtype is torch.bool else buffer


class StageSteps(Pending):
    """Placeholder of an optimizer's state by numbers, until `gather`: each pipeline stage knows its own keys only.

    Attributes:
        entries: Name of a parameter of this stage -> its state, with `StagePart` for tensors of its length.
    """

    root: PipelineRoot

    def __init__(self, root: PipelineRoot, entries: Mapping[str, State]) -> None:
        super().__init__(root, None)
        self.entries = entries

    @property
    def label(self) -> tuple[object, ...]:
        """A value that is equal for the same state."""
        return (id(self.root), id(self.entries))

    def full(self) -> dict[int, State]:
        """Return the state of all pipeline stages, complete on rank 0. On every rank: it communicates."""
        known: dict[str, State] = {}
        for theirs in reversed(_of_all_ranks({
            name: {key: None if isinstance(value, StagePart) else _on_host(value) for key, value in entry.items()}
            for name, entry in self.entries.items()
        })):  # fmt: skip
            known.update(theirs)  # the first rank's counts
        result: dict[int, State] = {}
        is_first = dist.get_rank() == 0
        for name, number in self.root.layout.numbers.items():
            if name not in known:
                continue
            entry = result[number] = dict(known[name])
            for key in [key for key, value in entry.items() if value is None]:
                own = self.entries.get(name, {}).get(key)
                full = (own if own is not None else StagePart(self.root, name, None, key)).full()
                entry[key] = full.cpu() if is_first else None
        return result


def _of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


# --- names -----------------------------------------------------------------------------------------------------------


def describe(root: PipelineRoot) -> Description:
    """Return what this rank's pipeline stage has."""
    names = {
        name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
        for name, value in root.module.state_dict().items()
    }
    return root.grid.get_stage_id(), names, len(root.trained)


def learn_names(root: PipelineRoot, descriptions: Sequence[Description]) -> Layout:
    """Return the layout of a module, from the descriptions of all ranks.

    Raises:
        ModuleError: Replicas of a stage differ, or a stage has no parameter to train.
    """
    of_stage: dict[int, Description] = {}
    for rank, described in enumerate(descriptions):
        if of_stage.setdefault(described[0], described) != described:
            raise ModuleError(
                f"Expected the same layers in stage {described[0]} of all replicas, got different layers on rank "
                f"{rank}.",
                fix="build the PipelineModule from the same configuration on all ranks.",
            )
    stages = [of_stage[stage] for stage in sorted(of_stage)]
    empty = [stage for stage, _, num_trained in stages if not num_trained]
    if empty:
        raise ModuleError(
            f"Expected trained parameters in each stage of the PipelineModule, got none in stages {empty}.",
            fix="use fewer stages, or another partition_method.",
        )
    before: list[str] = []
    after: list[str] = []
    shared: list[str] = []
    layers: list[str] = []
    layout = Layout({}, {})
    for stage, names, _ in stages:
        for name in names:
            if name in layout.owners:
                continue
            layout.owners[name] = stage
            if name.startswith(f"{root.prefix}tied_modules."):
                shared.append(name)
            elif name.startswith(root.prefix):
                layers.append(name)
            else:
                (after if layers or shared else before).append(name)
    for name in [*before, *shared, *layers, *after]:
        layout.shapes[name] = of_stage[layout.owners[name]][1][name]
    return layout


def group_names(root: PipelineRoot, groups: Sequence[Sequence[nn.Parameter]]) -> list[list[str]]:
    """Return the names of the parameters in the groups of this stage's optimizer."""
    names = {id(one): name for name, one in reversed(list(root.module.named_parameters(remove_duplicate=False)))}
    return [[names[id(one)] for one in group] for group in groups]


def learn_groups(layout: Layout, everyone: Sequence[Sequence[Sequence[str]]]) -> None:
    """Merge the groups of all stages' optimizers, from the `group_names` of all ranks.

    Raises:
        ModuleError: They differ in number, or a stage has nothing of a group.
    """
    counts = sorted({len(groups) for groups in everyone})
    if len(counts) > 1 or any(not group for groups in everyone for group in groups):
        lines = "".join(f"\n  rank {rank}: {[len(group) for group in groups]}" for rank, groups in enumerate(everyone))
        raise ModuleError(
            f"Expected parameters of each parameter group in each pipeline stage, got groups of these sizes:{lines}",
            fix="use one group, or partition the layers so that every stage has parameters of every group.",
        )
    order = {name: place for place, name in enumerate(layout.shapes)}
    layout.groups = [
        sorted({name for groups in everyone for name in groups[number]}, key=lambda name: order[name])
        for number in range(counts[0])
    ]


# --- saving and loading ----------------------------------------------------------------------------------------------


def full_state(root: PipelineRoot, state: Mapping[str, Any]) -> State:
    """Return the state of all pipeline stages, with `StagePart` for each tensor of the pipeline.

    Args:
        root: The root of the module.
        state: What the module's own `state_dict` returns.
    """
    parameters = dict(root.module.named_parameters(remove_duplicate=False))
    return {
        name: StagePart(root, name, parameters.get(name, state.get(name)))
        if name.startswith(root.prefix)
        else state[name]
        for name in root.layout.shapes
    }


def local_state(root: PipelineRoot, state: Mapping[str, object], *, strict: bool) -> State:
    """Return this pipeline stage's part of a state of all stages.

    Raises:
        CheckpointError: Names are missing or unexpected, of any stage; on every rank.
    """
    known = root.layout.shapes
    missing = [name for name in known if name not in state]
    unexpected = [name for name in state if name not in known]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"Expected a checkpoint that matches the PipelineModule, got missing names {missing} and unexpected names "
            f"{unexpected}.",
            fix="build the PipelineModule with the layers that it was saved with.",
        )
    return {name: state[name] for name in root.module.state_dict() if name in state}


def full_steps(optimizer: EngineOptimizer) -> State:
    """Return an optimizer's state over all pipeline stages in torch's layout."""
    root, inner = cast(PipelineRoot, optimizer.root), optimizer.optimizer
    numbers = root.layout.numbers
    groups = [
        {**group, "params": [numbers[name] for name in names]}
        for names, group in zip(root.layout.groups, inner.param_groups, strict=True)
    ]
    entries: dict[str, State] = {}
    for names, members in zip(group_names(root, optimizer.groups), optimizer.groups, strict=True):
        for name, one in zip(names, members, strict=True):
            entry = state_entry(root, inner, one)
            if entry:
                entries[name] = {
                    key: StagePart(root, name, one, key) if isinstance(value, Pending) else value
                    for key, value in entry.items()
                }
    return {"state": StageSteps(root, entries), "param_groups": groups}


def local_steps(optimizer: EngineOptimizer, state: Mapping[str, Any]) -> State:
    """Return this pipeline stage's part of an optimizer's state over all stages, by this stage's own numbers.

    Raises:
        CheckpointError: Groups differ in number or size; on every rank.
    """
    root = cast(PipelineRoot, optimizer.root)
    saved = state["param_groups"]
    check_groups(optimizer.optimizer, saved, [len(names) for names in root.layout.groups])
    of_name = {
        name: number
        for names, group in zip(root.layout.groups, saved, strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }
    entries: dict[int, State] = {}
    groups = []
    count = 0
    for names, group in zip(group_names(root, optimizer.groups), saved, strict=True):
        groups.append({**group, "params": list(range(count, count + len(names)))})
        for number, name in enumerate(names, count):
            entry = entry_of(state, of_name[name])
            if entry:
                entries[number] = entry
        count += len(names)
    return {"state": entries, "param_groups": groups}
