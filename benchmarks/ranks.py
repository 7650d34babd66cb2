"""Overhead of a trainer on two processes: of a step, against hand-written DDP, and of the launch; run.py prints them.

This file is also the program that is measured: `python benchmarks/ranks.py 500 3 2` starts a second process itself.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 2
MODES = ("hand", "fabric", "trainer")

# --- the program that is launched -----------------------------------------------------------------------------------

_LAUNCH_BY_HAND = """
import json, os, subprocess, sys, time
began = float(os.environ.setdefault("BEGAN", str(time.time())))
rank = int(os.environ.get("RANK", "0"))
if rank == 0:
    environment = dict(os.environ, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
    child = subprocess.Popen([sys.executable, __file__], env=environment)
    os.environ.update({name: environment[name] for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}, RANK="0")
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
net(torch.randn(8, 32)).square().mean().backward()
optimizer.step()
if rank == 0:
    print(json.dumps({"first_step_s": time.time() - began}), flush=True)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    child.wait()
"""

_LAUNCH_BY_TRAINER = """
import json, os, sys, time
began = float(os.environ.setdefault("BEGAN", str(time.time())))
import torch
import loopwright as lw


class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0 and self.trainer.is_global_zero:
            print(json.dumps({"first_step_s": time.time() - began}), flush=True)


if __name__ == "__main__":
    trainer = lw.Trainer(max_steps=1, accelerator="cpu", devices=2, strategy="STRATEGY", barebones=True)
    trainer.fit(Net(), [torch.randn(8, 32) for _ in range(4)])
"""


def time_launches(*, processes: int, folder: Path) -> list[dict[str, Any]]:
    """Return the seconds from the start of the first process to the end of rank 0's first step; medians."""
    programs = {"hand-written loop": _LAUNCH_BY_HAND}
    programs |= {
        f"Trainer, `{name}`": _LAUNCH_BY_TRAINER.replace("STRATEGY", name) for name in ("ddp", "ddp_spawn", "ddp_fork")
    }
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(processes):
        for index, (name, text) in enumerate(programs.items()):
            file = folder / f"launch{index}.py"
            file.write_text(text)
            found[name].append(run_program([str(file)])["first_step_s"])
    return [{"name": name, "seconds": statistics.median(values)} for name, values in found.items()]


def time_steps_of_ranks(*, num_batches: int, rounds: int, ranks: int = RANKS) -> list[dict[str, Any]]:
    """Return microseconds per step hand-written, with Fabric and with the Trainer: wall and CPU time of rank 0."""
    numbers = run_program([__file__, str(num_batches), str(rounds), str(ranks)])
    return [
        {"name": name, **numbers[mode]}
        for mode, name in zip(MODES, ("hand-written DDP", "Fabric", "Trainer"), strict=True)
    ]


def run_program(arguments: list[str]) -> dict[str, Any]:
    """Run a Python program with one thread per process, and return the JSON object that it prints."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "PORT": str(port)}
    environment.pop("BEGAN", None)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments[0]} failed:\n{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    numbers: dict[str, Any] = json.loads(line)
    return numbers


# --- the program that is measured -----------------------------------------------------------------------------------


def main() -> None:
    """Train in a hand-written loop, with Fabric and with the Trainer in turns, on the same processes."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from toy import Toy, batches, make

    import loopwright as lw

    num_batches, rounds, ranks = (int(argument) for argument in sys.argv[1:4])
    fabric = lw.Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    data = batches(num_batches * ranks)
    own = data[fabric.global_rank :: ranks]
    marks: list[tuple[float, float]] = []

    class Timed(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            marks.append((time.perf_counter(), time.process_time()))
            return super().training_step(batch, batch_idx)

    class Steps(torch.nn.Module):
        def __init__(self, toy: Toy) -> None:
            super().__init__()
            self.toy = toy

        def forward(self, batch: Any, batch_idx: int) -> Any:
            return self.toy.training_step(batch, batch_idx)

    def by_hand() -> Toy:
        toy = make(Timed)
        model = DistributedDataParallel(Steps(toy))
        optimizer = toy.configure_optimizers()
        for index, batch in enumerate(own):
            loss = model(batch, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return toy

    def by_fabric() -> Toy:
        toy = make(Timed)
        model, optimizer = fabric.setup(toy, toy.configure_optimizers())
        for index, batch in enumerate(own):
            loss = model.training_step(batch, index)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        return toy

    def by_trainer() -> Toy:
        toy = make(Timed)
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lw.Trainer(
            max_epochs=1, accelerator="cpu", devices=ranks, strategy="ddp", enable_model_summary=False, **options
        )  # fmt: skip
        trainer.fit(toy, data)
        return toy

    ways: dict[str, Callable[[], Toy]] = dict(zip(MODES, (by_hand, by_fabric, by_trainer), strict=True))
    found: dict[str, tuple[list[float], list[float]]] = {mode: ([], []) for mode in MODES}
    weights: dict[str, Any] = {}
    import contextlib
    import warnings

    for _ in range(rounds):
        for mode, way in ways.items():
            marks.clear()
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                weights[mode] = [p.detach().clone() for p in way().parameters()]
            kept = marks[20:]
            for kind, values in enumerate(found[mode]):
                values += [after[kind] - before[kind] for before, after in itertools.pairwise(kept)]
    if fabric.global_rank == 0:
        numbers = {
            mode: {
                "wall_us": 1e6 * statistics.median(walls),
                "cpu_us": 1e6 * statistics.median(cpus),
                "weights_equal": all(map(torch.equal, weights["hand"], weights[mode])),
            }
            for mode, (walls, cpus) in found.items()
        }
        print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    main()
