"""Evaluation loaders with persistent workers whose passes do not depend on each other.

Persistent workers continue with the random numbers of the previous pass; a resumed run has new workers. Here each batch
has random numbers of its own, as in training, that depend only on the global generators at the beginning of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch.utils.data import DataLoader

from ..protocols import AnySampler, Batch, Loaders, StateDict
from .rng import capture_rng, derive_key, restore_rng
from .sources.indexed import is_indexed
from .sources.reread import without_persistent_workers
from .worker import Numbered, SeedingDataset, with_indices


def with_persistent_workers(loader: Loaders) -> Loaders:
    """Return the loader; with persistent workers, one whose passes do not depend on previous ones."""
    if not isinstance(loader, DataLoader) or not loader.num_workers or not loader.persistent_workers:
        return loader
    return PersistentWorkersLoader(loader) if is_indexed(loader) else without_persistent_workers(loader)


class PersistentWorkersLoader:
    """Stands for a DataLoader with a map-style data set and persistent workers.

    Args:
        loader: The user's loader; it is not changed.

    Attributes:
        loader: The same.
    """

    def __init__(self, loader: DataLoader[Batch]) -> None:
        self.loader = loader
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = _NumberedSampler(getattr(loader, name))
        self._copy = with_indices(loader, self._sampler, seeds_workers=True)
        self._dataset = cast(SeedingDataset, self._copy.dataset)

    def __len__(self) -> int:
        return len(self.loader)

    def shut_down(self) -> None:
        """End the workers; the next pass starts others."""
        object.__setattr__(self._copy, "_iterator", None)

    def __iter__(self) -> Iterator[Batch]:
        self._sampler.opening = capture_rng()
        if self._dataset.has_changed():
            self.shut_down()
        return iter(self._copy)


class _NumberedSampler:
    """Gives each batch of indices the key of its random numbers.

    Attributes:
        opening: The global generators when the pass began; starting workers, which only some passes do, draws.
    """

    def __init__(self, sampler: AnySampler) -> None:
        self.sampler = sampler
        self.opening: StateDict = {}

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Numbered]:
        restore_rng(self.opening)
        key = derive_key(self.opening, "evaluation")
        for number, index in enumerate(self.sampler):
            yield Numbered(index, 0, key + number.to_bytes(8, "little"))
