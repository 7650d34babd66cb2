"""Real agents of torchrun that fail, end and join."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytestmark = pytest.mark.slow

TRAIN = """
import json, os, pathlib, signal, sys, time

folder, options = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
RANK = int(os.environ["RANK"])

def strike(place, step):
    # The first entry of the plan whose ranks have not all been killed: by themselves, as the kernel would.
    for number, entry in enumerate(options.get("plan", [])):
        marks = [folder / f"killed-{number}-{rank}" for rank in entry["ranks"]]
        if all(mark.exists() for mark in marks):
            continue
        mine = folder / f"killed-{number}-{RANK}"
        if entry["place"] == place and step >= entry["step"] and mine in marks and not mine.exists():
            mine.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return

strike("start", 10**9)
if options.get("fails") and RANK == 1 and not (folder / "failed").exists():
    (folder / "failed").touch()
    sys.exit(3)  # before it connects: rank 0 waits, and its agent restarts it without counting that

import torch
import loopwright as lw
from loopwright.checkpoint import storage
from torch.utils.data import DataLoader, TensorDataset

class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        self.read = []
    def on_train_start(self):
        self.attempt = self.trainer.strategy.broadcast(time.time_ns())
    def training_step(self, batch, batch_idx):
        self.read += batch[2].tolist()
        out = self.layers(batch[0])
        out.register_hook(lambda gradient: strike("backward", self.trainer.global_step))
        loss = (out - batch[1]).pow(2).mean()
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss
    def validation_step(self, batch, batch_idx):
        strike("validation", self.trainer.global_step)
        self.log("val_loss", (self.layers(batch[0]) - batch[1]).pow(2).mean(), sync_dist=True)
    def on_train_batch_end(self, *args):
        if self.trainer.at_step_boundary:
            line = (time.time(), self.trainer.global_step, self.trainer.world_size, self.attempt, self.read)
            self.read = []
            with open(folder / "steps", "a") as file:
                file.write(json.dumps(line) + "\\n")
            # One rank alone waits for another agent to join, before the training ends.
            time.sleep(options.get("pause_s", 0) * (10 if self.trainer.world_size == 1 else 1))
    def on_save_checkpoint(self, checkpoint):
        if RANK:
            strike("save", self.trainer.global_step)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)

storage.reached = lambda stage: strike("save", trainer.global_step) if stage == "written" else None
lw.seed_everything(1)
torch.manual_seed(1)
data = [torch.randn(168, 4).double(), torch.randn(168, 1).double(), torch.arange(168)]
saves = lw.ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=options.get("every", 1))
callbacks = [saves, lw.Preemption(folder / "checkpoints")]
if "snapshots" in options:
    callbacks.append(lw.Snapshot(every=1, folder=options["snapshots"]))
trainer = lw.Trainer(
    max_epochs=options.get("epochs", 3), accelerator="cpu", global_batch_size=options.get("batch", 8),
    logger=lw.CSVLogger(folder, name="", version="rows"), log_every_n_steps=1, enable_progress_bar=False,
    callbacks=callbacks, val_check_interval=options.get("validate"),
)
net = Net()
trainer.fit(
    net, DataLoader(TensorDataset(*data), batch_size=4, shuffle=True),
    DataLoader(TensorDataset(*data), batch_size=14), ckpt_path="last",
)
if trainer.is_global_zero:
    torch.save(net.state_dict(), folder / "end.pt")
