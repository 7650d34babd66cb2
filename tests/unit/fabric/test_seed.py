from __future__ import annotations

import io
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from loopwright.errors import CheckpointError, ConfigError
from loopwright.fabric import (
    isolate_rng,
    pl_worker_init_function,
    reset_seed,
    rng_state,
    seed_everything,
    set_rng_state,
)
from loopwright.fabric.seed import choose_rank_states, merge_rank_states


@pytest.fixture(autouse=True)
def _generators_and_variables_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)
    with isolate_rng():
        yield


def draw() -> tuple[Any, ...]:
    numbers: list[Any] = [random.random(), random.gauss(0, 1), torch.rand(3).tolist()]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        numbers += [numpy.random.rand(3).tolist(), numpy.random.normal()]
    return tuple(numbers)


def test_the_same_seed_gives_the_same_numbers_everywhere() -> None:
    assert seed_everything(7) == 7
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert draw() != first


def test_the_seeds_are_those_of_the_libraries_themselves() -> None:
    seed_everything(5)
    assert random.random() == random.Random(5).random()
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(5)))


def test_the_environment_tells_other_processes() -> None:
    seed_everything(7, workers=True)
    assert (os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]) == ("7", "1")
    seed_everything(7)
    assert os.environ["PL_SEED_WORKERS"] == "0"


def test_without_a_seed_the_environment_gives_it() -> None:
    os.environ["PL_GLOBAL_SEED"] = "11"
    assert seed_everything() == 11
    os.environ["PL_GLOBAL_SEED"] = "eleven"
    with pytest.raises(ConfigError, match="PL_GLOBAL_SEED to be an integer, got 'eleven'"):
        seed_everything()


def test_without_any_seed_it_is_0_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="it uses 0"):
        assert seed_everything() == 0


@pytest.mark.parametrize(("seed", "expected"), [("3", 3), (3.0, 3), (True, 1), (0, 0), (2**32 - 1, 2**32 - 1)])
def test_what_is_no_int_goes_through_int(seed: Any, expected: int) -> None:
    assert seed_everything(seed) == expected


@pytest.mark.parametrize("seed", [-1, 2**32, "x", 3.5, [], float("nan"), float("inf")])
def test_a_wrong_seed_is_an_error_that_shows_it(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed"):
        seed_everything(seed)


def test_verbose_logs_the_seed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    seed_everything(3, verbose=False)
    assert not caplog.text
    seed_everything(3)
    assert "Seed set to 3" in caplog.text


def test_reset_seed_seeds_again() -> None:
    reset_seed()
    seed_everything(9, workers=True)
    first = draw()
    reset_seed()
    assert draw() == first
    assert os.environ["PL_SEED_WORKERS"] == "1"


def test_reset_seed_names_a_variable_that_is_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "abc")
    with pytest.raises(ConfigError, match="environment variable PL_GLOBAL_SEED to be an integer, got 'abc'"):
        reset_seed()


def test_the_state_goes_out_and_in_bit_for_bit() -> None:
    seed_everything(1)
    random.gauss(0, 1)  # half of a pair is now kept for the next call
    draw()
    state = rng_state()
    expected = [draw() for _ in range(3)]
    seed_everything(99)
    set_rng_state(state)
    assert [draw() for _ in range(3)] == expected


def test_the_state_loads_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = draw()
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True))
    assert draw() == expected


def test_a_state_in_a_wrong_form_is_an_error() -> None:
    state = rng_state()
    state["torch"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="random generators cannot be restored"):
        set_rng_state(state)


def test_isolation_holds_after_an_error() -> None:
    seed_everything(1)
    expected = draw()
    seed_everything(1)
    with pytest.raises(KeyError), isolate_rng(include_cuda=False):  # noqa: PT012
        draw()
        raise KeyError
    assert draw() == expected


def test_workers_ranks_and_epochs_have_their_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_worker(base: int, worker: int, rank: int | None) -> tuple[Any, ...]:
        torch.manual_seed(base + worker)  # as the DataLoader does
        pl_worker_init_function(worker, rank)
        return draw()

    seen = [in_worker(base, worker, rank) for base in (5, 6) for worker in (0, 1) for rank in (0, 1)]
    for kind in range(len(seen[0])):
        assert len({str(numbers[kind]) for numbers in seen}) == 8
    assert in_worker(5, 1, 0) == seen[2]
    monkeypatch.setenv("RANK", "1")
    assert in_worker(5, 0, None) == seen[1]


@pytest.mark.gpu
def test_the_state_of_a_card_goes_out_and_in() -> None:
    torch.cuda.manual_seed_all(3)
    torch.rand(5, device="cuda")
    state = rng_state()
    expected = torch.rand(5, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)
    assert "cuda" not in rng_state(include_cuda=False)


def test_loopwrights_own_variable_is_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setenv("LOOPWRIGHT_SEED", "12")
    assert seed_everything() == 12


def test_a_new_rank_continues_alike_where_all_were_and_differs_where_they_differed() -> None:
    states = []
    for rank in range(2):
        random.seed(1)
        torch.manual_seed(rank)
        states.append(rng_state())
    content = {"own": [{"rng": states[0]}], "step": 3}
    merged = merge_rank_states(content, lambda found: [dict.fromkeys(found, state) for state in states])
    assert merged["step"] == 3
    for rank in range(2):  # fewer ranks than saved: each its own
        assert torch.equal(choose_rank_states(merged, rank)["own"][0]["rng"]["torch"], states[rank]["torch"])
    drawn = []
    for rank in (0, 2, 3):
        set_rng_state(choose_rank_states(merged, rank)["own"][0]["rng"])
        drawn.append((random.random(), torch.rand(1).item()))
    assert len({python for python, _ in drawn}) == 1
    assert len({number for _, number in drawn}) == 3
    assert choose_rank_states({"rng": states[1]}, 5)["rng"] is states[1]  # saved by one process
    others = merge_rank_states(content, lambda found: None)  # on ranks that do not write
    assert [state is states[0] for state in others["own"][0]["rng"]["ranks"]] == [True]
