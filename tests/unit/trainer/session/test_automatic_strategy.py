"""What fit chooses by a plan or by trial steps, and what it says of it."""

from __future__ import annotations

import pytest

from loopwright.planning.table import Plan, Row
from loopwright.trainer.session import automatic_strategy
from loopwright.trainer.session.automatic_strategy import Trial


def plan(memory: float | None = 80e9, note: str = "", **peaks: float) -> Plan:
    rows = [
        Row(name, "", 4, {"parameters": peak}, 1e9, memory=memory, note=note, is_complete=not note)
        for name, peak in peaks.items()
    ]
    return Plan(tuple(rows), 4, memory, left_out={"mesh:tp=4": "3 heads."})


READS = "activations are not counted: the module reads values of tensors"
CASES = [
    (plan(ddp=20e9), (), "ddp", "by the plan it needs 20.00 GB of 80.00 GB"),
    (plan(ddp=90e9, fsdp=30e9), (), "fsdp", "by the plan it needs 30.00 GB of 80.00 GB, and ddp 90.00 GB"),
    (
        plan(ddp=200e9, fsdp=90e9),
        (),
        "fsdp",
        "nothing fits with a tenth to spare, and it needs least: by the plan it needs 90.00 GB of 80.00 GB, and ddp "
        "200.00 GB",
    ),
    (plan(note=READS, ddp=1e9), (), "default", READS),
    (plan(), (), "default", "3 heads"),
    (plan(None, one=1, two=2), (Trial("one", 1.0, 4.0), Trial("two", 1.5, 5.0), Trial("x", None)), "two", "fastest"),
    (plan(None, one=1, two=2), (Trial("x", None, problem="out of memory"),), "one", "memory of devices is not known"),
]


@pytest.mark.parametrize(("found", "trials", "name", "reason"), CASES)
def test_the_plan_or_trial_steps_decide(found: Plan, trials: tuple[Trial, ...], name: str, reason: str) -> None:
    settled = automatic_strategy._chosen("mesh:auto", "default", found, trials)
    assert settled.name == name
    assert reason in settled.reason
    assert f"strategy='mesh:auto' takes {name}: {settled.reason}." in str(settled)
    assert settled.to_dict()["trials"] == [
        {"name": one.name, "step_s": one.step_s, "batches_per_s": one.batches_per_s, "problem": one.problem}
        for one in trials
    ]
    assert ("x: out of memory" in str(settled)) == any(one.problem for one in trials)