"""


class Agents:
    """Agents of one job, which run TRAIN in `processes` processes each."""

    def __init__(self, folder: Path, command: list[str], *, processes: int = 1, **options: Any) -> None:
        self.folder, self.options = folder, options
        (folder / "train.py").write_text(TRAIN)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        settings = {
            "nnodes": options.get("nnodes", "1:2"), "rdzv-backend": "c10d", "rdzv-endpoint": f"127.0.0.1:{self.port}",
            "rdzv-id": "job", "rdzv-conf": f"last_call_timeout=2,join_timeout={options.get('join_timeout', 120)}",
            "nproc-per-node": str(processes), "max-restarts": str(options.get("restarts", 3)),
        }  # fmt: skip
        if options.get("by_variables"):  # as Kubernetes' jobs do
            self.variables |= {f"PET_{name.upper().replace('-', '_')}": value for name, value in settings.items()}
            settings = {}
        passed = [f"--{name}={value}" for name, value in settings.items()]
        self.command = [
            sys.executable, "-m", *command, *passed, str(folder / "train.py"), str(folder), json.dumps(options),
        ]  # fmt: skip
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

    def steps(self) -> list[Row]:
        return rows_of(self.folder)

    def until(self, is_so: Callable[[Row], bool], limit_s: float = 120) -> None:
        ends = time.monotonic() + limit_s
        while not any(is_so(row) for row in self.steps()):
            assert time.monotonic() < ends, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self.folder.glob("agent*.log")))


class Row(NamedTuple):
    """A step that a rank has made: when, which one, on how many ranks, in which start of the ranks, what it read."""

    time: float
    step: int
    size: int
    attempt: int
    ids: list[int]


def rows_of(folder: Path) -> list[Row]:
    file = folder / "steps"
    return [Row(*json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


@contextmanager
def running(agents: Agents) -> Iterator[Agents]:
    try:
        yield agents
    finally:
        for agent in agents.agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        for process in processes_of(agents.folder):  # ranks, which have sessions of their own
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def processes_of(folder: Path) -> list[int]:
    """Return the processes that run the program of this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(folder / "train.py").encode() in (process / "cmdline").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its workers, as a lost machine does."""
    workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for process in (*map(int, workers), agent.pid):
        os.kill(process, signal.SIGKILL)
    agent.wait()


def undisturbed(folder: Path, processes: int = 2, **options: Any) -> None:
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    command = [
        "torch.distributed.run", f"--nproc-per-node={processes}", str(folder / "train.py"), str(folder),
        json.dumps(options),
    ]  # fmt: skip
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, env=variables)


def logged(folder: Path) -> list[dict[str, float]]:
    with open(folder / "rows" / "metrics.csv", newline="") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def check_as_undisturbed(folder: Path, expected: Path, *, atol: float, epochs: int = 3) -> None:
    """Compare weights and logged rows, and the samples that each step has used: each of an epoch once."""
    end, weights = (torch.load(one / "end.pt", weights_only=True) for one in (folder, expected))
    for name, value in weights.items():
        torch.testing.assert_close(end[name], value, rtol=0, atol=atol)
    rows, right = logged(folder), logged(expected)
    assert [row.keys() for row in rows] == [row.keys() for row in right]
    for row, one in zip(rows, right, strict=True):
        assert row == pytest.approx(one, rel=0, abs=atol)
    samples: dict[int, list[int]] = {}
    rows_of_ranks = rows_of(folder)
    last = {
        step: max(row.attempt for row in rows_of_ranks if row.step == step) for step in {r.step for r in rows_of_ranks}
    }
    for row in rows_of_ranks:
        if row.attempt == last[row.step]:  # steps after the last checkpoint are repeated
            samples.setdefault(row.step, []).extend(row.ids)
    steps = sorted(samples)
    assert steps == list(range(1, len(steps) + 1))
    in_epoch = len(steps) // epochs
    for epoch in range(epochs):
        read = [one for step in steps[epoch * in_epoch : (epoch + 1) * in_epoch] for one in samples[step]]
        assert sorted(read) == list(range(168))


LAUNCH = ["loopwright", "launch", "--local-address", "127.0.0.1"]
TORCHRUN = ["torch.distributed.run", "--local-addr", "127.0.0.1"]


@pytest.mark.parametrize("by_variables", [False, True], ids=["options", "PET variables"])
def test_a_machine_is_lost_and_another_joins(tmp_path: Path, by_variables: bool) -> None:
    options = {"pause_s": 0.1, "by_variables": by_variables}
    with running(Agents(tmp_path, LAUNCH, **options)) as agents:
        first = agents.start()
        second = agents.start()
        agents.until(lambda row: row.step >= 6 and row.size == 2)
        kill(second)
        agents.until(lambda row: row.size == 1)
        reached = max(row.step for row in agents.steps())
        agents.until(lambda row: row.step >= reached + 3 and row.size == 1)
        alone = time.time()
        third = agents.start()
        agents.until(lambda row: row.time > alone and row.size == 2)
        assert first.wait(120) == 0, agents.said()
        assert third.wait(120) == 0, agents.said()
        rows = agents.steps()
    undisturbed(tmp_path / "undisturbed")
    # One rank adds the same micro-batches, in another order.
    check_as_undisturbed(tmp_path, tmp_path / "undisturbed", atol=1e-12)
    # The agent ends the ranks with SIGTERM when another one joins, and they save: no step is made twice.
    on_one = [row.step for row in rows if row.size == 1]
    assert len(on_one) == len(set(on_one))
    assert min(row.step for row in rows if row.size == 2 and row.time > alone) == max(on_one) + 1
    assert not processes_of(tmp_path)


def test_agents_that_counted_another_number_of_restarts_meet(tmp_path: Path) -> None:
    # A fixed number of machines, and the store that torchrun shares by default.
    with running(Agents(tmp_path, TORCHRUN, nnodes="2", fails=True)) as agents:
        for agent in (agents.start(), agents.start()):
            assert agent.wait(120) == 0, agents.said()
    assert (tmp_path / "failed").exists()
    undisturbed(tmp_path / "undisturbed")
    check_as_undisturbed(tmp_path, tmp_path / "undisturbed", atol=0)


def test_fewer_machines_than_the_minimum_are_an_error_that_names_it(tmp_path: Path) -> None:
    with running(Agents(tmp_path, LAUNCH, nnodes="2:3", join_timeout=10, pause_s=0.1)) as agents:
        first = agents.start()
        second = agents.start()
        agents.until(lambda row: row.step >= 2)
        kill(second)
        assert first.wait(120) == 2, agents.said()
    assert "Expected at least 2 machines (--nnodes=2:3), got fewer until the rendezvous timed out." in agents.said()
    assert not processes_of(tmp_path)


def _plan(places: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Return kills of any rank, of two, and of rank 0, at each of the places, `count` times each."""
    chance = random.Random(count)
    victims = [lambda: [chance.randrange(3)], lambda: sorted(chance.sample(range(3), 2)), lambda: [0]]
    kinds = [(place, ranks) for place in places for ranks in victims] * count
    return [
        {"place": place, "ranks": ranks(), "step": 1 + 36 * number // len(kinds)}
        for number, (place, ranks) in enumerate(kinds)
    ]


def test_ranks_are_killed_at_any_moment(tmp_path: Path) -> None:
    count = int(os.environ.get("LOOPWRIGHT_KILLS", "0"))  # of each kind; 0: one at each place
    places = ["backward", "save", "validation", "start"]
    plan = _plan(places, count) if count else [p for i, p in enumerate(_plan(places, 1)) if i in (0, 4, 8, 9)]
    # 14 steps in an epoch; a checkpoint every fourth one, and copies in memory between them
    training = {"batch": 12, "every": 4, "validate": 2, "snapshots": str(tmp_path / "memory")}
    (tmp_path / "memory").mkdir()
    options = {"plan": plan, "restarts": 1000, "nnodes": "1", **training}
    with running(Agents(tmp_path, LAUNCH, processes=3, **options)) as agents:
        assert agents.start().wait(150 * len(plan)) == 0, agents.said()
    assert len(list(tmp_path.glob("killed-*"))) == sum(len(entry["ranks"]) for entry in plan)
    undisturbed(tmp_path / "undisturbed", 3, **training)
    # DDP's first step after a start reduces in other buckets, and three ranks add in another order then.
    check_as_undisturbed(tmp_path, tmp_path / "undisturbed", atol=1e-12)
    assert not processes_of(tmp_path)
