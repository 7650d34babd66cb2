"""Batches as trees of tensors: moving them to a device, mapping over them, finding their size; on the hot path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..protocols import AnyBatch, Batch, Tree
from ..tree import map_tree

__all__ = [
    "apply_to_collection",
    "find_batch_size",
    "find_leaves",
    "find_opaque",
    "find_tensors",
    "map_tree",
    "move_to_device",
    "mover_to",
]

P = ParamSpec("P")


def move_to_device(batch: Batch, device: torch.device, non_blocking: bool | None = None) -> AnyBatch:
    """Return the batch with every tensor in it on the device.

    It descends into lists, tuples, named tuples, mappings and dataclasses, and calls the `.to` method of any other
    object (if it returns None, the object has moved in place). Tensors that are on the device already, and unchanged
    lists, tuples and dicts, are returned without a copy.

    Args:
        batch: A tensor, or any nesting of these containers.
        device: The target device.
        non_blocking: Whether copies may overlap with the host's work; None is True for CUDA devices. Only copies from
            pinned memory overlap.

    An error of an object's `.to` method is raised again, with a note on the object's place in the batch.
    """
    if type(batch) is Tensor:
        if batch.device == device:
            return batch
        return batch.to(device, non_blocking=device.type == "cuda" if non_blocking is None else non_blocking)
    if type(batch) is list or type(batch) is tuple:
        for item in batch:
            if type(item) is not Tensor or item.device != device:
                return _move_tree(batch, device, device.type == "cuda" if non_blocking is None else non_blocking)
        return batch
    if type(batch) is dict:
        for item in batch.values():
            if type(item) is not Tensor or item.device != device:
                return _move_tree(batch, device, device.type == "cuda" if non_blocking is None else non_blocking)
        return batch
    return _move_tree(batch, device, device.type == "cuda" if non_blocking is None else non_blocking)


def mover_to(device: torch.device) -> Callable[..., AnyBatch]:
    """Return `move_to_device` for this device, as a function that ignores further arguments; for use in each step."""
    if device.type != "cpu":
        return lambda batch, *_: move_to_device(batch, device)

    def move_to_cpu(batch: Batch, *_: object) -> AnyBatch:
        # The most frequent batches, without a further call; and devices take longer to compare.
        if type(batch) is Tensor and batch.is_cpu:
            return batch
        if type(batch) is tuple or type(batch) is list:
            for item in batch:
                if type(item) is not Tensor or not item.is_cpu:
                    return move_to_device(batch, device)
            return batch
        return move_to_device(batch, device)

    return move_to_cpu


def _move_tree(batch: Batch, device: torch.device, non_blocking: bool) -> Batch:
    def move(leaf: AnyBatch) -> AnyBatch:
        if isinstance(leaf, Tensor):
            return leaf if leaf.device == device else leaf.to(device, non_blocking=non_blocking)
        try:
            moved = leaf.to(device)
        except Exception as error:
            place = _find_path(batch, leaf) or ""
            error.add_note(f"while moving batch{place}, a {type(leaf).__name__}, to {device} by its own method `to`")
            raise
        return leaf if moved is None else moved

    return map_tree(batch, _can_move, move)


def _find_path(data: Tree, wanted: Tree) -> str | None:
    """Return where in the batch the object is, as one would write it; None if it is not there."""
    if data is wanted:
        return ""
    parts: list[tuple[str, Tree]] = []
    if isinstance(data, (list, tuple)):
        names = getattr(data, "_fields", None)
        parts = [(f".{names[i]}" if names else f"[{i}]", item) for i, item in enumerate(data)]
    elif isinstance(data, Mapping):
        parts = [(f"[{key!r}]", value) for key, value in data.items()]
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        parts = [(f".{field.name}", getattr(data, field.name, None)) for field in dataclasses.fields(data)]
    for step, part in parts:
        rest = _find_path(part, wanted)
        if rest is not None:
            return step + rest
    return None


def _can_move(leaf: Tree) -> bool:
    return isinstance(leaf, Tensor) or (hasattr(leaf, "to") and not isinstance(leaf, type))


def apply_to_collection(
    data: Tree,
    dtype: type | tuple[type, ...],
    function: Callable[Concatenate[AnyBatch, P], Tree],
    *args: P.args,
    **kwargs: P.kwargs,
) -> AnyBatch:
    """Return `data` with `function` applied to every element of the given type, at any depth.

    It descends into lists, tuples, named tuples, mappings (whose type is kept) and dataclasses. Unchanged containers
    are returned without a copy.

    Args:
        data: Any nesting of containers.
        dtype: The type or types of the elements to replace; a container of that type is replaced entirely.
        function: Called as `function(element, *args, **kwargs)`.
        args: Further positional arguments of `function`.
        kwargs: Further keyword arguments of `function`.
    """
    return map_tree(data, lambda leaf: isinstance(leaf, dtype), lambda leaf: function(leaf, *args, **kwargs))


def find_batch_size(batch: Batch) -> int | None:
    """Return the number of samples in a batch; None if it cannot be determined with certainty.

    It is the common size of dimension 0 of all tensors with at least one dimension. Strings, numbers and tensors
    without dimensions are ignored. A packed sequence counts with its number of sequences.

    Args:
        batch: A tensor or any nesting of lists, tuples, mappings and dataclasses.
    """
    if type(batch) is Tensor:
        return batch.size(0) if batch.ndim else None  # a nested tensor has no shape
    if type(batch) is tuple or type(batch) is list:
        size = None
        for item in batch:
            if type(item) is not Tensor:
                return _common_size(batch)
            if item.ndim:
                # `size(0)` takes four times as long as the shape, which a nested tensor does not have.
                found = item.size(0) if item.is_nested else item.shape[0]
                if size is None:
                    size = found
                elif size != found:
                    return None
        return size
    return _common_size(batch)


def _common_size(batch: Batch) -> int | None:
    sizes = set()
    for leaf in find_leaves(batch):
        if isinstance(leaf, PackedSequence):
            sizes.add(int(leaf.batch_sizes[0]))  # which are on the host always
        elif isinstance(leaf, Tensor) and leaf.ndim:
            sizes.add(leaf.size(0))
        if len(sizes) > 1:
            return None
    return sizes.pop() if sizes else None


def find_tensors(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors in a batch, including tensors of packed sequences."""
    for leaf in find_leaves(batch):
        if isinstance(leaf, PackedSequence):
            yield from (part for part in leaf if part is not None)
        elif isinstance(leaf, Tensor):
            yield leaf


def find_opaque(data: Tree) -> bool:
    """Return whether a batch holds objects that move themselves, whose tensors are unknown.

    Mappings do not count (such as what tokenizers return): their tensors are their values.
    """
    if isinstance(data, (Tensor, PackedSequence)):
        return False
    if isinstance(data, Mapping):
        return any(find_opaque(item) for item in data.values())
    if _can_move(data):
        return True
    if isinstance(data, (list, tuple)):
        return any(find_opaque(item) for item in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return any(find_opaque(getattr(data, field.name, None)) for field in dataclasses.fields(data))
    return False


def find_leaves(data: Tree) -> Iterator[Tree]:
    """Yield what is in the containers of a batch, as `move_to_device` goes through them."""
    if isinstance(data, (Tensor, PackedSequence)):
        yield data
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from find_leaves(item)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from find_leaves(item)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            yield from find_leaves(getattr(data, field.name, None))
    else:
        yield data
