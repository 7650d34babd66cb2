"""Real agents of torchrun that fail, end and join."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

TRAIN = """
import os, pathlib, sys, time
import torch
import loopwright as lw
from torch.utils.data import DataLoader, TensorDataset

folder, pause_s, fails = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "fails"
if fails and os.environ["RANK"] == "1" and not (folder / "failed").exists():
    (folder / "failed").touch()
    sys.exit(3)  # before it connects: rank 0 waits, and its agent restarts it without counting that

class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        return (self.layers(batch[0]) - batch[1]).pow(2).mean()
    def on_train_batch_end(self, *args):
        if self.trainer.at_step_boundary:
            with open(folder / "steps", "a") as file:
                file.write(f"{time.time()} {self.trainer.global_step} {self.trainer.world_size}\\n")
            time.sleep(pause_s)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)

lw.seed_everything(1)
data = DataLoader(TensorDataset(torch.randn(160, 4), torch.randn(160, 1)), batch_size=4, shuffle=True)
saves = lw.ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=1)
trainer = lw.Trainer(
    max_epochs=3, accelerator="cpu", global_batch_size=8, logger=False, enable_progress_bar=False, callbacks=[saves]
)
net = Net()
trainer.fit(net, data, ckpt_path="last")
if trainer.is_global_zero:
    torch.save(net.state_dict(), folder / "end.pt")
"""


class Agents:
    """Agents of one job, which run TRAIN in one process each."""

    def __init__(self, folder: Path, command: list[str], *program: str, **variables: str) -> None:
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [
            sys.executable, "-m", *command, "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "job",
            "--rdzv-conf", "last_call_timeout=2", "--nproc-per-node", "1", "--max-restarts", "3",
            str(folder / "train.py"), str(folder), *program,
        ]  # fmt: skip
        self.variables = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.folder / f"agent{len(self.agents)}.log", "wb") as log:
            agent = subprocess.Popen(
                self.command, env=self.variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.agents.append(agent)
        # The agent that binds the port first holds the rendezvous: it must be the first one, which no test kills.
        ends = time.monotonic() + 120
        while len(self.agents) == 1 and not self.listens():
            assert time.monotonic() < ends, self.said()
            time.sleep(0.05)
        return agent

    def listens(self) -> bool:
        """Return whether an agent holds the store of the rendezvous."""
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def steps(self) -> list[tuple[float, int, int]]:
        """Return time, step and number of ranks of each step that a rank has made."""
        file = self.folder / "steps"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(float(when), int(step), int(size)) for when, step, size in map(str.split, lines)]

    def until(self, is_so: Callable[[float, int, int], bool], limit_s: float = 120) -> None:
        ends = time.monotonic() + limit_s
        while not any(is_so(*step) for step in self.steps()):
            assert time.monotonic() < ends, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self.folder.glob("agent*.log")))


@contextmanager
def running(agents: Agents) -> Iterator[Agents]:
    try:
        yield agents
    finally:
        for agent in agents.agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its worker, as a lost machine does."""
    workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for process in (*map(int, workers), agent.pid):
        os.kill(process, signal.SIGKILL)
    agent.wait()


def undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    command = ["torch.distributed.run", "--nproc-per-node=2", str(folder / "train.py"), str(folder), "0", ""]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    return torch.load(folder / "end.pt", weights_only=True)


LAUNCH = ["loopwright", "launch", "--local-address", "127.0.0.1"]
TORCHRUN = ["torch.distributed.run", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]


@pytest.mark.parametrize(
    ("command", "variables"), [(LAUNCH, {}), (TORCHRUN, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})],
    ids=["loopwright launch", "torchrun"],
)  # fmt: skip
def test_a_machine_is_lost_and_another_joins(tmp_path: Path, command: list[str], variables: dict[str, str]) -> None:
    with running(Agents(tmp_path, [*command, "--nnodes", "1:2"], "0.2", "", **variables)) as agents:
        first = agents.start()
        second = agents.start()
        agents.until(lambda when, step, size: step >= 8 and size == 2)
        kill(second)
        agents.until(lambda when, step, size: size == 1)
        reached = max(step for _, step, _ in agents.steps())
        agents.until(lambda when, step, size: step >= reached + 4 and size == 1)
        alone = time.time()
        third = agents.start()
        agents.until(lambda when, step, size: when > alone and size == 2)
        assert first.wait(120) == 0, agents.said()
        assert third.wait(120) == 0, agents.said()
        times = sorted(when for when, _, _ in agents.steps())
    end, expected = torch.load(tmp_path / "end.pt", weights_only=True), undisturbed(tmp_path / "undisturbed")
    for name, value in expected.items():
        # One rank adds the same micro-batches, in another order.
        torch.testing.assert_close(end[name], value, rtol=0, atol=1e-6)
    assert max(later - earlier for earlier, later in pairwise(times)) < 60


def test_agents_that_counted_another_number_of_restarts_meet(tmp_path: Path) -> None:
    # A fixed number of machines, and the store that torchrun shares by default.
    with running(Agents(tmp_path, [*TORCHRUN, "--nnodes", "2"], "0", "fails")) as agents:
        for agent in (agents.start(), agents.start()):
            assert agent.wait(120) == 0, agents.said()
    assert (tmp_path / "failed").exists()
    end, expected = torch.load(tmp_path / "end.pt", weights_only=True), undisturbed(tmp_path / "undisturbed")
    assert all(torch.equal(end[name], value) for name, value in expected.items())
