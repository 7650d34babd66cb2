"""Loaders of a Fabric as Lightning reads them, and the seeds of workers after `seed_everything(workers=True)`."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from ....data.sources.stateful import is_stateful
from ....fabric import Fabric
from ....fabric.dataloaders import FabricDataLoader
from ..utilities.versions import package_available

__all__ = ["AsItIs", "read_as_it_is", "seed_worker", "seeded"]

# Any in this file: anything that can be iterated.


def read_as_it_is(fabric: Fabric, ready: FabricDataLoader) -> None:
    """Let a Fabric iterate over a loader as a plain loop does, unless its batches are distributed over ranks."""
    loader: Any = ready.loader
    if ready.is_distributed or not (isinstance(loader, DataLoader) or is_stateful(loader)):
        return
    ready.__class__ = AsItIs
    seed = _seed_function(loader)
    if seed is not None:
        ready.loader.worker_init_fn = seed  # type: ignore[attr-defined]  # it is a DataLoader


class AsItIs(FabricDataLoader):
    """A loader of a Fabric that is iterated as it is, and whose state is the loader's own."""

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError is an answer

    def __iter__(self) -> Iterator[Any]:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        samplers = {
            id(one): one for one in (getattr(self.loader, "sampler", None), getattr(batch_sampler, "sampler", None))
        }
        for sampler in samplers.values():
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(self._num_passes)  # type: ignore[union-attr]  # it has it
        self._num_passes += 1
        return self._plain_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state; empty if it has none."""
        return self.loader.state_dict() if is_stateful(self.loader) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the loader's state, if it has one."""
        if is_stateful(self.loader):
            self.loader.load_state_dict(state_dict)


def seeded(loader: Any) -> Any:
    """Return the loader with seeded workers, where `seed_everything(workers=True)` asked for it."""
    seed = _seed_function(loader)
    if seed is not None:
        loader = copy.copy(loader)
        loader.worker_init_fn = seed
    return loader


def _seed_function(loader: object) -> partial[None] | None:
    """Return the `worker_init_fn` that a loader without one gets, where `seed_everything(workers=True)` was called."""
    is_asked = int(os.environ.get("PL_SEED_WORKERS") or 0)
    if not is_asked or not isinstance(loader, DataLoader) or loader.worker_init_fn is not None:
        return None
    return partial(seed_worker, rank=int(os.environ.get("RANK") or 0))


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
