"""Failure store: the keys through which the ranks' watches exchange failures, heartbeats and statuses.

notifications     a counter: something changed; each rank reads it several times per second, and the other keys only
                  when it has changed
failure/<k>       k-th failure, as JSON: written once, by compare_set, so that all ranks see one order
seen              how many ranks have read a failure, or that rank 0 is done: then the store may close
peer/<rank>       a rank's process; machine/<key>/<i> the same for the ranks of one machine
beat/<rank>       a count that grows each second, and the rank's position
done/<rank>       the rank ended normally: its last status; ended/<k> the k-th rank to do so
stall/<k>         the k-th status request; stall/<k>/<rank> the answers; stall/<k>/for/<rank> what a neighbor found out
                  about a rank that cannot answer; stall/<k>/report what the reporter has found out
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol

from ..failure import Failure
from .peers import Peer
from .rank_status import RankStatus

_AT_ONCE = 64


class Store(Protocol):
    """The methods of a torch.distributed store that the watch uses; not imported, which costs time without ranks."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value, waiting for it."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return its value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write a value if the present one is the expected one; return the value afterwards."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return several values."""
        ...


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A failure, as it is stored.

    Attributes:
        run: Number of the run, counted on the rank that wrote it.
        by: The rank that wrote it.
        failure: Description of the failure.
    """

    run: int
    by: int
    failure: Failure

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps({"run": self.run, "by": self.by, "failure": self.failure.to_json()})

    @classmethod
    def from_json(cls, text: str | bytes) -> FailureRecord:
        """Return it from text."""
        values = json.loads(text)
        return cls(values["run"], values["by"], Failure.from_json(values["failure"]))


class FailureStore:
    """Reads and writes the keys above.

    Args:
        store: A torch.distributed store, with its own connection.
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        self.store = store
        self._rank = rank
        self._size = size
        self._seen_notifications = 0
        self._next_failure = 0
        self._next_request = 0
        self._machine = ""
        self._known_on_machine = 0
        self._has_all = False

    # --- notifications ------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Notify all ranks of a change."""
        self.store.add("notifications", 1)

    def was_notified(self) -> bool:
        """Return whether there was a notification since the last call."""
        count = int(self.store.add("notifications", 0))
        was_notified, self._seen_notifications = count != self._seen_notifications, count
        return was_notified

    # --- failures ----------------------------------------------------------------------------------------------------

    def write_failure(self, record: FailureRecord) -> FailureRecord:
        """Store a failure, unless there is already one of the same run or a later one.

        Returns:
            The first failure of this run: the given one, or the one already stored.
        """
        text, number = record.to_json(), self._next_failure
        while True:
            found = self.store.compare_set(f"failure/{number}", "", text)
            if found == text.encode():
                self.notify()
                return record
            other = FailureRecord.from_json(found)
            if other.run >= record.run:
                return other
            number += 1

    def new_failures(self) -> list[FailureRecord]:
        """Return the failures that were written since the last call."""
        records = []
        while self.store.check([f"failure/{self._next_failure}"]):
            records.append(FailureRecord.from_json(self.store.get(f"failure/{self._next_failure}")))
            self._next_failure += 1
        return records

    def note_seen(self, what: str) -> None:
        """Count this rank among those that have read something; rank 0, which may host the store, waits for it."""
        self.store.add(f"seen/{what}", 1)

    def count_seen(self, what: str) -> int:
        """Return how many ranks have read it."""
        return int(self.store.add(f"seen/{what}", 0))

    # --- processes -------------------------------------------------------------------------------------------------

    def introduce(self, peer: Peer) -> None:
        """Publish this rank's process."""
        text = json.dumps(peer.to_dict())
        self._machine = peer.machine
        self.store.set(f"peer/{self._rank}", text)
        place = self.store.add(f"machine/{peer.machine}", 1)
        self.store.set(f"machine/{peer.machine}/{place}", text)
        self.store.add("peers", 1)

    def new_neighbors(self) -> list[Peer]:
        """Return ranks on this machine that were unknown so far, without this one."""
        if self._has_all:
            return []
        has_all = int(self.store.add("peers", 0)) >= self._size
        count = int(self.store.add(f"machine/{self._machine}", 0))
        found: list[Peer] = []
        while self._known_on_machine < count:
            key = f"machine/{self._machine}/{self._known_on_machine + 1}"
            if not self.store.check([key]):
                return found  # counted, not written yet
            self._known_on_machine += 1
            peer = Peer(**json.loads(self.store.get(key)))
            if peer.rank != self._rank:
                found.append(peer)
        self._has_all = has_all
        return found

    def all_are_here(self) -> bool:
        """Return whether every rank has published its process."""
        return int(self.store.add("peers", 0)) >= self._size

    def peer(self, rank: int) -> Peer | None:
        """Return a rank's process; None if it is not published yet."""
        if not self.store.check([f"peer/{rank}"]):
            return None
        return Peer(**json.loads(self.store.get(f"peer/{rank}")))

    def peers_of(self, machine: str) -> list[Peer]:
        """Return the ranks of a machine that have published their process."""
        count = int(self.store.add(f"machine/{machine}", 0))
        keys = [f"machine/{machine}/{place}" for place in range(1, count + 1)]
        return [Peer(**json.loads(self.store.get(key))) for key in keys if self.store.check([key])]

    # --- heartbeats -----------------------------------------------------------------------------------------------

    def beat(self, count: int, place: dict[str, object], collectives: int) -> None:
        """Publish a heartbeat with this rank's position, and its number of collectives over all ranks."""
        self.store.set(f"beat/{self._rank}", json.dumps([count, place, collectives], default=str))

    def beats(self, ranks: list[int]) -> dict[int, tuple[int, dict[str, object]]]:
        """Return heartbeat count and position of ranks that have published their process."""
        values = self.store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        return {rank: tuple(json.loads(value)[:2]) for rank, value in zip(ranks, values, strict=True)}

    def place_of(self, rank: int) -> dict[str, object]:
        """Return a rank's last published position."""
        if not self.store.check([f"beat/{rank}"]):
            return {}
        place: dict[str, object] = json.loads(self.store.get(f"beat/{rank}"))[1]
        return place

    def collectives_of(self, rank: int) -> int:
        """Return a rank's last published number of collectives over all ranks."""
        return int(json.loads(self.store.get(f"beat/{rank}"))[2]) if self.store.check([f"beat/{rank}"]) else 0

    def write_done(self, status: RankStatus) -> None:
        """Publish that this rank ends normally."""
        self.store.set(f"done/{self._rank}", status.to_json())
        self.store.set(f"ended/{self.store.add('ended', 1)}", str(self._rank))
        self.notify()

    def ended_ranks(self, most: int) -> list[int]:
        """Return the first ranks that ended normally."""
        count = min(int(self.store.add("ended", 0)), most)
        keys = [key for number in range(1, count + 1) if self.store.check([key := f"ended/{number}"])]
        return [int(rank) for rank in self.store.multi_get(keys)] if keys else []

    def is_done(self, rank: int) -> bool:
        """Return whether a rank ended normally."""
        return bool(self.store.check([f"done/{rank}"]))

    # --- rank statuses --------------------------------------------------------------------------------------

    def request_status(self, why: str) -> int:
        """Request the status of all ranks, or join a request that was just made.

        Returns:
            Number of the request.
        """
        number = self._next_request
        text = json.dumps([self._rank, why])
        if self.store.compare_set(f"stall/{number}", "", text) == text.encode():
            self.notify()
        return number

    def new_status_request(self) -> tuple[int, str] | None:
        """Return number and reason of a request that this rank has not answered; None without one."""
        if not self.store.check([f"stall/{self._next_request}"]):
            return None
        _, why = json.loads(self.store.get(f"stall/{self._next_request}"))
        self._next_request += 1
        return self._next_request - 1, why

    def write_status(self, request: int, status: RankStatus) -> None:
        """Publish the status of this rank."""
        self.store.set(f"stall/{request}/{self._rank}", status.to_json())
        self.store.add(f"stall/{request}/n", 1)

    def count_statuses(self, request: int) -> int:
        """Return how many ranks have published their own status."""
        return int(self.store.add(f"stall/{request}/n", 0))

    def write_status_for(self, request: int, status: RankStatus) -> None:
        """Publish the status of a rank that cannot answer."""
        self.store.set(f"stall/{request}/for/{status.rank}", status.to_json())

    def has_status(self, request: int, rank: int) -> bool:
        """Return whether a rank has published its own status."""
        return bool(self.store.check([f"stall/{request}/{rank}"]))

    def reporter(self, request: int) -> int:
        """Return the lowest rank that has published its own status."""
        return next((rank for rank in range(self._size) if self.has_status(request, rank)), -1)

    def write_report(self, request: int, text: str) -> None:
        """Publish what the reporter found out, for the ranks that requested it."""
        self.store.set(f"stall/{request}/report", text)

    def report(self, request: int) -> str | None:
        """Return what the reporter found out; None until then."""
        key = f"stall/{request}/report"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def statuses(self, request: int) -> dict[int, RankStatus]:
        """Return the statuses so far, including the last ones of ranks that ended, and those published by neighbors.

        A report names every rank: this reads a key of each, on the reporter alone.
        """
        own = {rank: f"stall/{request}/{rank}" for rank in range(self._size)}
        found: dict[int, RankStatus] = {}
        has_all = self.count_statuses(request) >= self._size
        for first in range(0, self._size, _AT_ONCE):
            ranks = range(first, min(first + _AT_ONCE, self._size))
            keys = own if has_all else {rank: key for rank in ranks if (key := self._status_key(request, rank))}
            ranks_found = [rank for rank in ranks if rank in keys]
            values = self.store.multi_get([keys[rank] for rank in ranks_found]) if ranks_found else []
            found.update({rank: RankStatus.from_json(value) for rank, value in zip(ranks_found, values, strict=True)})
        return found

    def _status_key(self, request: int, rank: int) -> str:
        """Return the key of a rank's status; "" without one."""
        keys = (f"stall/{request}/{rank}", f"done/{rank}", f"stall/{request}/for/{rank}")
        return next((key for key in keys if self.store.check([key])), "")
