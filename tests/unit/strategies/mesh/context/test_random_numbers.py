from __future__ import annotations

import torch

from loopwright.strategies.mesh.context.random_numbers import own_numbers

CPU = torch.device("cpu")


def draw(rank: int, count: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(3)
    with own_numbers(rank, CPU):
        inside = torch.rand(count).tolist()
    return inside, torch.rand(2).tolist()


def test_ranks_draw_differently_and_continue_alike() -> None:
    (first, after), (second, after_second) = draw(0, 4), draw(1, 4)
    assert first != second
    assert after == after_second
    torch.manual_seed(3)
    assert torch.rand(4).tolist() == first  # what one process draws


def test_without_draws_nothing_changes() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2).tolist()
    assert [draw(rank, 0)[1] for rank in range(2)] == [wanted, wanted]


def test_a_second_call_draws_other_numbers() -> None:
    torch.manual_seed(3)
    seen = []
    for _ in range(2):
        with own_numbers(1, CPU):
            seen.append(torch.rand(4).tolist())
    assert seen[0] != seen[1]
