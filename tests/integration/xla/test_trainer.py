"""The Trainer on XLA: all verbs, no reading of tensors in a step, no compiling in a steady state, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_task
from tasks import TwoOptimizers, points

CONFIGURATIONS = [
    pytest.param(1, "single_xla", "tpu", id="one"),
    pytest.param(2, "xla", "xla", id="spmd-2"),
    pytest.param(4, "xla_fsdp", "tpu", id="fsdp-4"),
]


def growth(lines: list[tuple[int, ...]], epoch: range, column: int) -> int:
    values = [line[column] for line in lines if line[0] in epoch]
    return values[-1] - values[0]


@pytest.mark.parametrize(("devices", "name", "accelerator"), CONFIGURATIONS)
def test_the_trainer_runs_all_verbs_and_reads_nothing_in_a_step(
    devices: int, name: str, accelerator: str, tmp_path: Path
) -> None:
    found: dict[str, Any] = run_task(tmp_path, "verbs", devices, name, accelerator)
    lines = found["lines"]
    assert len(lines) == 64
    assert found["rank"] == (0, 1)
    # One number at a time is read by nobody; what is logged goes in one packed copy.
    assert growth(lines, range(1, 33), 2) == 0
    assert growth(lines, range(33, 65), 2) == 0
    # One graph per step.
    assert growth(lines, range(1, 33), 3) == 31
    # The first two steps differ (optimizer state begins), and so does the first one that is logged. From then on
    # every step of an epoch is the same graph, whatever learning rate the schedule gives.
    assert growth(lines, range(11, 33), 1) == 0
    assert growth(lines, range(43, 65), 1) == 0
    assert found["validate"] == found["test"]
    assert found["validate"][0]["acc"] > 0.9
    assert found["predict"] == [("cpu", (16, 2))] * 16
    assert {"XLAStatsMonitor/compiled_graphs", "XLAStatsMonitor/reads", "loss_step"} <= set(found["columns"])
    assert set(found["saved"].values()) == {"cpu"}
    assert found["same"]
    assert found["resumed"] == [96, 128]
    whole, part = found["exact"]
    assert all(torch.equal(value, part[key]) for key, value in whole.items())


@pytest.mark.parametrize(("devices", "name"), [(1, "single_xla"), (2, "xla")])
def test_two_optimizers_make_one_graph_per_step(devices: int, name: str, tmp_path: Path) -> None:
    state, per_step = run_task(tmp_path, "manual", devices, name)
    assert per_step == 1
    module = TwoOptimizers()
    optimizers = module.configure_optimizers()
    for batch in points()[0].split(8):
        for optimizer in optimizers:
            module.zero_grad()  # of the other optimizer's parameters, too: their gradients are not used
            module.two(module.one(batch).tanh()).square().mean().backward()
            optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(state[name].float(), value, rtol=1e-4, atol=1e-6)
