"""Data and random numbers of several processes as in Lightning."""

from __future__ import annotations

import copy
import os
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ....data.combined import CombinedLoader
from ....data.tree import map_loaders
from ....fabric import reset_seed
from ....protocols import Loaders
from ....strategies import ParallelStrategy, Strategy
from ....trainer.run import Run
from ....trainer.trainer import Trainer
from ..utilities.sizes import DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper

__all__ = ["draw_alike", "insert_samplers", "seed_again"]


def draw_alike(trainer: Trainer) -> None:
    """Let all ranks keep the generators that they have, which the same seed makes the same."""
    trainer.training_rng.separate_ranks = _stay  # type: ignore[method-assign]


def seed_again(run: Run) -> None:
    """Let each verb of a strategy for several processes begin with the generators that `seed_everything` left."""
    if isinstance(run.fabric.strategy, ParallelStrategy):
        reset_seed()


def _stay(strategy: Strategy) -> None:
    """Leave the generators of this rank."""


def insert_samplers(run: Run) -> None:
    """Give loaders without a sampler for ranks a `DistributedSampler`."""
    if not run.has_ranks or not run.trainer.use_distributed_sampler:
        return
    loaders = run.loaders
    ask = type(loaders)._ask

    def ask_distributed(stage: str) -> Loaders:
        found = ask(loaders, stage)
        if isinstance(found, CombinedLoader):
            found.flattened = [_distributed(run, one, stage) for one in found.flattened]
            return found
        return map_loaders(lambda one: _distributed(run, one, stage), found)

    loaders._ask = ask_distributed  # type: ignore[method-assign]


def _distributed(run: Run, loader: Any, stage: str) -> Any:  # Any: whatever the user gave
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    given: Any = loader.sampler
    topology = run.fabric.strategy.topology
    is_shuffled = stage == "train" or not isinstance(loader.sampler, SequentialSampler)
    options: dict[str, Any] = {
        "num_replicas": topology.data_size,
        "rank": topology.data_rank,
        "shuffle": is_shuffled and not run.trainer.overfit_batches,
        "seed": int(os.environ.get("PL_GLOBAL_SEED") or 0),
    }
    if stage == "predict":
        sampler: Any = UnrepeatedDistributedSamplerWrapper(given, **options)
    elif isinstance(loader.sampler, RandomSampler | SequentialSampler):
        sampler = DistributedSampler(loader.dataset, **options)
    else:
        sampler = DistributedSamplerWrapper(given, **options)
    changed = copy.copy(loader)
    changes: dict[str, Any] = {"sampler": sampler, "_iterator": None}
    if type(loader.batch_sampler) is BatchSampler:
        changes["batch_sampler"] = BatchSampler(
            sampler, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
        )
    elif loader.batch_sampler is not None:
        changes["batch_sampler"] = copy.copy(loader.batch_sampler)
        changes["batch_sampler"].sampler = sampler
    for name, value in changes.items():
        object.__setattr__(changed, name, value)  # DataLoader refuses plain assignment
    return changed
