"""Protocols and type aliases that every other part of the package may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["Loader", "Stateful", "StoredTensor"]


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken out and put back, as tensors and plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, strings, and containers of these."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Put back what `state_dict` returned."""
        ...


@runtime_checkable
class Loader(Protocol):
    """What training and evaluation read batches from: anything that can be iterated again and again."""

    def __iter__(self) -> Iterator[Any]:
        """Begin a new pass over the data."""
        ...


class StoredTensor(Protocol):
    """A tensor in a file, of which a part can be read."""

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return the box at `offsets` of these sizes, by default all of it, on the CPU with memory of its own."""
        ...
