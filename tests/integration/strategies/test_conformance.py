"""Every strategy trains the same weights as one process; see tests/support/conformance.py for the table."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import conformance
import pytest
import torch
from conformance import (
    STRATEGIES,
    TOLERANCE,
    Case,
    Entry,
    State,
    cases_of,
    make_fabric,
    plain_torch,
    train_all,
    train_all_by_trainer,
)
from ranks import import_deepspeed, run_ranks

from loopwright.strategies import STRATEGY_REGISTRY

Both = tuple[list[State], list[State]]  # by hand on Fabric, and with the Trainer


def on_ranks(rank: int, size: int, entry: Entry, cases: list[Case], folder: str) -> Both:
    fabric = make_fabric(entry, cases[0].precision)
    fabric.launch()
    return train_all(fabric, cases, folder), train_all_by_trainer(entry, cases, folder)


def by_ranks(entry: Entry, cases: list[Case], folder: Path) -> list[Both]:
    if entry.name.startswith("deepspeed"):
        import_deepspeed()
    return run_ranks(on_ranks, entry.size, entry, cases, str(folder), connect=False)


def by_launcher(entry: Entry, cases: list[Case], folder: Path) -> list[Both]:
    by_hand = make_fabric(entry, cases[0].precision).launch(train_all, cases, str(folder))
    return [(by_hand, train_all_by_trainer(entry, cases, str(folder)))]


def by_script(entry: Entry, cases: list[Case], folder: Path) -> list[Both]:
    torch.save((entry, cases), folder / "task")
    script = Path(__file__).parents[2] / "support" / "conformance_program.py"
    done = subprocess.run([sys.executable, script, folder], timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    both: Both = torch.load(folder / "states")
    return [both]


STARTS: dict[str, Callable[[Entry, list[Case], Path], list[Both]]] = {
    "ranks": by_ranks,
    "fork": by_launcher,
    "spawn": by_launcher,
    "popen": by_script,
}


@cache
def reference(case: Case) -> tuple[State, State]:
    """Return the weights before and after the training of one process: by hand, or by Fabric for its precision."""
    before = {name: value.double() for name, value in conformance.Net().state_dict().items()}
    if case.precision in ("32-true", "64-true"):
        return before, plain_torch(case)
    whole = Case(case.precision, case.accumulate, case.clip, case.optimizer)
    return before, conformance.train(make_fabric(STRATEGIES[0], case.precision), whole, "")


def difference(found: State, case: Case) -> float:
    """Return the largest difference from one process, as a share of the largest change in training."""
    before, wanted = reference(case)
    assert list(found) == list(wanted)
    change = max((wanted[name] - before[name]).abs().max().item() for name in wanted)
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted) / change


TABLE: list[Any] = [
    # Fresh interpreters for each case take long, and their start is tested with the launchers. A variant of a strategy
    # has the precision of that strategy: in float64 it shows what is its own.
    pytest.param(
        entry,
        precision,
        id=f"{entry}-{precision}",
        marks=[pytest.mark.slow]
        * (entry.launcher in ("spawn", "popen") or (entry.is_variant and precision != "64-true")),
    )
    for entry in STRATEGIES
    for precision in entry.precisions
]


@pytest.mark.parametrize(("entry", "precision"), TABLE)
def test_the_weights_are_those_of_one_process(entry: Entry, precision: str, tmp_path: Path) -> None:
    assert not differences(entry, precision, tmp_path)


@pytest.mark.parametrize("size", [1, 2])
def test_the_strategy_of_the_documentation_gives_the_weights_of_one_process(size: int, tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "write-a-strategy.md"
    (source, *_) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    try:
        exec(compile(source, str(page), "exec"), {"__name__": __name__})
        assert not differences(Entry("all_reduce", size), "64-true", tmp_path)
    finally:
        STRATEGY_REGISTRY.remove("all_reduce")


def differences(entry: Entry, precision: str, tmp_path: Path) -> dict[str, float]:
    """Return what differs from one process by more than the tolerance: rank and case -> largest difference."""
    cases = cases_of(entry, precision)
    wrong = {}
    for rank, (by_hand, by_trainer) in enumerate(STARTS[entry.launcher](entry, cases, tmp_path)):
        for case, state, other in zip(cases, by_hand, by_trainer, strict=True):
            found = difference(state, case)
            if found > (0 if entry.is_exact else TOLERANCE[precision]):
                wrong[f"rank {rank}: {case}"] = found
            found = difference(other, case)
            # A loop by hand on Fabric and the Trainer are the same computation: the same bits. With half weights the
            # Trainer has half targets as well, and the loop by hand has float32 ones.
            is_same = all(torch.equal(value, other[name]) for name, value in state.items())
            must_be_same = entry.is_one_recipe and precision not in ("16-true", "bf16-true")
            if found > TOLERANCE[precision] or (must_be_same and not is_same):
                wrong[f"rank {rank}: {case}, with the Trainer"] = found
    return wrong
