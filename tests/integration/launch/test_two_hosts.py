"""Two hosts with one rank on each: two network namespaces, a cable between them, and names that do not resolve."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

PROGRAM = """
import json, os, socket, sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw


class Model(lw.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.layer(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator))
    trainer = lw.Trainer(
        accelerator="cpu", strategy="ddp", devices=1, num_nodes=2, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(data, batch_size=2))
    facts = {
        "host": socket.gethostname(), "rank": trainer.global_rank, "node": trainer.node_rank,
        "size": trainer.world_size, "steps": trainer.global_step, "weight": model.layer.weight.tolist(),
    }
    Path(f"node{trainer.node_rank}.json").write_text(json.dumps(facts))
"""
SCRIPT = "train.py"
PORT = "29400"  # nobody else is in the namespace


def problem_with_namespaces() -> str | None:
    """Return why two hosts cannot be made here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"lw{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    try:
        inside = ["ip", "netns", "exec", name, "unshare", "--uts", "hostname", "other"]
        tried = subprocess.run(inside, capture_output=True, text=True, check=False)
        return f"{' '.join(inside[3:])}: {tried.stderr.strip()}" if tried.returncode else None
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of the cable."""

    namespace: str
    interface: str
    address: str
    hostname: str

    def start(self, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a program on this host."""
        rename = f"hostname {self.hostname} && exec "
        line = [
            "ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", rename + '"$@"', "sh", *command,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.interface, **variables}
        return subprocess.Popen(
            line,
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    problem = problem_with_namespaces()
    if problem is not None:
        pytest.skip(f"two hosts need network namespaces: {problem}")
    name = f"lw{os.getpid()}"
    pair = (
        Host(f"{name}a", f"{name}a", "10.231.7.1", "first-host"),
        Host(f"{name}b", f"{name}b", "10.231.7.2", "second-host"),
    )

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for host in pair:
            ip("netns", "add", host.namespace)
        one, other = pair
        ends = ("type", "veth", "peer", "name", other.interface, "netns", other.namespace)
        ip("link", "add", one.interface, "netns", one.namespace, *ends)
        for host in pair:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            ip("-n", host.namespace, "link", "set", host.interface, "up")
            ip("-n", host.namespace, "link", "set", "lo", "up")
        yield pair
    finally:
        for host in pair:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)


def expected_weight() -> torch.Tensor:
    """Return the weight after the same training by hand in one process: each step takes the batches of both ranks."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator)
    weight = torch.zeros(1, 3, requires_grad=True)
    for start in [*range(0, 16, 4)] * 2:
        loss = (x[start : start + 4] @ weight.T - y[start : start + 4]).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    return weight.detach()


def by_launch(rank: int, main: str) -> tuple[list[str], dict[str, str]]:
    options = ["--nnodes", "2", "--node-rank", str(rank), "--main-address", main, "--main-port", PORT]
    return [sys.executable, "-m", "loopwright", "launch", *options, SCRIPT], {}


def by_hand(rank: int, main: str) -> tuple[list[str], dict[str, str]]:
    variables = {"MASTER_ADDR": main, "MASTER_PORT": PORT, "NODE_RANK": str(rank)}
    return [sys.executable, SCRIPT], variables


def by_slurm(rank: int, main: str) -> tuple[list[str], dict[str, str]]:
    variables = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2", "SLURM_NODELIST": f"{main},10.231.7.2",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank),
    }  # fmt: skip
    return [sys.executable, SCRIPT], variables


@pytest.mark.parametrize(
    "way", [by_launch, *(pytest.param(one, marks=pytest.mark.slow) for one in (by_hand, by_slurm))]
)
def test_two_hosts_train_as_one_process_does(
    way: Callable[[int, str], tuple[list[str], dict[str, str]]], hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    (tmp_path / SCRIPT).write_text(PROGRAM)
    processes = []
    for rank, host in enumerate(hosts):
        command, variables = way(rank, hosts[0].address)
        processes.append(host.start(command, tmp_path, variables))
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    found = [json.loads((tmp_path / f"node{node}.json").read_text()) for node in range(2)]
    assert [facts["host"] for facts in found] == ["first-host", "second-host"]
    assert [(facts["rank"], facts["node"], facts["size"], facts["steps"]) for facts in found] == [
        (0, 0, 2, 8),
        (1, 1, 2, 8),
    ]
    assert found[0]["weight"] == found[1]["weight"]
    # The mean of two means in another order than the mean of all: float32 rounding.
    torch.testing.assert_close(torch.tensor(found[0]["weight"]), expected_weight(), rtol=1e-5, atol=1e-6)
