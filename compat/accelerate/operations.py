"""Operations on structures of tensors, and collectives over processes, under Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...data.move import apply_to_collection, find_batch_size, find_leaves, move_to_device
from ...fabric import is_wrapped
from ...precision.base import cast_floats
from .state import machine

__all__ = ["find_batch_size"]

# Any in this file: structures of tensors, of the program's classes.


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False) -> Any:
    """Return the structure with its tensors, and objects that have `to`, on the device."""
    return move_to_device(tensor, torch.device(device), non_blocking)


def slice_tensors(data: Any, tensor_slice: slice, process_index: object = None, num_processes: object = None) -> Any:
    """Return the structure with its tensors cut along the first dimension."""
    return apply_to_collection(data, Tensor, lambda tensor: tensor[tensor_slice])


def concatenate(data: Any, dim: int = 0) -> Any:
    """Return the structures' tensors, concatenated."""
    first = data[0]
    if isinstance(first, Mapping):
        return type(first)({name: concatenate([part[name] for part in data], dim) for name in first})  # type: ignore[call-arg]
    if isinstance(first, tuple | list):
        parts = [concatenate(part, dim) for part in zip(*data, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first if len(data) == 1 else torch.cat(list(data), dim=dim)


def convert_to_fp32(tensor: Any) -> Any:
    """Return the structure with float16 and bfloat16 tensors in float32."""
    return cast_floats(tensor, torch.float32)


def extract_model_from_parallel(model: Any, keep_fp32_wrapper: bool = True, *args: object, **kwargs: object) -> Any:
    """Return the user's model out of the prepared one."""
    return model.module if isinstance(model, nn.Module) and is_wrapped(model) else model


# -- collectives: called on all processes ------------------------------------------------------------------------------


def are_tensors(data: Any) -> bool:
    """Return whether a structure holds nothing but tensors."""
    return all(isinstance(leaf, Tensor) for leaf in find_leaves(data))


def _on_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    if not are_tensors(data):
        raise TypeError(f"Expected nested lists, tuples and dicts of tensors, got others in {data!r:.200}.")
    return apply_to_collection(data, Tensor, function)


def gather(tensor: Any) -> Any:
    """Return the tensors of all processes, concatenated along the first dimension; shape () becomes (processes,)."""
    fabric = machine()
    if fabric.world_size == 1:
        return tensor
    parts = apply_to_collection(tensor, Tensor, lambda one: one.clone()[None] if one.ndim == 0 else one.contiguous())
    return _on_tensors(lambda one: fabric.all_gather(one).flatten(0, 1), parts)


def gather_object(object: Any) -> Any:
    """Return the elements of the lists of all processes; with one process the object itself."""
    fabric = machine()
    parts = [object] if fabric.world_size == 1 else fabric.strategy.gather_objects(object)
    return object if len(parts) == 1 else [element for part in parts for element in part]


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the sum, mean or maximum over processes; a copy of the tensors with one process.

    Args:
        tensor: A structure of tensors, of the same shapes on all processes.
        reduction: "mean" or "max"; anything else is the sum, "none" too, as in Accelerate 1.15.
        scale: Accepted for compatibility; it has an effect on TPUs only.
    """
    fabric = machine()
    tensor = _on_tensors(torch.clone, tensor)
    if fabric.world_size == 1:
        return tensor
    total = fabric.all_reduce(tensor, reduce_op="max" if reduction == "max" else "sum")
    return _on_tensors(lambda one: one / fabric.world_size, total) if reduction == "mean" else total


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Copy the tensors of one process to all, in place."""
    fabric = machine()
    return _on_tensors(lambda one: one.copy_(fabric.broadcast(one, from_process)), tensor)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Copy the elements of one process's list to all, in place."""
    object_list[:] = machine().broadcast(list(object_list), from_process)
    return object_list


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False) -> Any:
    """Return the tensors, extended in one dimension to the largest size of all processes.

    Args:
        tensor: A structure of tensors.
        dim: The dimension; tensors that lack it stay.
        pad_index: The value of new elements.
        pad_first: Whether they come before the others.
    """

    def pad(part: Tensor) -> Tensor:
        if not -part.ndim <= dim < part.ndim:
            return part
        missing = max(gather_object([part.shape[dim]])) - part.shape[dim]
        if missing == 0:
            return part
        shape = list(part.shape)
        shape[dim] = missing
        more = part.new_zeros(shape) + pad_index
        return torch.cat([more, part] if pad_first else [part, more], dim=dim)

    return _on_tensors(pad, tensor)
