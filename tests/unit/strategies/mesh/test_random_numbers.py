"""Random numbers of pipelined steps and of parts of sequences."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy
import pytest
import torch

from loopwright.strategies.mesh.random_numbers import StepNumbers, own_numbers

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed()


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def run(numbers: StepNumbers, order: Iterable[int], *, inside: int = 3) -> dict[int, list[tuple[float, ...]]]:
    """Run steps of micro-batches: each draws before the blocks and in one of them."""
    found: dict[int, list[tuple[float, ...]]] = {}
    with numbers.window("window"):
        for number in order:
            numbers.start(number)
            before = draw()
            numbers.leave_step()
            numbers.seed(0)
            for _ in range(inside):
                within = draw()
            found.setdefault(number, []).append((*before, *within))
    return found


def test_what_is_drawn_before_the_blocks_continues_as_without_blocks() -> None:
    expected = [draw() for _ in range(4)]
    seed()
    numbers = StepNumbers(CPU)
    first, second = run(numbers, range(2)), run(numbers, range(2))
    found = [one[number][0][:3] for one in (first, second) for number in range(2)]
    assert found == expected


def test_several_stages_of_a_rank_see_the_same() -> None:
    found = run(StepNumbers(CPU), [0, 1, 0, 2, 1, 2])
    assert all(first == second for first, second in found.values())
    assert len({one[0] for one in found.values()}) == 3


def test_windows_and_micro_batches_draw_different_numbers_in_blocks() -> None:
    numbers = StepNumbers(CPU)
    seen = set()
    for _ in range(3):
        with numbers.window("window"):
            for number in range(2):  # nothing is drawn before the blocks
                numbers.start(number)
                numbers.leave_step()
                for place in range(2):
                    numbers.seed(place)
                    seen.add(torch.rand(()).item())
    assert len(seen) == 3 * 2 * 2


def test_a_module_beside_the_blocks_does_not_move_the_generators() -> None:
    numbers = StepNumbers(CPU)
    with numbers.window("evaluation"):
        numbers.start(0)
        before = torch.get_rng_state()
        with numbers.beside("embed"):
            first = torch.rand(())
        assert torch.equal(torch.get_rng_state(), before)
        with numbers.beside("head"):
            assert torch.rand(()) != first


def draw_part(rank: int, count: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(3)
    with own_numbers(rank, CPU):
        inside = torch.rand(count).tolist()
    return inside, torch.rand(2).tolist()


def test_ranks_draw_differently_and_continue_alike() -> None:
    (first, after), (second, after_second) = draw_part(0, 4), draw_part(1, 4)
    assert first != second
    assert after == after_second
    torch.manual_seed(3)
    assert torch.rand(4).tolist() == first  # what one process draws


def test_without_draws_nothing_changes() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2).tolist()
    assert [draw_part(rank, 0)[1] for rank in range(2)] == [wanted, wanted]


def test_a_second_call_draws_other_numbers() -> None:
    torch.manual_seed(3)
    seen = []
    for _ in range(2):
        with own_numbers(1, CPU):
            seen.append(torch.rand(4).tolist())
    assert seen[0] != seen[1]
