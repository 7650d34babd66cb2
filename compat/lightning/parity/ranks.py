"""Data and random numbers of several processes as in Lightning."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ....callbacks import EarlyStopping, ModelCheckpoint
from ....data.combined import CombinedLoader
from ....data.tree import changed_loader, map_loaders
from ....fabric import Fabric, reset_seed
from ....protocols import Loaders
from ....strategies import ParallelStrategy, Strategy
from ....trainer.behavior import Behavior
from ....trainer.run import Run
from ....trainer.session.evaluation import EvaluationSession
from ....trainer.trainer import Trainer
from ..loops import trainer_of
from ..utilities.sizes import DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper

__all__ = [
    "decide_on_own_values",
    "draw_alike",
    "insert_sampler",
    "insert_samplers",
    "keep_own_predictions",
    "seed_again",
]


def draw_alike(trainer: Trainer) -> None:
    """Let all ranks keep their generators, which the same seed makes equal."""
    trainer.training_rng.separates_ranks = False


def seed_again(run: Run) -> None:
    """Let each verb of a strategy for several processes begin with the generators that `seed_everything` left."""
    if isinstance(run.fabric.strategy, ParallelStrategy):
        reset_seed()


def decide_on_own_values(run: Run) -> None:
    """Let each rank judge its own values: EarlyStopping stops where one of them stops, ModelCheckpoint where all save.

    Schedules, also those that a module steps itself, get the rank's own value.
    """
    trainer = trainer_of(run)
    if not run.has_ranks or run.fabric.strategy.traits.has_stages:
        return
    run.compares_rates = False
    trainer.decides_alone = True
    for callback in run.callbacks:
        if isinstance(callback, EarlyStopping):
            callback.rules = replace(callback.rules, agree=_stop_together)
        elif isinstance(callback, ModelCheckpoint):
            callback.rules = replace(callback.rules, metrics=_own_metrics)


def _stop_together(trainer: Trainer, should_stop: bool) -> bool:
    return trainer.strategy.reduce_boolean_decision(should_stop, all=False)


def _own_metrics(callback: ModelCheckpoint, trainer: Trainer) -> dict[str, Tensor | float]:
    return {**trainer.callback_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}


def insert_samplers(run: Run) -> None:
    """Give loaders without a sampler for ranks a `DistributedSampler`; each rank predicts for itself."""
    if not run.has_ranks or not trainer_of(run).use_distributed_sampler:
        return
    run.loaders.prepare = partial(_with_samplers, run, run.loaders.prepare)


def _with_samplers(run: Run, prepare: Callable[[str, Loaders], Loaders], stage: str, given: Loaders) -> Loaders:
    loaders = prepare(stage, given)
    if isinstance(loaders, CombinedLoader):
        loaders.flattened = [_distributed(run, one, stage) for one in loaders.flattened]
        return loaders
    return map_loaders(lambda one: _distributed(run, one, stage), loaders)


def keep_own_predictions(behavior: Behavior) -> Behavior:
    """Leave each rank the predictions that it has made, where it reads data of its own."""
    return replace(behavior, in_order=partial(_own_predictions, behavior.in_order))


# Any: what a module of the program predicts
def _own_predictions(order: Callable[..., list[list[Any]]], session: EvaluationSession, outputs: Any) -> Any:
    return outputs if session.trainer.use_distributed_sampler else order(session, outputs)


def _distributed(run: Run, loader: Any, stage: str) -> Any:  # Any: whatever the user passed
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    is_shuffled = stage == "train" or not isinstance(loader.sampler, SequentialSampler)
    is_shuffled = is_shuffled and not trainer_of(run).overfit_batches
    return _with_sampler(loader, run.fabric.strategy, is_shuffled=is_shuffled, repeats=stage != "predict")


def insert_sampler(fabric: Fabric, loader: Any) -> Any:  # Any: whatever the user passed
    """Return a loader of a Fabric with a `DistributedSampler`, or with its own sampler if that knows its rank."""
    is_plain = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    is_parallel = isinstance(fabric.strategy, ParallelStrategy)
    if not is_plain or not is_parallel or isinstance(loader.sampler, DistributedSampler):
        return loader
    return _with_sampler(loader, fabric.strategy, is_shuffled=isinstance(loader.sampler, RandomSampler), repeats=True)


def _with_sampler(loader: DataLoader[Any], strategy: Strategy, *, is_shuffled: bool, repeats: bool) -> DataLoader[Any]:
    given: Any = loader.sampler  # Any: of any class
    options: dict[str, Any] = {
        "num_replicas": strategy.topology.data_size,
        "rank": strategy.topology.data_rank,
        "shuffle": is_shuffled,
        "seed": int(os.environ.get("PL_GLOBAL_SEED") or 0),
    }
    if not repeats:
        sampler: Any = UnrepeatedDistributedSamplerWrapper(given, **options)
    elif isinstance(given, RandomSampler | SequentialSampler):
        sampler = DistributedSampler(loader.dataset, **options)
    else:
        sampler = DistributedSamplerWrapper(given, **options)
    changes: dict[str, Any] = {"sampler": sampler}
    if type(loader.batch_sampler) is BatchSampler:
        changes["batch_sampler"] = BatchSampler(
            sampler, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
        )
    elif loader.batch_sampler is not None:
        changes["batch_sampler"] = copy.copy(loader.batch_sampler)
        changes["batch_sampler"].sampler = sampler
    return changed_loader(loader, **changes)
