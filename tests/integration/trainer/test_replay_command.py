"""`loopwright replay` of runs of a program on two ranks: the figures of a step, and where two runs begin to differ."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = """
import argparse, json
import torch
import loopwright as lw
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--strategy", default="ddp_fork")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--alter", type=int)
parser.add_argument("--devices", type=int, default=2)


class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        loss = (self.net(x) - y).square().mean()
        self.seen = [*getattr(self, "seen", []), (index.tolist(), loss.item())]
        return loss

    def on_before_optimizer_step(self, optimizer):
        norm = torch.nn.utils.get_total_norm([one.grad for one in self.parameters()]).item()
        with open(f"{given.out}/seen-{self.trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps([self.trainer.global_step, self.seen, norm]) + chr(10))
        self.seen = []

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=given.lr)


if __name__ == "__main__":
    given = parser.parse_args()
    lw.seed_everything(given.seed)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(5))
    if given.alter is not None:
        x[given.alter, 0] += 1
    trainer = lw.Trainer(
        max_epochs=2, accelerator="cpu", devices=given.devices, strategy=given.strategy, default_root_dir=given.out,
        accumulate_grad_batches=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[lw.ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)],
    )
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(48))
    trainer.fit(Net(), DataLoader(data, batch_size=2, shuffle=True))
    with open(f"{given.out}/after", "a") as file:
        file.write("the program went on")
"""


class Runs:
    """Starts the program and commands in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "program.py").write_text(PROGRAM)

    def python(self, *words: str, code: int = 0) -> str:
        variables = {name: one for name, one in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
        done = subprocess.run([sys.executable, *words], cwd=self.folder, capture_output=True, text=True, check=False,
                              env={**variables, "OMP_NUM_THREADS": "1"}, timeout=240)  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout

    def fit(self, name: str, *words: str) -> list[list[Any]]:
        (self.folder / name).mkdir()
        self.python("program.py", "--out", name, *words)
        return self.seen(name)

    def seen(self, name: str) -> list[list[Any]]:
        files = sorted((self.folder / name).glob("seen-*.jsonl"))
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    def replay(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.python("-m", "loopwright", "replay", "--yes", "--json", *words, code=code))


def checkpoints(folder: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in folder.rglob("*.ckpt")}


def assert_step(record: dict[str, Any], seen: list[list[Any]], step: int) -> None:
    for rank, found in enumerate(record["ranks"]):
        _, micro_batches, norm = next(one for one in seen[rank] if one[0] == step)
        assert [[one["samples"], one["loss"]] for one in found["micro_batches"]] == micro_batches
        assert [one["norm"] for one in found["gradients"]] == [norm]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "torchrun"])
def test_two_ranks_replay_a_step_as_the_run_made_it(tmp_path: Path, strategy: str) -> None:
    runs = Runs(tmp_path)
    if strategy == "torchrun":
        (tmp_path / "run").mkdir()
        words = ("-m", "loopwright", "launch", "--nproc-per-node=2", "program.py", "--out", "run", "--strategy", "fsdp")
        runs.python(*words)
        seen = runs.seen("run")
    else:
        seen = runs.fit("run", "--strategy", strategy)
    before = checkpoints(tmp_path)
    record = runs.replay("run", "--step", "9", "--save-batch", "batch.pt")
    assert_step(record, seen, 9)
    assert record["checkpoint"].endswith("step=8.ckpt")
    assert checkpoints(tmp_path) == before
    assert (tmp_path / "run" / "after").read_text() == "the program went on" * 2  # of the run on two ranks alone
    assert runs.replay("run", "--compare", "run", "--step", "10")["difference"] is None  # digests of shards, too
    saved = torch.load(tmp_path / "batch.pt", weights_only=True)
    assert [[one[2].tolist() for one in batches] for batches in saved["ranks"]] == [
        [one["samples"] for one in rank["micro_batches"]] for rank in record["ranks"]
    ]


@pytest.mark.slow
def test_planted_differences_are_found_at_their_step_rank_and_tensor(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    seen = runs.fit("run")
    runs.fit("same")
    assert runs.replay("run", "--compare", "same", "--step", "6")["difference"] is None

    runs.fit("altered", "--alter", "17")
    at = [(step, rank, number) for rank, steps in enumerate(seen) for step, micro_batches, _ in steps
          for number, (samples, _) in enumerate(micro_batches) if 17 in samples]  # fmt: skip
    step, rank, number = min(at)
    found = runs.replay("run", "--compare", "altered", code=1)["difference"]
    assert (found["step"], found["rank"], found["kind"], found["name"]) == (step, rank, "batch", str(number))

    runs.fit("faster", "--lr", "0.06")
    found = runs.replay("run", "--compare", "faster", code=1)["difference"]
    assert (found["step"], found["kind"], found["values"]) == (0, "setting", ["0.05", "0.06"])
    assert found["name"].startswith("lr ")

    runs.fit("other", "--seed", "1")
    found = runs.replay("run", "--compare", "other", code=1)["difference"]
    assert (found["step"], found["rank"], found["kind"]) == ("beginning", 0, "parameter")
    assert found["name"].endswith("net.0.weight")

    shutil.copytree(tmp_path / "run", tmp_path / "flipped")
    path = next((tmp_path / "flipped").rglob("*step=8.ckpt"))
    content = torch.load(path, weights_only=True)
    content["state_dict"]["net.2.weight"].view(torch.int32)[0, 3] ^= 1
    torch.save(content, path)
    found = runs.replay("run", "--compare", "flipped", code=1)["difference"]
    assert (found["step"], found["kind"], found["name"]) == (8, "checkpoint", "state_dict/net.2.weight")


def type_into(command: list[str], folder: Path, typed: str) -> tuple[int, str]:
    """Return the exit code and output of a command in a terminal of its own, into which a user types."""
    master, slave = os.openpty()
    process = subprocess.Popen(
        command, cwd=folder, stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        os.close(slave)
        os.write(master, typed.encode())
        return process.wait(240), process.communicate()[0]
    finally:
        process.kill()
        os.close(master)


@pytest.mark.slow
def test_the_debugger_of_a_rank_reads_the_terminal(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    seen = runs.fit("run")
    command = [sys.executable, "-m", "loopwright", "replay", "run", "--step", "5", "--debug", "--rank", "1"]
    code, shown = type_into(command, tmp_path, "y\np batch[2].tolist()\nc\nc\n")  # of two micro-batches
    first, second = next(micro_batches for step, micro_batches, _ in seen[1] if step == 5)
    assert code == 0, shown
    assert str(first[0]) in shown
    assert f"loss {second[1]!r}" in shown
    code, shown = type_into([*command, "--yes"], tmp_path, "q\n")
    assert code == 2
    assert "The debugger was left before the end of the step." in shown


@pytest.mark.slow
def test_mistakes_are_named(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.fit("run")
    done = subprocess.run(
        [sys.executable, "-m", "loopwright", "replay", "run", "--step", "99", "--yes"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 2
    assert "to reach step 99, got its end before" in done.stderr
    runs.fit("alone", "--devices", "1")
    done = subprocess.run(
        [sys.executable, "-m", "loopwright", "replay", "run", "--compare", "alone", "--yes"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Expected two runs on the same number of ranks, got 1 and 2." in done.stderr
    (tmp_path / "plain.py").write_text("print('no fit')")
    words = ["replay", "run", "--step", "5", "--", "plain.py"]
    done = subprocess.run(
        [sys.executable, "-m", "loopwright", *words],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 2
    assert "to call Trainer.fit, got its end (exit code 0)" in done.stderr
