"""`SynchronizedSource`: a loader of this process alone, whose epoch ends when the epochs of all processes end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from typing_extensions import override

from ...errors import DataError
from ...protocols import Batch, Indices, StateDict
from ..rng import RngStream, capture_rng, derive_key
from ..sources.base import Source, position_of
from .shard import NO_BATCH, Shard

log = logging.getLogger(__name__)
_UNKNOWN = 1 << 40  # more batches than there are


class SynchronizedSource(Source):
    """A source of this process, which ends when those of all processes end.

    Where the lengths can be trusted, they are compared once per epoch. Where they cannot, each window of batches is
    read ahead, with one batch more, and the processes compare how many they found: `has_next` then knows without
    communication whether another batch follows the window.

    Args:
        source: Reads this process's loader.
        shard: Says what happens when it ends before others do.
        agree: Returns the smallest number (for "stop_all") or the largest that any process calls it with.
    """

    def __init__(self, source: Source, shard: Shard, agree: Callable[[int], int] | None) -> None:
        self._inner = source
        self._shard = shard
        self._agree = agree if agree is not None else _decide_alone
        super().__init__(source.loader)
        self.kind = source.kind
        self._is_cautious = source.kind in ("combined", "stateful")  # cannot always tell where it was some batches ago
        self._ahead: deque[tuple[Batch, StateDict | None]] = deque()
        self._until = 0  # number of batches that exist for certain
        self._is_final = False  # and no more
        self._pass_start = 0  # position at which the loader was begun, again perhaps
        self._key = ""
        self._has_warned = False
        self.length = self._agree_length()

    # --- an epoch ----------------------------------------------------------------------------------------------------

    @override
    def begin(self, epoch: int) -> None:
        self.begin_shared(epoch, None)

    @override
    def begin_shared(self, epoch: int, shared_rng: StateDict | None) -> None:
        self._forget(epoch)
        self._key = derive_key(capture_rng(), epoch, "ahead", self._shard.rank).hex()
        if shared_rng is None:
            self._inner.begin(epoch)
        else:
            self._inner.begin_shared(epoch, shared_rng)
        self._settle()

    @override
    def resume(self, epoch: int) -> None:
        state = self._loaded
        assert state is not None
        self._forget(epoch)
        self._inner.resume(epoch)
        self.position = position_of(state)
        self._pass_start = state.get("pass_start", 0)
        self._key = state.get("ahead_key", "")
        self._settle()

    def _forget(self, epoch: int) -> None:
        self._epoch = epoch
        self._loaded = None
        self._ahead.clear()
        self.position = self._pass_start = 0
        self._is_final = False

    def _settle(self) -> None:
        """Synchronize how the epoch that has just begun will end."""
        # All have to do the same, whatever kind of loader each has.
        is_trusted = self._own_length() is not None
        if self._shard.uneven == "stop_all":
            is_trusted = self._agree(int(is_trusted)) == 1
        else:
            is_trusted = self._agree(int(not is_trusted)) == 0
        self.length = self._agree_length()
        self.ends_at_length = is_trusted
        self._until = self.position
        if is_trusted:
            assert self.length is not None
            self._until, self._is_final = self.length, True
        else:
            self.at_most(1)

    def _own_length(self) -> int | None:
        """Return after how many batches this process's first pass ends for certain."""
        inner = self._inner
        if inner.length is None or not (inner.ends_at_length or inner.kind == "stateful"):
            return None
        return inner.length if self._pass_start == 0 else self.position

    def _agree_length(self) -> int | None:
        """Return how many batches the loaders of all say they have; None if one does not say."""
        length = self._inner.length if self._pass_start == 0 else self.position
        if self._shard.uneven == "stop_all":
            common = self._agree(-1 if length is None else length)
            return common if common >= 0 else None
        common = self._agree(_UNKNOWN if length is None else length)
        return common if common < _UNKNOWN else None

    @override
    def at_most(self, upto: int) -> int:
        """Return how many batches are left, at most `upto`; communicates, where lengths cannot be trusted."""
        if upto <= 0:
            return 0
        if not self._is_final and self._until - self.position <= upto:
            wanted = int(min(upto + 1, max(upto, self.most - self.position)))
            found = self._agree(self._count(wanted))
            self._until, self._is_final = self.position + found, found < wanted
        return min(upto, self._until - self.position)

    def _count(self, upto: int) -> int:
        """Return how many batches this process has, at most `upto`, before its loader would start over."""
        if self._pass_start:
            return 0
        known = self._inner.count_ahead(upto)
        if known is not None:
            return known
        while len(self._ahead) < upto and self._read_ahead():
            pass
        return min(len(self._ahead), upto)

    def _read_ahead(self) -> bool:
        """Read one batch; return whether there was one."""
        inner = self._inner
        before = inner.state_dict() if self._is_cautious else None
        with self._own_rng():
            if not inner.has_next():
                return False
            self._ahead.append((inner.take(), before))
        return True

    def _own_rng(self) -> AbstractContextManager[object]:
        # Training draws between two batches, at other places than the reading: a collection, which may draw from the
        # global generators, gets random numbers that depend on the batch only.
        if self.kind != "combined":
            return nullcontext()
        return RngStream(bytes.fromhex(self._key) + self._inner.position.to_bytes(8, "little"))

    @override
    def has_next(self) -> bool:
        if self._is_final:
            if self._inner.position == self._inner.length and not self._ahead:
                self._inner.has_next()  # exhausts the sampler, as a hand-written loop does
            return self.position < self._until
        return self.position < self._until or self.at_most(1) > 0

    @override
    def take(self) -> Batch:
        if self._ahead:
            batch, _ = self._ahead.popleft()
        else:
            with self._own_rng():
                batch = self._take_more()
        self.position += 1
        return batch

    def _take_more(self) -> Batch:
        inner = self._inner
        if inner.has_next():
            return inner.take()
        if self._shard.uneven == "cycle" and inner.position:
            self._pass_start = self.position
            # Only this process begins again: the generators that it shares with others must not move.
            with RngStream(bytes.fromhex(self._key) + b"cycle" + self.position.to_bytes(8, "little")):
                inner.begin(self._epoch)
            if inner.has_next():
                return inner.take()
        if self._shard.uneven == "cycle" and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s yields no batches on rank %d: it takes part in the steps of the others with weight 0.",
                type(self.loader).__name__,
                self._shard.rank,
            )
        return NO_BATCH

    @override
    def announce_epoch(self, epoch: int) -> None:
        self._inner.announce_epoch(epoch)

    @override
    def count_latest(self, back: int = 0) -> int | None:
        return self._inner.count_latest(back + len(self._ahead))

    @override
    def latest_indices(self, back: int = 0) -> Indices:
        return self._inner.latest_indices(back + len(self._ahead))

    @override
    def describe_order(self) -> int | None:
        return self._inner.describe_order()

    @override
    def close(self) -> None:
        self._inner.close()
        self._ahead.clear()
        self._until, self._is_final, self.ends_at_length = self.position, True, False

    @override
    def pin_batches(self) -> None:
        self._inner.pin_batches()

    @override
    def shut_down(self) -> None:
        self.close()
        self._inner.shut_down()

    # --- state -------------------------------------------------------------------------------------------------------

    def _inner_back(self, back: int) -> int:
        """Return how many batches ahead of this process's place `back` batches ago its loader was read."""
        inner = self._inner
        given = inner.position - len(self._ahead)  # in this pass; global batches without a batch come after its last
        return inner.position - max(0, min(given, self.position - back - self._pass_start))

    @override
    def can_go_back(self, back: int) -> bool:
        if self.position - back < self._pass_start:
            return False
        inner_back = self._inner_back(back)
        if inner_back == len(self._ahead) and self._is_cautious:
            return True
        return self._inner.can_go_back(inner_back)

    @override
    def state_dict(self, back: int = 0) -> StateDict:
        if self._loaded is not None:
            return self._loaded
        inner_back = self._inner_back(back)
        self._inner.most = self._inner.position + max(0, self.most - self.position - len(self._ahead))
        if self._is_cautious and self._ahead and inner_back == len(self._ahead):
            state = self._ahead[0][1]
            assert state is not None
        else:
            state = self._inner.state_dict(inner_back)
        return {
            **state,
            "is_dealt": False,
            "is_per_rank": True,
            "data_size": self._shard.size,
            "rounds": self.position - back,
            "pass_start": self._pass_start,
            "ahead_key": self._key,
        }

    def _load(self, state: StateDict) -> None:
        if state["kind"] == "indexed" and state["is_open"] and not state["is_at_end"] and "pass_start" not in state:
            raise DataError(
                f"The checkpoint was made in the middle of an epoch of a {type(self.loader).__name__} that was "
                "distributed over the processes; now each process reads its own.",
                fix="resume with a sampler that does not know its rank and with use_distributed_sampler=True, or from "
                "a checkpoint made at the end of an epoch.",
            )
        super()._load(state)
        self._inner.load_state_dict(state)


def _decide_alone(count: int) -> int:
    return count
