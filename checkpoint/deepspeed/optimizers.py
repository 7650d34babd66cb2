"""Optimizer state in a folder of DeepSpeed, converted to torch's layout: by numbers, with names beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...protocols import StateDict
from ..to_plain import to_plain
from .partitions import Flat, MergedTensor, Misfit, PartitionLayout

# Any in this file: what DeepSpeed and its users have put into the files.


@dataclass(slots=True)
class RankSteps:
    """The masters and the optimizer state of one rank.

    Attributes:
        masters: A tensor for each group, or in stage 3 for each subgroup.
        states: The optimizer's state by number of group or subgroup.
        groups: Its parameter groups; `params` has numbers of groups or subgroups.
        paddings: Padding after each parameter of each group; None if it is not saved.
        num_ranks: Number of ranks that saved; for each group, if they differ.
    """

    masters: list[Tensor]
    states: dict[int, StateDict]
    groups: list[StateDict]
    paddings: Any
    num_ranks: set[int]


def steps_of_rank(content: StateDict) -> RankSteps:
    """Return the content of one rank's file of optimizer states."""
    saved = content["optimizer_state_dict"]
    if "fp32_flat_groups" in saved:
        inner, masters = saved["optimizer_state_dict"], saved["fp32_flat_groups"]
    else:
        inner, masters = saved["base_optimizer_state"], saved["single_partition_of_fp32_groups"]
    # A list comes from `elastic_checkpoint`, which does not save the parameter groups.
    states, groups = (inner["state"], inner["param_groups"]) if isinstance(inner, dict) else ({}, [])
    count = saved.get("partition_count")
    counts = {int(one) for one in count} if isinstance(count, list | tuple) else {int(count)} if count else set()
    return RankSteps(list(masters), states, groups, saved.get("param_alignment_paddings"), counts)


def flats_of(ranks: Sequence[RankSteps], is_partitioned: bool, part: Callable[[RankSteps, int], Tensor]) -> list[Flat]:
    """Return the flat tensors: of each rank in stage 3, of each group in stages 1 and 2."""
    groups = range(len(ranks[0].masters))
    if is_partitioned:
        return [Flat([part(rank, group) for group in groups]) for rank in ranks]
    return [Flat([part(rank, group) for rank in ranks]) for group in groups]


def merged_steps(
    ranks: Sequence[RankSteps], layouts: Mapping[str, PartitionLayout], *, is_partitioned: bool
) -> StateDict | None:
    """Return the optimizer's state in torch's layout."""
    first = ranks[0]
    if not first.groups:
        return None

    def is_flat(value: object, group: int) -> bool:
        return isinstance(value, Tensor) and value.ndim == 1 and value.numel() >= first.masters[group].numel()

    keys = {key for group, entry in first.states.items() for key, value in entry.items() if is_flat(value, group)}
    flats = {}
    for key in sorted(keys):

        def part(rank: RankSteps, group: int, key: str = key) -> Tensor:
            size = rank.masters[group].numel()
            value = rank.states.get(group, {}).get(key)
            # Zeros for a group without such state, which are not read.
            return value.narrow(0, 0, size) if isinstance(value, Tensor) else torch.zeros(1).expand(size)

        flats[key] = flats_of(ranks, is_partitioned, part)
    by_group: dict[int, list[str]] = {}
    for name, layout in layouts.items():
        by_group.setdefault(layout.group, []).append(name)
    names = names_of_groups(first.groups, [by_group.get(group, []) for group in range(len(first.masters))])
    steps: dict[int, Any] = {}
    for group in first.groups:
        steps.update(dict.fromkeys(group.get("params", ()), group.get("step")))
    states: dict[str, StateDict] = {}
    for name, layout in layouts.items():
        saved = first.states.get(layout.group)
        if not saved:
            continue
        entry = {
            key: layout.merged(f"{name} ({key})", flats[key], value.dtype) if is_flat(value, layout.group) else value
            for key, value in saved.items()
        }
        if "step" not in entry and steps.get(layout.group) is not None:  # FusedAdam counts in its groups
            entry["step"] = steps[layout.group]
        states[name] = entry
    return numbered(first.groups, names, states)


