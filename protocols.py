"""Protocols shared by all parts of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = [
    "AnyBatch",
    "AnyLoaders",
    "AnyOutput",
    "Batch",
    "Gather",
    "Loader",
    "Loaders",
    "MapLocation",
    "StateDict",
    "Stateful",
    "StatefulLoader",
    "StepFunction",
    "StepOutput",
    "StorageOptions",
    "StoredTensor",
    "Tree",
]

T = TypeVar("T")

Batch: TypeAlias = object  # what a loader yields: a tensor, a tuple, a mapping, or an object of a class of the user's
StepOutput: TypeAlias = object  # what a step returns: a loss, a mapping that holds one, predictions, or None
Tree: TypeAlias = object  # tensors and plain values, nested in dicts, lists, tuples and sets
Loaders: TypeAlias = object  # one loader, or loaders nested in lists, tuples and dicts
StorageOptions: TypeAlias = Mapping[str, object]  # arguments of an fsspec file system: credentials, endpoints
MapLocation: TypeAlias = (
    "Callable[[torch.types.Storage, str], torch.types.Storage] | torch.device | str | dict[str, str] | None"
)
"""Where torch.load puts tensors: a device, its name, names by name, or a function of a storage and its device."""

# Any, because users declare these: an override of a hook or step may name the class of its batch, and whoever calls
# super() gets what it passes on. torch's `state_dict` says dict[str, Any].
AnyBatch: TypeAlias = Any
AnyOutput: TypeAlias = Any
AnyLoaders: TypeAlias = Any
StepFunction: TypeAlias = Callable[..., Any]
StateDict: TypeAlias = dict[str, Any]  # tensors, numbers, strings, and containers of these


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and loaded as tensors and plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, strings, and containers of these."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Load a state returned by `state_dict`."""
        ...


@runtime_checkable
class Loader(Protocol):
    """A source of batches that can be iterated repeatedly."""

    def __iter__(self) -> Iterator[Any]:
        """Start a new pass over the data."""
        ...


class StatefulLoader(Stateful, Loader, Protocol):
    """A loader that saves and loads its place."""


class Gather(Protocol):
    """A function that returns the objects of all ranks in rank order, on every rank."""

    def __call__(self, obj: T, /) -> list[T]:
        """Return this rank's object among those of the others."""
        ...


class StoredTensor(Protocol):
    """A tensor in a file; slices of it can be read."""

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return the slice at `offsets` of these sizes, by default all of it, on the CPU with memory of its own."""
        ...

    def view_slice(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | None:
        """Return the slice in the memory that its file is mapped to; None if that is not possible."""
        ...
