"""Ranks of a node take turns: two orders on one file, as two processes have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from loopwright.fabric import compile_order
from loopwright.fabric.compile_order import RankOrder


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[tuple[RankOrder, RankOrder]]:
    path = str(tmp_path / "a.lock")
    first, other = RankOrder(path, is_first=True), RankOrder(path, is_first=False)
    yield first, other
    other.close()
    first.close()
    assert not list(tmp_path.iterdir())


def test_another_rank_waits_until_the_first_has_compiled(orders: tuple[RankOrder, RankOrder]) -> None:
    first, other = orders
    began, is_done = Event(), Event()

    def follow() -> None:
        began.set()
        other.start()
        is_done.set()

    thread = Thread(target=follow)
    first.start()
    thread.start()
    assert began.wait(30)
    assert not is_done.wait(0.05)
    first.end()
    thread.join(30)
    assert is_done.is_set()


def test_another_rank_that_is_early_waits_for_the_first_to_begin(orders: tuple[RankOrder, RankOrder]) -> None:
    first, other = orders
    thread = Thread(target=other.start)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    first.start()
    first.end()
    thread.join(30)
    assert not thread.is_alive()


def test_nobody_waits_for_what_the_first_never_compiles(
    orders: tuple[RankOrder, RankOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_order, "_GRACE_S", 0.05)
    first, other = orders
    first.start()
    first.end()
    other.start()
    other.start()  # returns, although the first has compiled once
