"""`StoredTensor`: a tensor of a checkpoint that has not been read yet; and walks over trees that hold tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeGuard, overload

import torch
from torch import Tensor

from ..protocols import StateDict, Tree

Offsets: TypeAlias = Sequence[int]
Key: TypeAlias = str | int  # of a dict, or a position in a list


class StoredTensor(ABC):
    """A tensor of a checkpoint that has not been read yet. Each format has a subclass that defines `_read`.

    Attributes:
        path: Path in the checkpoint, such as "state_dict/layer.weight".
        shape: Shape of the full tensor.
        dtype: Dtype of its elements.
    """

    def __init__(self, path: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.path = path
        self.shape = torch.Size(shape)
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"<StoredTensor {self.path}: shape {tuple(self.shape)}, {self.dtype}, not read>"

    def read(self, offsets: Offsets | None = None, sizes: Offsets | None = None) -> Tensor:
        """Return a slice of the tensor, by default all of it, on the CPU, in separate memory.

        Args:
            offsets: First index in each dimension; None is 0 in each.
            sizes: Shape of the slice; None extends to the end of each dimension.

        Raises:
            CheckpointError: The file is missing or damaged.
            ValueError: The slice does not lie within the tensor.
        """
        return self._read(*self._resolve(offsets, sizes))

    def view_slice(self, offsets: Offsets, sizes: Offsets) -> Tensor | None:
        """Return a slice in the memory that its file is mapped to, which saves a copy; None if that is not possible.

        Writes to the result do not change the file.

        Raises:
            CheckpointError: The file is damaged.
            ValueError: The slice does not lie within the tensor.
        """
        return None

    @abstractmethod
    def _read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a slice that lies within the tensor, as `read` does."""

    def _resolve(self, offsets: Offsets | None, sizes: Offsets | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return first index and shape of a slice."""
        first = tuple(offsets) if offsets is not None else (0,) * len(self.shape)
        if sizes is None:
            sizes = [size - start for size, start in zip(self.shape, first, strict=False)]
        extent = tuple(sizes)
        if not len(first) == len(extent) == len(self.shape) or any(
            start < 0 or size < 0 or start + size > full
            for start, size, full in zip(first, extent, self.shape, strict=True)
        ):
            raise ValueError(f"the slice at {first} of size {extent} does not lie within {self!r}")
        return first, extent


AnyTensor: TypeAlias = Tensor | StoredTensor


def is_tensor(value: object) -> TypeGuard[AnyTensor]:
    """Return whether a value is a tensor, read or not."""
    return isinstance(value, Tensor | StoredTensor)


def read_tensor(value: AnyTensor) -> Tensor:
    """Return a tensor of a tree as a dense CPU tensor; it is read if it was not."""
    tensor = value.detach() if isinstance(value, Tensor) else value.read()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.resolve_conj().resolve_neg().cpu()


def read_slice(value: AnyTensor, offsets: Offsets, sizes: Offsets) -> Tensor:
    """Return a slice of a dense tensor, on the CPU; only the slice is read if the tensor was not."""
    if isinstance(value, Tensor):
        return read_tensor(narrow(value.detach(), offsets, sizes))
    return value.read(offsets, sizes)


def narrow(tensor: Tensor, offsets: Offsets, sizes: Offsets) -> Tensor:
    """Return a slice of a tensor as a view."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def overlap(
    offsets: Offsets, sizes: Offsets, other_offsets: Offsets, other_sizes: Offsets
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return first index and shape of what two slices of one tensor have in common; None if that is nothing."""
    starts = tuple(max(a, b) for a, b in zip(offsets, other_offsets, strict=True))
    ends = [min(a + m, b + n) for a, m, b, n in zip(offsets, sizes, other_offsets, other_sizes, strict=True)]
    common = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(size <= 0 for size in common) else (starts, common)


def size_bytes(value: AnyTensor) -> int:
    """Return the bytes of a tensor's elements."""
    return int(value.shape.numel()) * int(value.dtype.itemsize)


def memory_key(value: AnyTensor) -> object:
    """Return what two tensors have in common if they are one: tied weights are two objects with one memory."""
    if isinstance(value, Tensor) and value.layout is torch.strided and value.numel() and value.data_ptr():
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    return id(value)


def flatten(tree: Tree, where: str = "") -> Iterator[tuple[str, object]]:  # a leaf of the tree
    """Yield path and value of every leaf, in order: `state_dict/layer.weight`, `optimizer_states/0/state/1/step`.

    An empty dict, list, tuple or set is a leaf; so is a set of values.
    """
    if not isinstance(tree, dict | list | tuple) or isinstance(tree, torch.Size) or not tree:
        yield where, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from flatten(value, f"{where}/{key}" if where else str(key))


def tensors_in(tree: Tree) -> Iterator[tuple[str, AnyTensor]]:
    """Yield path and value of every tensor, read or not."""
    return ((path, value) for path, value in flatten(tree) if is_tensor(value))


@overload
def map_tensors(
    tree: StateDict, change: Callable[[AnyTensor, tuple[Key, ...]], object], keys: tuple[Key, ...] = ...
) -> StateDict: ...
@overload
def map_tensors(
    tree: Tree, change: Callable[[AnyTensor, tuple[Key, ...]], object], keys: tuple[Key, ...] = ...
) -> Tree: ...
def map_tensors(tree: Tree, change: Callable[[AnyTensor, tuple[Key, ...]], object], keys: tuple[Key, ...] = ()) -> Tree:
    """Return a copy of a tree with each tensor replaced by `change(tensor, keys)`; other leaves are the same objects.

    Args:
        tree: The tree to copy.
        change: Called with each tensor, and the keys and positions that lead to it.
        keys: Prefix of these keys.
    """
    if is_tensor(tree):
        return change(tree, keys)
    if isinstance(tree, dict):
        copied = type(tree)([(key, map_tensors(value, change, (*keys, key))) for key, value in tree.items()])
        if hasattr(tree, "__dict__"):  # state_dict()._metadata
            copied.__dict__.update(tree.__dict__)
        return copied
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)(map_tensors(value, change, (*keys, index)) for index, value in enumerate(tree))
    return tree


def bracketed(keys: Sequence[Key]) -> str:
    """Return keys as `checkpoint['state_dict']['layer.weight']`, as `record_names.read_storages` writes them."""
    return "checkpoint" + "".join(f"[{key!r}]" for key in keys)
