"""A loader for evaluation whose workers live on: each pass over it is as if it were the first.

Workers that persist go on with the random numbers of the pass before; a resumed run has new workers. Here each batch
has random numbers of its own, as in training, which depend on the global generators when the pass begins only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from .rng import capture_rng, derive_key, restore_rng
from .sources.indexed import is_indexed
from .sources.reread import without_persistent_workers
from .worker import Numbered, SeedingDataset, WorkerInit

__all__ = ["SteadyLoader", "steady"]


def steady(loader: Any) -> Any:  # Any: whatever the user evaluates with
    """Return the loader, in a form whose passes do not depend on those before if it has workers that persist."""
    if not isinstance(loader, DataLoader) or not loader.num_workers or not loader.persistent_workers:
        return loader
    return SteadyLoader(loader) if is_indexed(loader) else without_persistent_workers(loader)


class SteadyLoader:
    """Stands for a DataLoader with a map-style data set and workers that persist.

    Args:
        loader: The user's loader, which is left alone.

    Attributes:
        loader: The same.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = _NumberedSampler(getattr(loader, name))
        self._copy = copy.copy(loader)
        changes = {
            name: self._sampler,
            "dataset": SeedingDataset(loader.dataset),
            "worker_init_fn": WorkerInit(loader.worker_init_fn),
            "_iterator": None,
        }
        for attribute, value in changes.items():
            object.__setattr__(self._copy, attribute, value)  # DataLoader refuses plain assignment

    def __len__(self) -> int:
        return len(self.loader)

    def shut_down(self) -> None:
        """End the workers; the next pass starts others."""
        object.__setattr__(self._copy, "_iterator", None)

    def __iter__(self) -> Iterator[Any]:
        self._sampler.opening = capture_rng()
        return iter(self._copy)


class _NumberedSampler:
    """Gives each batch of indices the key of its random numbers.

    Attributes:
        opening: The global generators when the pass began; starting workers, which only some passes do, draws.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.opening: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Numbered]:
        restore_rng(self.opening)
        key = derive_key(self.opening, "evaluation")
        for number, index in enumerate(self.sampler):
            yield Numbered(index, 0, key + number.to_bytes(8, "little"))
