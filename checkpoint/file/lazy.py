"""Tensors of a checkpoint that have not been read yet, and ways through the trees that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["flatten", "is_tensor", "map_tensors", "read_tensor", "size_bytes", "tensors_in"]


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, read or not (`protocols.StoredTensor`)."""
    # Asked of the class: an `Untrusted` object answers every question of its own with an error.
    return isinstance(value, Tensor) or hasattr(type(value), "read")


def read_tensor(value: Any) -> Tensor:  # Any: Tensor or StoredTensor
    """Return a tensor of a tree as a dense CPU tensor, read if it was not."""
    tensor: Tensor = value.detach() if isinstance(value, Tensor) else value.read()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.resolve_conj().resolve_neg().cpu()


def size_bytes(value: Any) -> int:  # Any: Tensor or StoredTensor
    """Return the bytes of a tensor's elements."""
    return int(value.shape.numel()) * int(value.dtype.itemsize)


def flatten(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:  # Any: a nested checkpoint
    """Yield path and value of every leaf, in order: `state_dict/layer.weight`, `optimizer_states/0/state/1/step`.

    An empty dict, list, tuple or set is a leaf; so is a set of values.
    """
    if isinstance(tree, dict) and tree:
        entries: Any = tree.items()  # Any: keys of a dict or positions of a list
    elif isinstance(tree, list | tuple) and tree and not isinstance(tree, torch.Size):
        entries = enumerate(tree)
    else:
        yield where, tree
        return
    for key, value in entries:
        yield from flatten(value, f"{where}/{key}" if where else str(key))


def tensors_in(tree: Any) -> Iterator[tuple[str, Any]]:  # Any: see flatten
    """Yield path and value of every tensor, read or not."""
    return ((path, value) for path, value in flatten(tree) if is_tensor(value))


def map_tensors(tree: Any, change: Callable[[Any, str], Any], where: str = "checkpoint") -> Any:  # Any: see flatten
    """Return a copy of a tree with each tensor replaced by `change(tensor, path)`; other leaves are the same objects.

    Paths read `checkpoint['state_dict']['layer.weight']`, as names.read_storages writes them.
    """
    if is_tensor(tree):
        return change(tree, where)
    if isinstance(tree, dict):
        items = [(key, map_tensors(value, change, f"{where}[{key!r}]")) for key, value in tree.items()]
        copied = type(tree)(items)
        if hasattr(tree, "__dict__"):  # state_dict()._metadata
            copied.__dict__.update(tree.__dict__)
        return copied
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)(map_tensors(value, change, f"{where}[{index}]") for index, value in enumerate(tree))
    return tree
