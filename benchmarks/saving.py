"""What a save costs: time and memory of `trainer.save_checkpoint` beside torch.save; run.py starts it and prints it.

It runs as a process of its own (`python benchmarks/saving.py PARAMETERS ROUNDS`), because the peak of memory is a
number of the whole process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from variants import quiet

import loopwright as lw

WIDTH = 1000  # one layer has WIDTH * WIDTH parameters


class Wide(lw.Module):
    """Layers of a million parameters each, with Adam: what a checkpoint holds is three times the parameters."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, num_parameters // WIDTH**2))
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            total = total + layer(batch).pow(2).mean()
        return total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-6)


def _status_mib(field: str) -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))


def measure(save: Callable[[], object]) -> dict[str, float]:
    """Return seconds, and MiB of memory at the peak over what the process had before (Linux; else -1)."""
    has_peak = os.path.exists("/proc/self/clear_refs")
    if has_peak:
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")  # forget the highest memory so far
        before = _status_mib("VmRSS")
    began, cpu = time.perf_counter(), time.process_time()
    save()
    numbers = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    return {**numbers, "peak_mib": _status_mib("VmHWM") - before if has_peak else -1.0}


class SaveInTurns(lw.Callback):
    """After the second step, save with torch.save and with the Trainer in turns."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.runs: dict[str, list[dict[str, float]]] = {"torch": [], "trainer": []}

    def on_train_end(self, trainer: lw.Trainer, pl_module: nn.Module) -> None:
        for index in range(self.rounds + 1):
            by_hand = measure(lambda: self._torch_save(trainer, pl_module))
            ours = measure(lambda: trainer.save_checkpoint(self.folder / "trainer.ckpt"))
            if index > 0:  # the first of each is cold
                self.runs["torch"].append(by_hand)
                self.runs["trainer"].append(ours)

    def _torch_save(self, trainer: lw.Trainer, module: nn.Module) -> None:
        """Save as a program does when the file has to be on the disk: to a temporary name, fsync, rename."""
        path = self.folder / "torch.ckpt.tmp"
        with open(path, "wb") as file:
            content = {"state_dict": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        path.replace(self.folder / "torch.ckpt")


def main() -> None:
    num_parameters, rounds = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        saver = SaveInTurns(Path(folder), rounds)
        with quiet():
            trainer = lw.Trainer(
                max_steps=2,
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[saver],
                default_root_dir=folder,
            )
            trainer.fit(Wide(num_parameters), [torch.randn(8, WIDTH)] * 2)
        size_bytes = (Path(folder) / "trainer.ckpt").stat().st_size
    rows = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in saver.runs.items()
    }
    print(json.dumps({"num_parameters": num_parameters, "size_bytes": size_bytes, **rows}))


def time_saves(*, num_parameters: int, rounds: int) -> dict[str, Any]:
    """Measure in a process of its own; times and memory are medians."""
    command = [sys.executable, __file__, str(num_parameters), str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def time_small_saves(*, num_tensors: int, rounds: int) -> dict[str, Any]:
    """Save a state of many tensors of four elements with torch.save and fsync, and with Loopwright, in turns.

    Returns:
        CPU seconds of both, and their ratio: medians over the rounds.
    """
    from loopwright.checkpoint import storage

    state = {"state_dict": {f"layers.{number}.weight": torch.zeros(4) for number in range(num_tensors)}}
    found: dict[str, list[float]] = {"torch_s": [], "ours_s": []}
    with tempfile.TemporaryDirectory() as folder:

        def save_by_torch() -> None:
            with open(Path(folder, "torch.ckpt"), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        ways: dict[str, Callable[[], object]] = {
            "torch_s": save_by_torch,
            "ours_s": lambda: storage.save(state, Path(folder, "ours.ckpt")),
        }
        for number in range(rounds + 1):
            for name, save in ways.items():
                began_s = time.process_time()
                save()
                if number:  # the first of each is cold
                    found[name].append(time.process_time() - began_s)
    ratios = [ours / by_torch for ours, by_torch in zip(found["ours_s"], found["torch_s"], strict=True)]
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"num_tensors": num_tensors, **medians, "ratio": statistics.median(ratios)}


if __name__ == "__main__":
    main()