def names_of_groups(groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the parameters of each of the user's groups; in stage 3 a group may have several subgroups."""
    if len(groups) == len(members) and all(len(group.get("params", ())) == 1 for group in groups):
        return [list(names) for names in members]
    return [[name for number in group["params"] for name in members[number]] for group in groups]


def numbered(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], states: Mapping[str, Mapping[str, object]]
) -> StateDict:
    """Return a state in torch's layout, with names beside the numbers as torch's own optimizers have them."""
    numbers: dict[str, int] = {}
    result = []
    for group, members in zip(groups, names, strict=True):
        own = {key: value for key, value in group.items() if key not in ("params", "step")}
        own, _ = to_plain(own)
        own["params"] = [numbers.setdefault(name, len(numbers)) for name in members]
        own["param_names"] = list(members)
        result.append(own)
    state = {}
    for name, number in numbers.items():
        if states.get(name):
            # torch counts steps in place: each parameter needs its own tensor.
            state[number] = {key: value.clone() if isinstance(value, Tensor) and value.ndim == 0 else value
                             for key, value in states[name].items()}  # fmt: skip
    return {"state": state, "param_groups": result}


def without_zero(model: Mapping[str, Any]) -> tuple[StateDict, StateDict | None]:
    """Return masters and optimizer state of stage 0, in which masters are identified by their values."""
    optimizer = model.get("optimizer")
    if not isinstance(optimizer, dict):
        return {}, None
    inner = optimizer.get("optimizer_state_dict", optimizer)
    if not isinstance(inner, dict) or "param_groups" not in inner:
        return {}, None
    masters = optimizer.get("fp32_groups_flat") or [
        Flat([one.detach() for one in group]) for group in optimizer.get("fp32_groups") or []
    ]
    if not masters:
        plain, _ = to_plain(inner["param_groups"])
        return {}, {"state": inner["state"], "param_groups": plain}
    flats = [one if isinstance(one, Flat) else Flat([one]) for one in masters]
    saved = model["module"]
    left = {name: value for name, value in saved.items() if name not in set(model.get("buffer_names") or ())}
    weights: StateDict = {}
    names: list[list[str]] = []
    for group, flat in enumerate(flats):
        names.append([])
        at = 0
        while at < flat.size:
            found = _first_equal(left, flat, at)
            if found is None:
                raise Misfit(f"the masters of group {group} match no parameter from element {at} on")
            value = left[found]
            weights[found] = MergedTensor(found, value.shape, flat.pieces(at, value.numel()), torch.float32)
            names[-1].append(found)
            for name in [name for name, other in left.items() if other.data_ptr() == value.data_ptr()]:
                del left[name]
                weights[name] = weights[found]  # tied
            at += value.numel()
    groups, state = inner["param_groups"], inner["state"]
    if all(len(group["params"]) == len(members) for group, members in zip(groups, names, strict=True)):
        kept = {
            name: state.get(number)
            for group, members in zip(groups, names, strict=True)
            for number, name in zip(group["params"], members, strict=True)
        }
        return weights, numbered(groups, names, {name: entry for name, entry in kept.items() if entry})
    # FusedAdam steps one flat tensor for each group.
    states: dict[str, StateDict] = {}
    for group, (number, members) in enumerate(zip([one["params"][0] for one in groups], names, strict=True)):
        entry, at = state.get(number, {}), 0
        for name in members:
            shape, size = weights[name].shape, weights[name].shape.numel()
            states[name] = {
                key: MergedTensor(f"{name} ({key})", shape, Flat([value]).pieces(at, size), value.dtype)
                if isinstance(value, Tensor) and value.numel() >= flats[group].size and value.ndim
                else value
                for key, value in entry.items()
            }
            if "step" not in states[name] and "step" in groups[group]:
                states[name]["step"] = groups[group]["step"]
            at += size
    return weights, numbered(groups, names, states)


def _first_equal(left: Mapping[str, Tensor], flat: Flat, at: int) -> str | None:
    """Return the first parameter whose 16-bit values are the rounded masters at an offset."""
    for name, value in left.items():
        pieces = flat.pieces(at, value.numel())
        if sum(piece.numel() for piece in pieces) != value.numel() or not value.numel():
            continue
        master = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if torch.equal(master.to(value.dtype), value.reshape(-1)):
            return name
    return None
