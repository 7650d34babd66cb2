"""The seeds of a loader's workers after `seed_everything(workers=True)`."""

from __future__ import annotations

import random
import sys

import torch

__all__ = ["seed_worker"]

_ALL_BITS = 2**64 - 1


def seed_worker(worker_id: int, rank: int) -> None:
    """Seed the generators of a worker process with the numbers that Lightning gives them.

    Args:
        worker_id: Number of the worker.
        rank: Global rank of the process that has the loader.

    Source: MurmurHash3's 64-bit finalizer (Appleby 2011), then a linear congruential generator with Knuth's multiplier
    for MMIX and increment 1. NumPy's seed comes from its `SeedSequence`.
    """
    base_seed = torch.initial_seed() - worker_id
    state = _mixed((base_seed << 32) | (worker_id << 16) | rank)
    seeds = []
    for _ in range(3):
        state = (state * 6364136223846793005 + 1) & _ALL_BITS
        seeds.append(state)
    torch.manual_seed(seeds[0])
    random.seed((seeds[1] << 32) | seeds[2])
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(numpy.random.SeedSequence([base_seed, worker_id, rank]).generate_state(4))


def _mixed(state: int) -> int:
    state ^= state >> 33
    state = (state * 0xFF51AFD7ED558CCD) & _ALL_BITS
    state ^= state >> 33
    state = (state * 0xC4CEB9FE1A85EC53) & _ALL_BITS
    return state ^ (state >> 33)
