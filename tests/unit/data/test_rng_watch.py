"""`RngWatch` tells each draw from a global generator, and takes back those of Python and torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from loopwright.data.rng import capture_rng, kinds_that_moved, restore_kinds
from loopwright.data.rng_watch import RngWatch

DRAWS: dict[str, tuple[str, Callable[[], Any]]] = {
    "random.random": ("python", random.random),
    "a whole state of random words": ("python", lambda: [random.getrandbits(32) for _ in range(624)]),
    "random.gauss": ("python", lambda: random.gauss(0, 1)),
    "torch.rand": ("torch", lambda: torch.rand(())),
    "a whole state of torch's words": ("torch", lambda: torch.randint(2**31, (624,), dtype=torch.int32)),
    "torch.randn": ("torch", lambda: torch.randn(2)),
    "numpy": ("numpy", lambda: np.random.rand()),
    "a new seed of numpy": ("numpy", lambda: np.random.seed(3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_told(name: str) -> None:
    kind, draw = DRAWS[name]
    watch = RngWatch()
    watch.begin()
    assert watch.moved() == []
    draw()
    assert watch.moved() == [kind]
    watch.begin()
    assert watch.moved() == []


def test_the_second_number_of_a_pair_is_told() -> None:
    random.seed(1)
    random.gauss(0, 1)
    watch = RngWatch(["python"])
    watch.begin()
    random.gauss(0, 1)  # it was kept from the first call: the state's words stay
    assert watch.moved() == ["python"]


@pytest.mark.parametrize("draws", [1, 700])
def test_put_back_takes_a_draw_back_and_returns_where_it_was(draws: int) -> None:
    random.seed(5)
    random.gauss(0, 1)
    torch.manual_seed(5)
    before = capture_rng()
    watch = RngWatch(["python", "torch"])
    watch.begin()
    expected = [(random.gauss(0, 1), torch.randn(()).item()) for _ in range(draws)]
    states = {kind: watch.put_back(kind) for kind in watch.moved()}
    assert not kinds_that_moved(before, capture_rng())
    random.seed(6)
    torch.manual_seed(6)
    restore_kinds(states)
    assert [(random.gauss(0, 1), torch.randn(()).item()) for _ in range(draws)] == expected


def test_without_access_to_memory_the_states_themselves_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from loopwright.data import rng_watch

    monkeypatch.setattr(rng_watch, "_unpacked", lambda state, gauss: None)  # another layout
    monkeypatch.setitem(rng_watch._READERS, "python", rng_watch._read_python.__wrapped__)
    watch = RngWatch(["python"])
    assert watch._read[0] is random.getstate
    watch.begin()
    state = random.getstate()
    random.random()
    assert watch.moved() == ["python"]
    watch.put_back("python")
    assert random.getstate() == state
