"""The state of the random generators."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from loopwright.data.rng import (
    RngStream,
    capture_generators,
    capture_rng,
    find_generators,
    kinds_that_moved,
    restore_generators,
    restore_rng,
    seed_generators,
)


def through_disk(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def draw() -> list[float]:
    """Odd numbers of normal draws: the generators keep the second one of a pair."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.normal(),
        np.random.rand(),
        torch.rand(()).item(),
        torch.randn(3).sum().item(),
    ]


def test_restored_generators_go_on_as_before() -> None:
    draw()
    state = through_disk(capture_rng())
    expected = draw() + draw()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    restore_rng(state)
    assert draw() + draw() == expected


def test_capturing_draws_nothing() -> None:
    state = capture_rng()
    assert kinds_that_moved(state, capture_rng()) == set()


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_moved_kinds_are_named(kind: str) -> None:
    state = capture_rng()
    {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(())}[kind]()
    assert kinds_that_moved(state, capture_rng()) == {kind}


def test_a_stream_neither_disturbs_nor_notices_the_outside() -> None:
    rows = []
    for outside_draws in (0, 3):
        stream = RngStream(b"key")
        inside = []
        for _ in range(3):
            before = capture_rng()
            with stream:
                inside += draw()
            assert kinds_that_moved(before, capture_rng()) == set()
            for _ in range(outside_draws):
                draw()
        rows.append(inside)
    assert rows[0] == rows[1]
    assert len(set(rows[0])) == len(rows[0])


def test_a_streams_state_goes_through_a_checkpoint() -> None:
    stream = RngStream(b"key")
    with stream:
        draw()
    state = through_disk(stream.state_dict())
    with stream:
        expected = draw()
    again = RngStream(b"other")
    again.load_state_dict(state)
    with again:
        assert draw() == expected


class Holder:
    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.list = [random.Random(1)]
        self.dict = {"new": np.random.default_rng(1), "old": np.random.RandomState(1)}
        self.other = self
        self.same = self.torch
        self.data = torch.zeros(3)
        self.module = torch.nn.Linear(1, 1)

    def draw(self) -> list[float]:
        old = self.dict["old"]
        assert isinstance(old, np.random.RandomState)
        return [
            torch.rand((), generator=self.torch).item(),
            self.list[0].random(),
            self.dict["new"].normal(),
            old.normal(),
        ]


def test_generators_in_attributes_are_found_saved_and_restored() -> None:
    holder = Holder()
    found = find_generators(holder=holder)
    assert sorted(found) == ["holder.dict.new", "holder.dict.old", "holder.list.0", "holder.torch"]
    holder.draw()
    state = through_disk(capture_generators(found))
    expected = holder.draw()
    again = Holder()
    restore_generators(find_generators(holder=again), state)
    assert again.draw() == expected


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_every_numpy_bit_generator_is_saved(bits: Any) -> None:
    holder = {"g": np.random.Generator(bits(3))}
    found = find_generators(holder=holder)
    state = through_disk(capture_generators(found))
    expected = holder["g"].normal(size=3).tolist()
    holder["g"].normal(size=5)
    restore_generators(found, state)
    assert holder["g"].normal(size=3).tolist() == expected


def test_seeding_by_key_repeats() -> None:
    draws = []
    for _ in range(2):
        holder = Holder()
        holder.draw()
        seed_generators(find_generators(holder=holder), b"key")
        draws.append(holder.draw())
    assert draws[0] == draws[1]
