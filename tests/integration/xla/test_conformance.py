"""XLA trains the same weights as one process on the CPU: one device, SPMD on 2 and 4, and with cut parameters."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conformance import STRATEGIES as ENTRIES
from conformance import TOLERANCE, Case, Net, make_fabric, plain_torch, train
from processes import run_task
from torch import Tensor

State = dict[str, Tensor]

ALL = [
    Case("32-true", *one) for one in itertools.product((1, 3), (None, "norm", "value"), ("sgd", "adam"), (False, True))
]
FEW = [Case("32-true", 1), Case("32-true", 3, "norm", "adam", True), Case("32-true", 1, "value", "sgd", True)]
OTHERS = [Case(name, 3, "norm", "sgd", True) for name in ("64-true", "bf16-mixed", "bf16-true")]
UNITS = {"auto_wrap_policy": {"Linear"}}


@cache
def reference(case: Case) -> tuple[State, State]:
    """Return the weights before and after the training of one process on the CPU."""
    before = {name: value.double() for name, value in Net().state_dict().items()}
    if case.precision in ("32-true", "64-true"):
        return before, plain_torch(case)
    whole = Case(case.precision, case.accumulate, case.clip, case.optimizer)
    return before, train(make_fabric(ENTRIES[0], case.precision), whole, "")


def difference(found: State, case: Case) -> float:
    """Return the largest difference, as a share of the largest change of a weight in training."""
    before, wanted = reference(case)
    assert list(found) == list(wanted)
    change = max((wanted[name] - before[name]).abs().max().item() for name in wanted)
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted) / change


# Float32 and float64 differ by the order of additions only, and so by a few units in the last place of a gradient;
# bfloat16 has 8 bits, and XLA keeps products in float32 for longer than the CPU's kernels.
@pytest.mark.parametrize(
    ("devices", "name", "options", "cases"),
    [
        pytest.param(1, "single_xla", {}, ALL[1::4] + FEW + OTHERS, id="one"),
        pytest.param(2, "xla", {}, FEW + OTHERS, id="spmd-2"),
        pytest.param(4, "xla", {}, FEW, id="spmd-4"),
        pytest.param(2, "xla_fsdp", UNITS, FEW + OTHERS[1:], id="fsdp-2"),
        pytest.param(4, "xla_fsdp", {**UNITS, "activation_checkpointing_policy": {"Linear"}}, FEW, id="fsdp-4"),
    ],
)
def test_the_weights_are_those_of_one_process(
    devices: int, name: str, options: dict[str, Any], cases: list[Case], tmp_path: Path
) -> None:
    results = run_task(tmp_path, "train", devices, name, options, cases)
    wrong = {}
    for case, (by_hand, by_trainer) in zip(cases, results, strict=True):
        for how, state in (("by hand", by_hand), ("with the Trainer", by_trainer)):
            found = difference(state, case)
            if found > TOLERANCE[case.precision]:
                wrong[f"{case} {how}"] = found
    assert not wrong
