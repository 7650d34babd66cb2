"""The seeds of a loader's workers after `seed_everything(workers=True)`."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from ....data.sources.base import announce_epoch
from ....fabric import Fabric
from ....fabric.dataloaders import FabricDataLoader
from ..patch import patch
from ..utilities.versions import package_available

__all__ = ["seed_worker", "seed_workers", "seeded"]

# Any in this file: anything that can be iterated.


def seed_workers(fabric: Fabric) -> None:
    """Let a Fabric read loaders with workers as they are; see `seeded`. Those of several ranks are distributed."""
    setup = fabric.setup_dataloaders

    def setup_dataloaders(*dataloaders: object, **kwargs: Any) -> Any:
        ready = setup(*map(seeded, dataloaders), **kwargs)
        for one in ready if isinstance(ready, list) else [ready]:
            if one._shard is None and getattr(one.loader, "num_workers", 0) > 0:
                one.__class__ = _AsItIs
        return ready

    patch(fabric, "setup_dataloaders", setup_dataloaders)


class _AsItIs(FabricDataLoader):
    """A loader of a Fabric, whose workers draw from the generators that torch gives them."""

    def _training(self) -> Iterator[object]:
        announce_epoch(self.loader, self._num_passes)
        self._num_passes += 1
        for batch in self.loader:  # type: ignore[attr-defined]  # it can be iterated
            yield self._fabric.to_device(batch) if self._moves else batch


def seeded(loader: Any) -> Any:
    """Return the loader with seeded workers, where `seed_everything(workers=True)` asked for it."""
    is_asked = int(os.environ.get("PL_SEED_WORKERS") or 0)
    if not is_asked or not isinstance(loader, DataLoader) or loader.worker_init_fn is not None:
        return loader
    loader = copy.copy(loader)
    loader.worker_init_fn = partial(seed_worker, rank=int(os.environ.get("RANK") or 0))
    return loader


def seed_worker(worker_id: int, rank: int) -> None:
    """Seed the generators of a worker process with the numbers that Lightning gives them.

    Args:
        worker_id: Number of the worker.
        rank: Global rank of the process that has the loader.

    Source: the last step of MurmurHash3, then a linear congruential generator with Knuth's multiplier for MMIX and
    increment 1, on 64 bits; NumPy gets its own SeedSequence of the three numbers.
    """
    base = torch.initial_seed() - worker_id
    state = (base << 32) | (worker_id << 16) | rank
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        state ^= state >> 33
        state = (state * multiplier) % 2**64
    state ^= state >> 33
    seeds = []
    for _ in range(3):
        state = (state * 6364136223846793005 + 1) % 2**64
        seeds.append(state)
    torch.manual_seed(seeds[0])
    random.seed((seeds[1] << 32) | seeds[2])
    if package_available("numpy"):
        import numpy

        numpy.random.seed(numpy.random.SeedSequence([base, worker_id, rank]).generate_state(4))
