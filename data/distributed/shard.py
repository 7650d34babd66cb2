"""`Shard`: the part of the data that this process reads; and questions about a loader that is to be distributed.

The user's loader says how many samples a *process* gets per batch. Its batches are numbered 0, 1, 2, ... through the
epoch, and distributed round-robin: of `size` processes, number `rank` gets the batches `rank`, `rank + size`,
`rank + 2 * size` and so on. One batch for each process makes a *global batch*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.utils.data import DistributedSampler

from ...errors import ConfigError, DataError, nearest
from ...protocols import AnySampler, Loaders, StateDict, StepOutput
from ..limit import resolve_limit
from ..sources.base import NO_BATCH, NoBatch

__all__ = ["NO_BATCH", "UNEVEN", "NoBatch", "Shard", "find_own_state", "interleave", "is_rank_aware", "merge_states"]

UNEVEN = ("stop_all", "cycle", "zero_weight")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the data that one process reads.

    ===========  ===================================================================================================
    uneven       what happens when not every process has one more batch
    ===========  ===================================================================================================
    stop_all     the epoch ends for all; what is left over is not read
    cycle        those without one get the epoch's first batches again
    zero_weight  those without one get `NO_BATCH`: they take part in the step with weight 0
    ===========  ===================================================================================================

    Attributes:
        rank: Rank of this process among the ranks that read different data.
        size: Number of these ranks. With 1, this process reads everything.
        uneven: One of the three above; evaluation reads every batch once, whatever it says.
        splits: Whether loaders are distributed. With False, each process reads all of its own loader, which
            the user has made different on each; the processes only synchronize the end of an epoch.

    Raises:
        ConfigError: The policy is unknown.
    """

    rank: int = 0
    size: int = 1
    uneven: str = "stop_all"
    splits: bool = True

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"
        if self.uneven not in UNEVEN:
            raise ConfigError(
                f"Expected uneven to be one of {', '.join(map(repr, UNEVEN))}, "
                f"got uneven={self.uneven!r}{nearest(str(self.uneven), UNEVEN)}.",
                fix="pass one of these.",
            )

    def with_policy(self, uneven: str) -> Shard:
        """Return the same shard with another policy."""
        return replace(self, uneven=uneven)

    def count_global_batches(self, batches: int) -> int:
        """Return the number of global batches in this many batches: the steps that each process takes part in."""
        return batches // self.size if self.uneven == "stop_all" else -(-batches // self.size)

    def count_left(self, batches: int, consumed: int) -> int:
        """Return the number of global batches in what is left of the loader's batches after `consumed` of them."""
        return self.count_global_batches(max(0, batches - consumed))

    def resolve_limit(self, limit: int | float | None, length: int | None, name: str) -> int | None:
        """Return how many of a loader's batches a limit for one process admits; None: all.

        An epoch ends at the batch at which it would, had as many processes read it from its beginning.
        """
        everything = None if length is None else self.count_global_batches(length)
        limited = resolve_limit(limit, everything, name)
        return None if limited == resolve_limit(None, everything, name) else int(limited) * self.size

    def numbers(self, count: int) -> list[int]:
        """Return which of the loader's batches are the first `count` of this process, counted from 0."""
        return list(range(self.rank, self.rank + count * self.size, self.size))


def interleave(parts: Sequence[Sequence[StepOutput]]) -> list[StepOutput]:
    """Return what the processes made of their batches in the order of the loader's batches.

    Args:
        parts: For each rank, in order, one item per batch of its shard.
    """
    steps = range(max(map(len, parts), default=0))
    return [part[number] for number in steps for part in parts if number < len(part)]


def is_rank_aware(loader: Loaders) -> bool:
    """Return whether the loader's sampler knows its rank, so that each process has a part of the data already.

    This is torch's `DistributedSampler`, or any sampler, batch sampler or sampler within these that has the attributes
    `rank` and `num_replicas`.
    """
    return any(
        isinstance(sampler, DistributedSampler) or (hasattr(sampler, "rank") and hasattr(sampler, "num_replicas"))
        for sampler in find_samplers(loader)
    )


def find_samplers(loader: Loaders) -> Iterator[AnySampler]:
    """Yield the samplers of a loader, those within others included."""
    queue, seen = [loader], set[int]()
    while queue and len(seen) < 16:
        part = queue.pop()
        for name in ("batch_sampler", "sampler"):
            sampler = getattr(part, name, None)
            if sampler is not None and id(sampler) not in seen:
                seen.add(id(sampler))
                queue.append(sampler)
                yield sampler


def merge_states(states: Sequence[StateDict]) -> StateDict:
    """Return one state of a `BatchStream` for a checkpoint, merged from the states of all ranks.

    Needed where a state says `is_per_rank`; where it does not, the states of all ranks are equal and any of them will
    do.

    Args:
        states: In rank order.
    """
    first = states[0]
    if not first.get("is_per_rank") or len(states) == 1:
        return first
    common = {name: first[name] for name in ("kind", "is_open", "is_at_end", "epoch")}
    return {**common, "is_per_rank": True, "data_size": len(states), "ranks": list(states)}


def find_own_state(state: StateDict, shard: Shard, describe: Callable[[], str]) -> StateDict:
    """Return this rank's part of what `merge_states` returned; a state that is not merged stays as it is.

    Args:
        state: From a checkpoint.
        shard: This process now.
        describe: Called for an error; names the loader.

    Raises:
        DataError: The state fits its number of processes only, and now there are more or fewer.
    """
    size = state.get("data_size", 1)
    states = state.get("ranks")
    if size == shard.size:
        return states[shard.rank] if states is not None else state
    own = state if states is None else states[shard.rank if shard.rank < len(states) else 0]
    if needs_same_size(own, shard):
        processes = "one process" if size == 1 else f"{size} processes, each"
        later = "" if own["kind"] == "stateful" else "; or resume from a checkpoint made at the end of an epoch"
        raise DataError(
            f"The checkpoint was made by {processes} with its own {describe()} at some position; now there "
            f"{'is one process' if shard.size == 1 else f'are {shard.size}'}.",
            fix=f"resume with devices and num_nodes that make {size}{later}; or train with a DataLoader with a "
            "map-style data set, whose batches can be distributed again.",
        )
    return own


def needs_same_size(state: StateDict, shard: Shard) -> bool:
    """Return whether the state is of no use to another number of processes."""
    if state["kind"] == "combined":
        return any(needs_same_size(source, shard) for source in state["sources"])
    if state["kind"] == "stateful":
        return True
    is_within_epoch = state["is_open"] and not state["is_at_end"]
    return bool(is_within_epoch and not state.get("is_dealt", state["kind"] == "indexed"))
