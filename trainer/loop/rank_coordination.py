"""Coordination of the ranks of a run, except gradients: equal arguments, data, random numbers, meetings, files.

Each function communicates and is called on every rank.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from ... import __version__
from ...data.combined import CombinedLoader
from ...data.distributed.evaluation import count_eval_rounds, in_loader_order, shard_eval
from ...data.distributed.fingerprint import (
    SAME_DATA,
    count_listed,
    fingerprint_batch,
    fingerprint_listed,
    is_same_on_all,
    listed_in,
)
from ...data.distributed.indexed import shared_rng
from ...data.distributed.shard import Shard, merge_states
from ...data.rng import capture_rng
from ...data.sharded_iterable import ShardedIterable
from ...errors import CheckpointError, ConfigError, DataError, ModuleError
from ...fabric.seed import known_seed
from ...messages import show_ranks
from ...protocols import AnyLoaders, Batch, StateDict, StepOutput, Tree
from ...strategies.distributed.rendezvous import store
from ...strategies.distributed.shards import has_parts
from ...strategies.distributed.store_tree import StoreTree
from .rank_rng import check_copies

if TYPE_CHECKING:
    from ...fabric import Fabric
    from ...protocols import Loaders
    from ...strategies import Strategy
    from ..run import FitRun
    from ..session.loaders import StageLoaders
    from ..view import TrainerView


logger = logging.getLogger(__name__)

T = TypeVar("T")

# --- what must be equal --------------------------------------------------------------------------------------------


def facts_of(fabric: Fabric, verb: str, module: nn.Module, arguments: Mapping[str, Tree]) -> dict[str, str]:
    """Return what must be the same on every rank, each fact as a short text."""
    # Where ranks have different layers, the strategy compares modules.
    same = {} if fabric.strategy.traits.has_stages else dict(module.named_parameters())
    parameters = [f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}" for name, p in same.items()]
    count = sum(parameter.numel() for parameter in same.values())
    script = getattr(sys.modules.get("__main__"), "__spec__", None)
    entry = script.name if script is not None else os.path.basename(sys.argv[0] if sys.argv else "")
    return {
        "verb": f"trainer.{verb}",
        "Loopwright": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "entry point": entry,
        "seed": known_seed() or "not set",
        "strategy": type(fabric.strategy).__name__,
        "precision": str(fabric.precision.precision),
        "module": f"{type(module).__name__} with {count} parameters (names and shapes {_digest(parameters)})",
        **{f"Trainer argument {name}": value for name, value in plain(arguments).items()},
    }


def _digest(parts: list[str]) -> str:
    return f"{zlib.crc32('|'.join(parts).encode()):08x}"


_SAME_SCRIPT = (
    "start the same script with the same arguments, packages and seed everywhere; code that depends on the rank "
    "belongs after the Trainer's verbs or in hooks; what depends on chance, a clock or a file is decided on rank 0 and "
    "sent with trainer.strategy.broadcast(...)."
)
_SAME_GROUPS = (
    "give the optimizers of all pipeline stages the same groups in the same order, with an empty list where a stage "
    'has no parameters for one: {"params": list(self.blocks[3].parameters()), "lr": 0.01} does so; and change a '
    "group on all ranks alike."
)


def compare(strategy: Strategy, facts: dict[str, str], where: str = "", fix: str = _SAME_SCRIPT) -> None:
    """Compare facts over ranks.

    Args:
        strategy: Communicates.
        facts: Name -> fact as a short text.
        where: Place in the run, for the message.
        fix: The remedy, for the message.

    Raises:
        ConfigError: On every rank: names each fact that differs, its values, and the ranks that have them.
    """
    everywhere = strategy.gather_objects(facts)
    names = list(dict.fromkeys(name for one in everywhere for name in one))
    lines = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, one in enumerate(everywhere):
            ranks_of.setdefault(one.get(name, "missing"), []).append(rank)
        if len(ranks_of) > 1:
            values = "; ".join(f"{value} on {show_ranks(ranks)}" for value, ranks in ranks_of.items())
            lines.append(f"{name}: {values}")
    if lines:
        listed = "".join(f"\n  - {line}" for line in lines)
        raise ConfigError(
            f"the ranks do not agree on what they are about to run{where}:{listed}",
            fix=fix,
        )


# --- data ----------------------------------------------------------------------------------------------------------


def distribute_loaders(loaders: StageLoaders, strategy: Strategy, *, splits: bool, uneven: str) -> None:
    """Let the loaders of this run be read in shares, one for each rank; `uneven` is as in `Shard`."""
    topology = strategy.topology
    smallest_or_largest = "min" if uneven == "stop_all" else "max"

    def agree(count: int) -> int:
        return int(strategy.all_reduce(torch.tensor(count), reduce_op=smallest_or_largest))

    shard = Shard(topology.data_rank, topology.data_size, uneven=uneven, splits=splits)
    loaders.shard = shard
    loaders.agree = agree

    def share(loader: Loaders) -> AnyLoaders:
        if splits:
            _compare_listed(strategy, [loader])
        return shard_eval(loader, shard, share=strategy.broadcast)

    loaders.evaluation = {
        "share": share,
        "count": count_eval_rounds,
    }


def open_epoch(run: FitRun) -> None:
    """Begin an epoch of the training data, whose samplers draw as they would in one process.

    All ranks use the generators of rank 0, whatever they have drawn for their own data.
    """
    _compare_steps(run)
    strategy, topology = run.fabric.strategy, run.fabric.strategy.topology
    check_copies(strategy)
    rng = run.fabric.broadcast(capture_rng())
    # Copies of rank 0 that draw alike move their generators as it does.
    rank = 0 if strategy.traits.copies_draw_alike else topology.global_rank
    with shared_rng(rank, topology.data_rank, rng):
        run.stream.open(run.progress.epochs, rng)


def _compare_steps(run: FitRun) -> None:
    """Compare the settings of the steps of an epoch: callbacks may have changed them at random or by a clock.

    Raises:
        ConfigError: On every rank: names each fact that differs.
    """
    strategy = run.fabric.strategy
    where = f" in epoch {run.progress.epochs}"
    facts = {"micro-batches of a window": str(run.trainer.fit_loop.accumulation_for_epoch(run.progress.epochs))}
    for number, optimizer in enumerate(run.optimizers if run.compares_rates else ()):
        for index, group in enumerate(optimizer.param_groups):
            facts[f"learning rate of group {index} of optimizer {number}"] = repr(float(group.get("lr", 0.0)))
            if strategy.traits.has_stages:  # schedules and checkpoints have one setting for all stages
                facts[f"weight decay of group {index} of optimizer {number}"] = repr(group.get("weight_decay"))
    if strategy.traits.has_stages:  # which have other parameters
        compare(strategy, facts, where=where, fix=_SAME_GROUPS)
        return
    names = [name for name, parameter in run.module.named_parameters() if parameter.requires_grad]
    facts["trained parameters"] = f"{len(names)} (names {_digest(names)})"
    try:
        compare(strategy, facts, where=where)
    except ConfigError:
        compare(strategy, {f"parameter {name}": "trained" for name in names}, where=where)  # which ones, if they differ
        raise


def check_first_batch(run: FitRun, batch: Batch) -> None:
    """Check, once per run, that ranks read their own shares of one order.

    Args:
        run: The run, in its first window.
        batch: This rank's batch; None where it has none.

    Raises:
        DataError: The ranks' samplers give different orders.
    """
    stream = run.stream
    if stream.is_sharded:
        orders = run.fabric.strategy.gather_objects(stream.describe_order())
        if len(set(orders)) > 1:
            data = getattr(stream.loader, "dataset", None)
            if isinstance(data, ShardedIterable):
                raise DataError(
                    f"Expected the {type(data.dataset).__name__} in ShardedIterable to give the same samples on every "
                    "rank, got different ones: samples would be read twice or not at all.",
                    fix="do not split it by rank, sort what it lists, and let the order depend on the global "
                    "generators, on set_epoch, or on a generator in an attribute with the same seed everywhere.",
                )
            raise DataError(
                f"the sampler of {type(stream.loader).__name__} gives another order on each rank, so that samples "
                "would be read twice or not at all.",
                fix="let the order depend on the global generators, on a generator in an attribute with the same seed "
                "everywhere, or on set_epoch; or pass a DistributedSampler.",
            )
        loader = stream.loader
        _compare_listed(run.fabric.strategy, loader.flattened if isinstance(loader, CombinedLoader) else [loader])
        return
    strategy = run.fabric.strategy
    topology = strategy.topology
    if topology.data_size > 1 and is_same_on_all(topology.reports(strategy.gather_objects(fingerprint_batch(batch)))):
        logger.warning(SAME_DATA, type(stream.loader).__name__)


def _compare_listed(strategy: Strategy, loaders: Sequence[Loaders]) -> None:
    """Compare the lists of samples in map-style data sets: the same samples must have the same order.

    Samples may differ: each rank may have another data set, or paths of its own machine.

    Raises:
        DataError: On every rank: names the attribute, and the ranks that have another order.
    """
    if strategy.topology.data_size == 1:
        return
    listed = {
        f"{number}: {path}" if len(loaders) > 1 else path: values
        for number, loader in enumerate(loaders)
        for path, values in listed_in(getattr(loader, "dataset", None)).items()
    }
    everywhere = strategy.gather_objects({path: fingerprint_listed(values) for path, values in listed.items()})
    shared = set(everywhere[0]).intersection(*everywhere[1:])
    other = [path for path in listed if path in shared and len({one[path] for one in everywhere}) > 1]
    if not other:
        return
    counts = strategy.gather_objects({path: count_listed(listed[path]) for path in other})
    for path in other:
        is_split = path.endswith(".indices")  # of torch's Subset: these are the order
        if not is_split and (counts[0][path] is None or len({one[path] for one in counts}) > 1):
            continue
        ranks = [rank for rank, one in enumerate(everywhere) if one[path] != everywhere[0][path]]
        raise DataError(
            f"Expected the samples of {path} in the same order on all ranks, got another order on {show_ranks(ranks)} "
            "than on rank 0: samples would be read twice, and others never.",
            fix="sort what is listed; shuffle or split it with a generator that has the same seed on every rank; or "
            "pass use_distributed_sampler=False if each rank has other data.",
        )


# --- states of the data ---------------------------------------------------------------------------------------------


def gather_data(strategy: Strategy, state: StateDict) -> StateDict:
    """Return the state of the data for a checkpoint, merged from all ranks if each has its own."""
    return merge_states(one_of_each_share(strategy, state)) if state.get("is_per_rank") else state


def one_of_each_share(strategy: Strategy, obj: T) -> list[T]:
    """Return the objects of ranks that read different data, by data rank: one for ranks that read the same."""
    topology = strategy.topology
    of_rank: dict[int, T] = {}
    for data_rank, theirs in topology.reports(strategy.gather_objects((topology.data_rank, obj))):
        of_rank.setdefault(data_rank, theirs)
    return [of_rank[rank] for rank in sorted(of_rank)]


# --- meeting -------------------------------------------------------------------------------------------------------

_last_meeting: tuple[Tree, int] = (None, -1)  # the store, and the number of the meeting in it
_PATIENCE_S = 2.0
_MOST_NAMED = 16


def meet(trainer: TrainerView, what: str) -> None:
    """Wait until every rank is here, without a collective, so that a call that some ranks omit can be named.

    Args:
        trainer: Knows the other ranks.
        what: What is called, as the user wrote it.

    Raises:
        CheckpointError: A rank has gone past this place without calling it, or did not come at all.
    """
    left = _wait_for_all(trainer, _is_past)
    if left is not None:
        missing, waited_s = left
        why = "has continued without it" if waited_s is None else f"did not come within {waited_s:.0f} s"
        raise CheckpointError(
            f"{what} was called on rank {trainer.global_rank}, but {show_ranks(missing)} {why}.",
            fix="call it on every rank, outside of `if trainer.is_global_zero`: only rank 0 writes the file or gets "
            "the result.",
        )


def require_skip_everywhere(trainer: TrainerView) -> None:
    """Wait until every rank skips the rest of the epoch, without a collective. On each rank that does.

    Raises:
        ModuleError: Another rank trains on, or did not come at all.
    """
    left = _wait_for_all(trainer, _is_training_on)
    if left is not None:
        missing, waited_s = left
        trains = "trains on" if len(missing) == 1 else "train on"
        why = trains if waited_s is None else f"did not come within {waited_s:.0f} s"
        raise ModuleError(
            f"on_train_batch_start returned -1 on rank {trainer.global_rank}, but {show_ranks(missing)} {why}.",
            fix="return -1 on every rank for the same batch_idx: decide on what all ranks have alike, or on rank 0, "
            "with self.trainer.strategy.broadcast(...).",
        )


def _wait_for_all(
    trainer: TrainerView, has_left: Callable[[StateDict, StateDict], bool]
) -> tuple[list[int], float | None] | None:
    """Wait until every rank has called this.

    Args:
        trainer: Knows the other ranks.
        has_left: Whether a rank at the first place will not reach the second, which is this rank's.

    Returns:
        None when all are here, and without a store; else some of the missing ranks, and the seconds waited, None where
        they have left.
    """
    global _last_meeting
    shared, watch = store(), trainer.fabric.watch
    if shared is None or watch is None:
        return None
    # Counted within a world: the jobs of a sweep have one each, with processes that are new and this one that is not.
    _last_meeting = (shared, _last_meeting[1] + 1 if shared is _last_meeting[0] else 0)
    place = f"loopwright/meeting/{_last_meeting[1]}"
    here = StoreTree(shared, place, trainer.world_size)
    if here.post(trainer.global_rank, "") is not None:
        shared.set(f"{place}/all", "here")
    began = last_look = time.monotonic()
    pause_s = 0.0005
    left_before: set[int] = set()
    while not shared.check([f"{place}/all"]):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
        now = time.monotonic()
        if now - last_look < _PATIENCE_S:
            continue
        last_look = now
        missing = here.missing(_MOST_NAMED)
        failure = watch.first_failure()
        if failure is not None:
            raise failure.to_error()
        places, ahead = watch.places(missing), watch.ahead(missing)
        run = trainer.present_run()
        mine = {} if run is None else run.place()
        left = {rank for rank in missing if rank in ahead or has_left(places.get(rank, {}), mine)}
        if left & left_before:  # seen twice: a place may be a second old
            return sorted(left & left_before), None
        left_before = left
        if now - began > watch.stall_timeout_s:
            return missing, now - began
    return None


def _is_training_on(theirs: StateDict, mine: StateDict) -> bool:
    """Whether a rank at the same batch is past on_train_batch_start, or at a later one."""
    is_there = all(theirs.get(name) == mine.get(name) for name in ("stage", "epoch", "batch"))
    return _is_past(theirs, mine) or (is_there and theirs.get("hook") != "on_train_batch_start")


def _is_past(theirs: StateDict, mine: StateDict) -> bool:
    names = ("epoch", "batch")
    if theirs.get("stage") != "train" or any(name not in theirs or name not in mine for name in names):
        return False
    return bool(tuple(theirs[name] for name in names) > tuple(mine[name] for name in names))


# --- files and answers ---------------------------------------------------------------------------------------------


def write_on_rank_zero(strategy: Strategy, write: Callable[[], None], what: str) -> None:
    """Let rank 0 write, and report the outcome to every rank, so that none waits for one that failed.

    Raises:
        CheckpointError: On the other ranks, when rank 0's writing failed; rank 0 raises its own error.
    """
    error: BaseException | None = None
    if strategy.is_global_zero:
        try:
            write()
        # The error is raised below, once the other ranks know.
        except Exception as caught:
            error = caught
    answer = strategy.broadcast(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if answer is not None:
        raise CheckpointError(
            f"rank 0 could not write {what}: {answer}", fix="look at rank 0's message; the other ranks wrote nothing."
        )


def require_full(checkpoint: StateDict, path: str | Path) -> None:
    """Refuse a checkpoint with parts on other ranks that no longer answer, after an error of this rank alone.

    Raises:
        CheckpointError: There are such parts.
    """
    if has_parts(checkpoint):
        raise CheckpointError(
            f"{path} cannot be saved after an error of one rank: the model is spread over all ranks, and the others do "
            "not answer.",
            fix="resume from the last checkpoint that was saved while all ranks were running.",
        )


def ordered(strategy: Strategy, outputs: list[list[StepOutput]], loaders: Sequence[Loaders]) -> list[list[StepOutput]]:
    """Return predictions of all ranks in the order of the data, on every rank.

    Args:
        strategy: Communicates.
        outputs: This rank's outputs, a list for each loader.
        loaders: What the outputs were made from; of those that are not distributed, ranks' outputs are joined in order.
    """
    everywhere = one_of_each_share(strategy, outputs)
    return [in_loader_order(loader, [one[index] for one in everywhere]) for index, loader in enumerate(loaders)]


def plain(arguments: Mapping[str, Tree]) -> dict[str, str]:
    """Return those arguments whose text is the same in every process: numbers, strings, and collections of these."""
    return {name: repr(value) for name, value in arguments.items() if _is_plain(value)}


def _is_plain(value: Tree) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)
