"""The program of docs/torchft.md with torchft's LocalSGD and DiLoCo under Fabric."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

coordination = pytest.importorskip("torchft.coordination")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[3] / "docs" / "torchft.md"
NUM_ROUNDS, SYNC_EVERY, KILLED_AT = 20, 5, 33
# Before the program: numbers in float64, and a row for each step. Group 1 dies at a step; group 0 waits, once it is
# three rounds further, until group 1 is there again.
BEFORE = f"""
import os, signal, time, torch
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook
torch.set_default_dtype(torch.float64)
count, is_second, dies = 0, Path("died").exists(), Path("dies").exists()
def after_step(optimizer, *_):
    global count
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    count += 1
    group = os.environ["REPLICA_GROUP_ID"]
    if dies and group == "1" and count == {KILLED_AT} and not is_second:
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    Path("back").touch() if is_second else None
    while dies and group == "0" and count == {KILLED_AT} + 3 * {SYNC_EVERY} and not Path("back").exists():
        time.sleep(0.01)
register_optimizer_step_post_hook(after_step)
"""


def program(method: str) -> str:
    blocks = PAGE.read_text(encoding="utf-8").split("```python no-run\n")[1:]
    code = next(block.split("```")[0] for block in blocks if "DiLoCo(" in block)
    chosen = 'METHOD, NUM_GROUPS, SYNC_EVERY, NUM_ROUNDS = "{}", 2, {}, {}'
    assert chosen.format("diloco", SYNC_EVERY, NUM_ROUNDS) in code
    return BEFORE + code.replace(
        chosen.format("diloco", SYNC_EVERY, NUM_ROUNDS), chosen.format(method, SYNC_EVERY, NUM_ROUNDS)
    )


def run_groups(folder: Path, method: str) -> list[dict[str, torch.Tensor]]:
    """Return the last weights of both groups; group 1 is started again when it was killed."""
    needed = 1 if (folder / "dies").exists() else 2  # else the group that starts first trains alone for a while
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=needed, join_timeout_ms=10_000, heartbeat_timeout_ms=1000, quorum_tick_ms=20
    )

    def start(group: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "REPLICA_GROUP_ID": str(group), "TORCHFT_LIGHTHOUSE": lighthouse.address()}
        with open(folder / f"log-{group}.txt", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", program(method)],
                cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
            )  # fmt: skip

    running = {group: start(group) for group in range(2)}
    try:
        if (folder / "dies").exists():
            assert running[1].wait(100) == -signal.SIGKILL
            running[1] = start(1)
        for group, process in running.items():
            assert process.wait(100) == 0, (folder / f"log-{group}.txt").read_text()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
        lighthouse.shutdown()
    return [torch.load(folder / f"group-{group}.pt") for group in range(2)]


def simulated(method: str) -> dict[str, torch.Tensor]:
    """Return the weights of two groups in one process, in plain torch."""
    torch.manual_seed(1)
    data = torch.randn(2 * SYNC_EVERY * NUM_ROUNDS, 8, 4, dtype=torch.float64)
    shared = torch.nn.Linear(4, 1, dtype=torch.float64)
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    nets = [copy.deepcopy(shared) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    for number, samples in enumerate(data):
        net, optimizer = nets[number % 2], optimizers[number % 2]
        optimizer.zero_grad()
        (net(samples) - 1).square().mean().backward()
        optimizer.step()
        if (number + 1) % (2 * SYNC_EVERY):
            continue
        with torch.no_grad():
            for whole, *parts in zip(shared.parameters(), *(net.parameters() for net in nets), strict=True):
                mean = (parts[0] + parts[1]) / 2
                whole.grad = whole - mean
                if method == "local_sgd":
                    whole.copy_(mean)
        if method == "diloco":
            outer.step()
        for net in nets:
            net.load_state_dict(shared.state_dict())
    return shared.state_dict()


@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_two_groups_equal_a_simulation(tmp_path: Path, method: str) -> None:
    for weights in run_groups(tmp_path, method):
        torch.testing.assert_close(weights, simulated(method), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_a_killed_group_heals_and_groups_end_equal(tmp_path: Path, method: str) -> None:
    (tmp_path / "dies").touch()
    first, second = run_groups(tmp_path, method)
    assert (tmp_path / "back").exists()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert "healing is required" in (tmp_path / "log-1.txt").read_text()
