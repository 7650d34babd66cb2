"""A run that is killed at any moment and started again ends with the same bits as one that was left alone.

Each run is a process of its own, forked from one that has imported torch; see tests/support/resume_program.py.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kept import keep
from resume_program import Server, result

from loopwright.checkpoint import storage

KILLED = -9


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def run_to_end(server: Server, name: str, root: Path, faults: list[str]) -> dict[str, Any]:
    """Start the run once with each fault, then until it is done; return its result."""
    for fault in [*faults, ""]:
        status = server.run(name, root, fault)
        assert status in ({KILLED, 0} if fault else {0}), root.with_name(f"{root.name}.log").read_text()
    return result(root)


def assert_same(killed: dict[str, Any], expected: dict[str, Any], faults: list[str]) -> None:
    different = {
        key: (killed[key], expected[key]) for key in expected if key != "calls" and killed[key] != expected[key]
    }
    assert not different, (faults, different)


def uninterrupted(server: Server, name: str, root: Path) -> dict[str, Any]:
    """Return the result of a run that is left alone, and remove its folder: paths are a part of the state."""
    assert server.run(name, root, "count") == 0, root.with_name(f"{root.name}.log").read_text()
    expected = result(root)
    assert expected["left"] == []
    shutil.rmtree(root)
    return expected


# --- at every stage of a save ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", keep(["rich", "reloaded"]))
def test_killed_at_every_stage_of_a_save(name: str, server: Server, tmp_path: Path) -> None:
    root = tmp_path / "run"
    expected = uninterrupted(server, name, root)
    for stage in storage.STAGES:
        for number in (1, 3, 5):
            shutil.rmtree(root, ignore_errors=True)
            faults = [f"stage:{stage}:{number}"]
            assert server.run(name, root, faults[0]) == KILLED
            assert_same(run_to_end(server, name, root, []), expected, faults)


@pytest.mark.slow
def test_killed_at_the_last_saves(server: Server, tmp_path: Path) -> None:
    root = tmp_path / "run"
    for name in ("iterable", "plateau"):
        expected = uninterrupted(server, name, root)
        last = 0
        while server.run(name, root, f"stage:opened:{last + 1}") == KILLED:
            last += 1
            shutil.rmtree(root)
        for number in (last - 1, last):
            for stage in storage.STAGES[:5:2] if number < last else storage.STAGES:
                shutil.rmtree(root, ignore_errors=True)
                fault = f"stage:{stage}:{number}"
                assert server.run(name, root, fault) == KILLED
                assert_same(run_to_end(server, name, root, []), expected, [fault])
        shutil.rmtree(root)


# --- anywhere --------------------------------------------------------------------------------------------------------


def chains(seed: int, calls: int, count: int) -> Iterator[list[str]]:
    """Return faults for several runs: each is killed at random calls of any function, up to three times."""
    draw = random.Random(seed)
    for _ in range(count):
        yield [f"call:{draw.randrange(calls)}" for _ in range(draw.randint(1, 3))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [("rich", 12), ("workers", 4), ("plateau", 5), ("reductions", 5), ("half", 4), ("manual", 4), ("joint", 4)],
)
def test_killed_at_random_points(name: str, count: int, server: Server, tmp_path: Path) -> None:
    root = tmp_path / "run"
    expected = uninterrupted(server, name, root)
    for faults in chains(len(name), expected["calls"], count):
        shutil.rmtree(root, ignore_errors=True)
        assert_same(run_to_end(server, name, root, faults), expected, faults)


@pytest.mark.parametrize(
    "name", keep(["across_epochs", "cycled", "iterable", "weighted", "steps", "joint"], "across_epochs", "iterable")
)
def test_killed_in_each_epoch(name: str, server: Server, tmp_path: Path) -> None:
    root = tmp_path / "run"
    expected = uninterrupted(server, name, root)
    batches = expected["progress"]["total_batches"]
    faults = [f"batch:{batches * part // 4}" for part in (1, 2, 3)]
    assert_same(run_to_end(server, name, root, faults), expected, faults)
