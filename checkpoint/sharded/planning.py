"""The plan of a sharded save: DCP's plan with errors explained, and names of tied tensors."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError
from ...protocols import StateDict
from .tree import PLACEHOLDER_KEY, Split, put_back


class Planner(DefaultSavePlanner):
    """DCP's planner, which explains when the ranks do not fit together.

    Args:
        split: The checkpoint of this rank.
        is_part: Whether these ranks hold a part of the tensors only.
    """

    def __init__(self, split: Split, *, is_part: bool = False) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._known = {*split.tensors, *split.remote}
        names = first_names(split)
        self._awaited = set() if is_part else {path for path in split.remote if names[path] == path}
        self._is_part = is_part

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan for all ranks; called on rank 0."""
        paths = [(rank, path_of(item)) for rank, plan in enumerate(all_plans) for item in plan.items]
        others = [f"{path} (rank {rank})" for rank, path in paths if path not in self._known]
        fix = "save the same structure, sharded over the same mesh, on every rank of the group."
        if others:  # no placeholder would lead to them
            named = ", ".join(others[:5])
            raise CheckpointError(f"the ranks have different sharded tensors; rank 0 lacks {named}.", fix=fix)
        if missing := self._awaited.difference(path for _, path in paths):
            named = ", ".join(sorted(missing)[:5])
            raise CheckpointError(f"the ranks have different sharded tensors; no rank has {named}.", fix=fix)
        if self._is_part:  # as torch's planner does, which then requires full tensors
            return create_default_global_save_plan(self._dedup_save_plans(all_plans))[0], Metadata({})
        try:
            plans, _ = super().create_global_plan(all_plans)
        except ValueError as error:
            raise CheckpointError(f"the shards of the ranks do not make up full tensors: {error}.", fix=fix) from error
        # torch sends the metadata to all ranks, a line for each chunk of every rank; the manifest has them already.
        return plans, Metadata({})


def unfit(tensor: DTensor) -> str | None:
    """Return why a sharded tensor cannot be saved."""
    if any(placement.is_partial() for placement in tensor.placements):
        return f"its placements are {tensor.placements}: each rank holds a summand, and none the value"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"it is a {tensor.layout} tensor of {tensor.dtype}, and only dense ones can be sharded"
    return None


def first_names(split: Split) -> dict[str, str]:
    """Return for each path the path that its tensor is saved under: tied tensors share their memory, and are one.

    Decided by rank 0 alone: other ranks cannot distinguish tensors without local elements.
    """
    first: dict[object, str] = {}
    names = {}
    for path, tensor in split.tensors.items():
        local = tensor.to_local()
        memory: object = id(tensor)
        if local.numel():
            view = (
                local.untyped_storage().data_ptr(),
                local.storage_offset(),
                local.shape,
                local.stride(),
                local.dtype,
            )
            memory = (*view, tensor.shape, tensor.placements, tensor.device_mesh)
        names[path] = first.setdefault(memory, path)
    names.update({path: first.setdefault(id(remote), path) for path, remote in split.remote.items()})
    return names


def with_first_names(split: Split) -> StateDict:
    """Return the state with every placeholder naming the path that its tensor is saved under."""
    placeholders = {path: {PLACEHOLDER_KEY: name} for path, name in first_names(split).items()}
    return put_back(split.rest, placeholders, set(), [])


def path_of(item: WriteItem) -> str:
    """Return the path of the tensor that an item is a part of."""
    return str(item.index.fqn)
