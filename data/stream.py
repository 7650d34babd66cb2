"""`BatchStream`: the training data as one stream that can stop after any batch and continue exactly."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import DataError
from ..messages import warn
from ..protocols import Indices, Loaders, StateDict
from .limit import resolve_limit

if TYPE_CHECKING:
    from .distributed.shard import Shard
    from .sources.base import Source

__all__ = ["BatchStream", "resolve_limit"]

log = logging.getLogger(__name__)


class BatchStream:
    """Batches of a loader, epoch by epoch, with a position that can be saved and restored.

    After `open(epoch)`, the caller alternates `has_next` and `next_batch`. If `has_next` is called right before
    `next_batch`, samplers draw their next indices at the same moment as in a handwritten loop. `state_dict` may be
    called between any two batches.
    To resume: `load_state_dict`, then `reopen()` if the state has `is_open`, else `open` of the next epoch. After
    `reopen()`, the caller restores the global generators to their state at the time of `state_dict`.

    Without a resume, batches and the use of the global generators equal a hand-written `for batch in loader`, bit for
    bit, for loaders with a map-style data set and no workers, and for lists.

    With several processes, each has its own stream with its `Shard`. DataLoaders with a map-style data set and
    lists of batches are distributed batch by batch, with any sampler. Other loaders, and those whose sampler knows its
    rank, are read by each process as they are. All processes call `open`, `reopen` and `remaining` at the same points
    and get the same answers there and from `has_next`, `position` and `num_batches`, which count the batches of *one*
    process. So does the limit. States count the batches of all, so that another number of processes can continue.

    Args:
        loader: A DataLoader, any other object that can be iterated again and again, a `CombinedLoader`, or nested
            lists, tuples and dicts of loaders (then the shorter ones begin again until the longest ends).
        limit: Maximum number of batches per epoch, in the form of `resolve_limit`.
        name: Name of the limit in errors.
        shard: Part of the data that this process reads; None for all.
        agree: Returns the smallest (with `uneven="stop_all"`) or largest number that any process calls it with. All
            processes call it equally often: not at all for data that is distributed, once per epoch for loaders whose
            length can be trusted (and once when the stream is made), in most calls of `remaining` for others. None:
            each process decides alone.

    Attributes:
        num_batches: Number of batches in an epoch, after the limit; `math.inf` if unknown.
        is_sized_exactly: Whether the loader has an exact length.
        is_sharded: Whether all of the data is distributed; if not, each process reads its complete loaders.
        next_batch: Returns the next batch, or `NO_BATCH`; called after `has_next` returned True.

    Raises:
        ConfigError: The limit is invalid for this loader.
        ModuleError: The loader cannot be iterated.
    """

    def __init__(
        self,
        loader: Loaders,
        limit: int | float | None = None,
        *,
        name: str = "limit_train_batches",
        shard: Shard | None = None,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        self.loader = loader
        self._shard = shard
        self.is_sharded = False
        if shard is None or shard.size == 1:
            from .sources.choose import make_source  # a program that only makes a Trainer reads no data

            self._source: Source = make_source(loader)
        else:
            from .distributed.choose import make_shared_source

            self._source, self.is_sharded = make_shared_source(loader, shard, agree)
        self._limit = limit
        self._name = name
        self.num_batches: int | float = self._source.apply_limit(limit, name)
        self.is_sized_exactly = self._source.length is not None
        self.next_batch = self._source.take  # one frame less per batch
        self._loaded_epoch: int | None = None

    @property
    def position(self) -> int:
        """Number of batches returned in this epoch."""
        return self._source.position

    @property
    def epoch(self) -> int | None:
        """The epoch of a loaded state that was not opened yet; None without one."""
        return self._loaded_epoch

    def open(self, epoch: int, shared_rng: StateDict | None = None, *, may_be_empty: bool = False) -> None:
        """Begin an epoch: pass its number to samplers and data sets, and begin to iterate.

        Args:
            epoch: Index of the epoch, from 0.
            shared_rng: Where data is distributed: the `capture_rng` of rank 0, taken right before this call. Samplers
                then draw the same on all ranks; the global generators of ranks other than 0 stay as they are. None:
                the generators of all ranks are equal anyway.
            may_be_empty: Whether a loader without a length, on one process, may have no batches, with a warning.

        Raises:
            DataError: The epoch has no batches.
        """
        self._loaded_epoch = None
        self._source.announce_epoch(epoch)
        if shared_rng is None:
            self._source.begin(epoch)
        else:
            self._source.begin_shared(epoch, shared_rng)
        self.num_batches = self._source.apply_limit(self._limit, self._name)  # it may differ by epoch
        if self._limit != 0 and not (self.num_batches and self._source.has_next()):
            fix, what = _advice(self.loader, self._shard), f"The training data has no batches in epoch {epoch}."
            if not may_be_empty or self._shard is not None or not math.isinf(self.num_batches):
                raise DataError(what, fix=fix)
            warn(f"{what} The epoch is skipped. If that is a mistake, {fix}")

    @property
    def knows_position(self) -> bool:
        """Whether a state of an open epoch was loaded, for `reopen`."""
        return self._loaded_epoch is not None

    def reopen(self) -> None:
        """Go back to where the loaded state was taken. It advances the global generators; the caller restores them.

        Raises:
            DataError: No state of an open epoch was loaded, or the loader yields another order of samples than before.
        """
        if self._loaded_epoch is None:
            raise DataError(
                "There is no position in an epoch to return to.",
                fix="call load_state_dict with the state of an open stream before reopen, or begin an epoch with open.",
            )
        epoch, self._loaded_epoch = self._loaded_epoch, None
        self._source.announce_epoch(epoch)
        self._source.resume(epoch)
        self.num_batches = self._source.apply_limit(self._limit, self._name)

    def has_next(self) -> bool:
        """Return whether there is a next batch in this epoch; may read one batch ahead."""
        source = self._source
        if source.position < self.num_batches:
            return source.ends_at_length or source.has_next()
        if source.position == source.length:
            source.has_next()  # exhausts the sampler, as a hand-written loop does
        return False

    def remaining(self, upto: int) -> int:
        """Return the number of remaining batches in this epoch, at most `upto`.

        Exact for lists and samplers (whose indices are read ahead as far as needed). For other iterables, whose length
        is unknown or may be wrong: 0 at the end, else as many as there may be.
        """
        source = self._source
        left = self.num_batches - source.position
        if left < upto:
            upto = max(0, int(left))
        if not upto:
            self.has_next()  # exhausts the sampler at the epoch's end
            return 0
        return upto if source.ends_at_length else source.at_most(upto)

    def count_latest(self) -> int | None:
        """Return the number of samples that the sampler drew for the latest batch; None if unknown."""
        return self._source.count_latest()

    def latest_indices(self) -> Indices:
        """Return the indices of the latest batch in the data set, in the shape of the loaders; None if unknown."""
        return self._source.latest_indices()

    def describe_order(self) -> int | None:
        """Return a number that depends on the order of samples: equal on all ranks if they distribute the same.

        Ranks whose samplers disagree would read samples twice and others never. Called after `open` or `reopen`, when
        at least one global batch is known; None where nothing is distributed.
        """
        return self._source.describe_order()

    def pin_batches(self) -> None:
        """Make loaders create batches in pinned memory where this costs the main thread nothing. For CUDA devices."""
        self._source.pin_batches()

    def close(self) -> None:
        """End the epoch: release workers that do not persist, and prefetched batches."""
        self._source.close()

    def shut_down(self) -> None:
        """Close, and end persistent workers too. Called when a run ends, also by an exception.

        Without it, workers end when Python collects the loader's iterator, for which torch may wait five seconds.
        """
        self._source.shut_down()

    def state_dict(self, position: int | None = None) -> StateDict:
        """Return the position and the state needed to restore it, as plain values and tensors.

        Args:
            position: As of when this many batches had been given in this epoch, the last state's or later ones: where
                a step began that was not finished. None is now. Where a loader cannot tell, the log says that those
                batches will be left out.
        """
        back = 0 if position is None else self._source.position - position
        if back and not self._source.can_go_back(back):
            log.warning(
                "%s cannot go back: the last %d batches, whose step was not finished, are left out in a resumed run.",
                type(self.loader).__name__,
                back,
            )
            back = 0
        return self._source.state_dict(back)

    def load_state_dict(self, state: StateDict) -> None:
        """Keep a state for `reopen`, or for the next `open` when its epoch was closed.

        Args:
            state: What `state_dict` returned, on any number of processes; where it says `is_per_rank`, what
                `merge_states` made of those of all ranks.

        Raises:
            DataError: The state belongs to other data: another kind of loader, number of samples or batch size; or it
                is each process's own, and now there are more or fewer.
        """
        if self._shard is not None or "data_size" in state:
            from .distributed.shard import Shard, find_own_state

            state = find_own_state(state, self._shard or Shard(), lambda: type(self.loader).__name__)
        self._source.load_state_dict(state)
        self._loaded_epoch = state["epoch"] if state["is_open"] else None


def _advice(loader: Loaders, shard: Shard | None) -> str:
    if shard is not None and shard.size > 1:
        from .distributed.choose import advise_smaller_batches

        advice = advise_smaller_batches(loader, shard)
        if advice is not None:
            return advice
    batch_size = getattr(loader, "batch_size", None)
    if getattr(loader, "drop_last", False) and isinstance(batch_size, int):
        return (
            f"the loader drops a last batch of fewer than {batch_size} samples, and there is no other: pass "
            "drop_last=False, a smaller batch_size, or more data."
        )
    return "check that the data set is not empty and that a second iteration over the loader starts from its beginning."
