"""The seeds of a loader's workers after `seed_everything(workers=True)`."""

from __future__ import annotations

import random
import sys

import torch

__all__ = ["seed_worker"]


def seed_worker(worker_id: int, rank: int) -> None:
    """Seed the generators of a worker process with the numbers that Lightning gives them.

    Args:
        worker_id: Number of the worker.
        rank: Global rank of the process that has the loader.

    Source: a linear congruential generator with Knuth's multiplier for MMIX and increment 1, on 64 bits.
    """
    state = ((torch.initial_seed() - worker_id) << 32) | (worker_id << 16) | rank
    seeds = []
    for _ in range(4):
        state = (state * 6364136223846793005 + 1) % 2**64
        seeds.append(state)
    torch.manual_seed(seeds[0])
    random.seed((seeds[1] << 32) | seeds[2])
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seeds[3] % 2**32)
