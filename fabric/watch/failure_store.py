"""What the ranks' watches tell each other through the store.

bell              a counter: something happened; each rank looks at it some times per second, and at the rest only
                  when it rang
failure/<k>       k-th failure, as JSON: written once, by compare_set, so that all ranks see one order
seen              how many ranks have read a failure, or that rank 0 is done: then the store may go
peer/<rank>       who a rank is; machine/<key>/<i> the same for those of one machine
beat/<rank>       a count that grows each second, and where the rank is
done/<rank>       the rank ended regularly
stall/<k>         the k-th question where everybody stands; stall/<k>/<rank> the answers; stall/<k>/for/<rank>
                  what a neighbour found out about a rank that cannot answer
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..failure import Failure
from .peers import Peer
from .stall import Standing

__all__ = ["Board", "Record"]


@dataclass(frozen=True, slots=True)
class Record:
    """A failure, as it is written down.

    Attributes:
        run: Which run it was in: the first, second, ... that the trainer began on the rank that wrote it.
        by: The rank that wrote it.
        failure: What failed.
    """

    run: int
    by: int
    failure: Failure

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps({"run": self.run, "by": self.by, "failure": self.failure.to_json()})

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Return it from text."""
        values = json.loads(text)
        return cls(values["run"], values["by"], Failure.from_json(values["failure"]))


class Board:
    """Reads and writes the keys above.

    Args:
        store: A torch.distributed store, with a connection of its own.
        rank: This rank.
        size: Number of ranks.
    """

    # Any: importing torch.distributed costs time that one process need not pay
    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        self.store = store
        self._rank = rank
        self._size = size
        self._heard = 0
        self._next_failure = 0
        self._next_question = 0
        self._machine = ""
        self._known_on_machine = 0
        self._has_all = False

    # --- the bell ----------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Make all ranks look."""
        self.store.add("bell", 1)

    def has_rung(self) -> bool:
        """Whether the bell rang since the last time."""
        count = int(self.store.add("bell", 0))
        has_rung, self._heard = count != self._heard, count
        return has_rung

    # --- failures ----------------------------------------------------------------------------------------------------

    def write_failure(self, record: Record) -> Record:
        """Write a failure down, unless there is one of the same run or a later one already.

        Returns:
            The first failure of this run: the given one, or the one that was there.
        """
        text, number = record.to_json(), self._next_failure
        while True:
            found = self.store.compare_set(f"failure/{number}", "", text)
            if found == text.encode():
                self.ring()
                return record
            other = Record.from_json(found)
            if other.run >= record.run:
                return other
            number += 1

    def new_failures(self) -> list[Record]:
        """Return the failures that were written since the last call."""
        records = []
        while self.store.check([f"failure/{self._next_failure}"]):
            records.append(Record.from_json(self.store.get(f"failure/{self._next_failure}")))
            self._next_failure += 1
        return records

    def note_seen(self, what: str) -> None:
        """Tell rank 0, whose process may hold the store, that this rank has read something."""
        self.store.add(f"seen/{what}", 1)

    def count_seen(self, what: str) -> int:
        """Return how many ranks have read it."""
        return int(self.store.add(f"seen/{what}", 0))

    # --- who is here -------------------------------------------------------------------------------------------------

    def introduce(self, peer: Peer) -> None:
        """Say who this rank is."""
        text = json.dumps(peer.to_dict())
        self._machine = peer.machine
        self.store.set(f"peer/{self._rank}", text)
        place = self.store.add(f"machine/{peer.machine}", 1)
        self.store.set(f"machine/{peer.machine}/{place}", text)
        self.store.add("peers", 1)

    def new_neighbours(self) -> list[Peer]:
        """Return the ranks on this machine that were not known before; never this one."""
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
        """Whether every rank has introduced itself."""
        return int(self.store.add("peers", 0)) >= self._size

    def peer(self, rank: int) -> Peer | None:
        """Return who a rank is; None if it has not said so."""
        if not self.store.check([f"peer/{rank}"]):
            return None
        return Peer(**json.loads(self.store.get(f"peer/{rank}")))

    # --- signs of life -----------------------------------------------------------------------------------------------

    def beat(self, count: int, place: dict[str, Any]) -> None:
        """Say that this rank lives, and where it is."""
        self.store.set(f"beat/{self._rank}", json.dumps([count, place], default=str))

    def beats(self, ranks: list[int]) -> dict[int, tuple[int, dict[str, Any]]]:
        """Return count and place of ranks that have introduced themselves."""
        values = self.store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        return {rank: tuple(json.loads(value)) for rank, value in zip(ranks, values, strict=True)}

    def place_of(self, rank: int) -> dict[str, Any]:
        """Return where a rank was, as it said last."""
        if not self.store.check([f"beat/{rank}"]):
            return {}
        place: dict[str, Any] = json.loads(self.store.get(f"beat/{rank}"))[1]
        return place

    def write_done(self) -> None:
        """Say that this rank ends regularly."""
        self.store.set(f"done/{self._rank}", "1")
        self.ring()

    def is_done(self, rank: int) -> bool:
        """Whether a rank ended regularly."""
        return bool(self.store.check([f"done/{rank}"]))

    # --- where everybody stands --------------------------------------------------------------------------------------

    def ask(self, why: str) -> int:
        """Ask all ranks where they stand, or join a question that was just asked.

        Returns:
            The number of the question.
        """
        number = self._next_question
        text = json.dumps([self._rank, why])
        if self.store.compare_set(f"stall/{number}", "", text) == text.encode():
            self.ring()
        return number

    def new_question(self) -> tuple[int, str] | None:
        """Return number and reason of a question that this rank has not answered; None if there is none."""
        if not self.store.check([f"stall/{self._next_question}"]):
            return None
        _, why = json.loads(self.store.get(f"stall/{self._next_question}"))
        self._next_question += 1
        return self._next_question - 1, why

    def answer(self, question: int, standing: Standing) -> None:
        """Answer for this rank."""
        self.store.set(f"stall/{question}/{self._rank}", standing.to_json())
        self.store.add(f"stall/{question}/n", 1)

    def count_answers(self, question: int) -> int:
        """Return how many ranks answered for themselves."""
        return int(self.store.add(f"stall/{question}/n", 0))

    def answer_for(self, question: int, standing: Standing) -> None:
        """Say what is known of a rank that cannot answer."""
        self.store.set(f"stall/{question}/for/{standing.rank}", standing.to_json())

    def has_answered(self, question: int, rank: int) -> bool:
        """Whether a rank answered for itself."""
        return bool(self.store.check([f"stall/{question}/{rank}"]))

    def answers(self, question: int) -> dict[int, Standing]:
        """Return the answers so far, those that neighbours gave included."""
        found = {}
        for rank in range(self._size):
            for key in (f"stall/{question}/{rank}", f"stall/{question}/for/{rank}"):
                if self.store.check([key]):
                    found[rank] = Standing.from_json(self.store.get(key))
                    break
        return found
