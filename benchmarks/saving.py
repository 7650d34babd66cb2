"""What a save costs: time and memory of `trainer.save_checkpoint` beside torch.save; run.py starts it and prints it.

It runs as its own process (`python benchmarks/saving.py speed PARAMETERS ROUNDS`, or `stall`), because the peak of
memory is a number of the whole process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from variants import quiet

import loopwright as lw

WIDTH = 1000  # one layer has WIDTH * WIDTH parameters
STEPS_BETWEEN = 4


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
        save_by_torch(self.folder, trainer, module)


def save_by_torch(folder: Path, trainer: lw.Trainer, module: nn.Module) -> None:
    """Save as a program does when the file has to be on the disk: to a temporary name, fsync, rename."""
    path = folder / "torch.ckpt.tmp"
    with open(path, "wb") as file:
        content = {"state_dict": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    path.replace(folder / "torch.ckpt")


class SaveBesideTraining(lw.Callback):
    """Every few steps, saves in the background or with torch.save, in turns, and notes how long training waits.

    That is the save itself, and what it adds to the optimizer step after it, which may have to wait for a copy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stalls: dict[str, list[dict[str, float]]] = {"torch": [], "background": []}
        self.optimizer_s: list[float] = []
        self._began_s = 0.0
        self._saved: dict[str, float] | None = None

    def on_train_start(self, trainer: lw.Trainer, pl_module: lw.Module) -> None:
        trainer.optimizers[0].register_step_post_hook(self._note_step)

    def on_before_optimizer_step(
        self, trainer: lw.Trainer, pl_module: lw.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._began_s = time.perf_counter()

    def _note_step(self, *_: object) -> None:
        took_s = time.perf_counter() - self._began_s
        if self._saved is None:
            self.optimizer_s.append(took_s)
        else:
            self._saved["optimizer_s"] = took_s
            self._saved = None

    def on_train_batch_end(
        self, trainer: lw.Trainer, pl_module: lw.Module, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if batch_idx % STEPS_BETWEEN:
            return
        trainer.wait_for_save()
        is_background = batch_idx // STEPS_BETWEEN % 2 == 1
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        if is_background:
            trainer.save_checkpoint(self.folder / "background.ckpt")
        else:
            save_by_torch(self.folder, trainer, pl_module)
        found = {"wall_s": time.perf_counter() - began_s, "cpu_s": time.thread_time() - cpu_s}
        self.stalls["background" if is_background else "torch"].append(found)
        if is_background:
            self._saved = found


def print_stalls(num_parameters: int, rounds: int) -> None:
    """Print how long training waits for a save in the background, and for torch.save."""
    with tempfile.TemporaryDirectory() as folder:
        saver = SaveBesideTraining(Path(folder))
        train(
            num_parameters, saver, folder, num_steps=2 * STEPS_BETWEEN * (rounds + 1), plugins=[lw.AsyncCheckpointIO()]
        )
    usual_s = statistics.median(saver.optimizer_s)
    for stall in saver.stalls["background"]:
        stall["wall_s"] += max(0.0, stall.pop("optimizer_s") - usual_s)
    rows = {
        name: {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
        | {"first_s": runs[0]["wall_s"], "least_s": min(run["wall_s"] for run in runs[1:])}
        for name, runs in saver.stalls.items()
    }
    print(json.dumps({"num_parameters": num_parameters, **rows}))


def print_speed(num_parameters: int, rounds: int) -> None:
    """Print what a save costs that training waits for, beside torch.save."""
    with tempfile.TemporaryDirectory() as folder:
        saver = SaveInTurns(Path(folder), rounds)
        train(num_parameters, saver, folder, num_steps=2)
        size_bytes = (Path(folder) / "trainer.ckpt").stat().st_size
    rows = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in saver.runs.items()
    }
    print(json.dumps({"num_parameters": num_parameters, "size_bytes": size_bytes, **rows}))


def train(num_parameters: int, saver: lw.Callback, folder: str, *, num_steps: int, plugins: Sequence[Any] = ()) -> None:
    """Train with a callback that saves."""
    torch.manual_seed(0)
    with quiet():
        trainer = lw.Trainer(
            max_steps=num_steps,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[saver],
            plugins=list(plugins),
            default_root_dir=folder,
        )
        trainer.fit(Wide(num_parameters), [torch.randn(8, WIDTH)] * num_steps)


def time_saves(*, num_parameters: int, rounds: int) -> dict[str, Any]:
    """Measure saves that training waits for, in their own process; times and memory are medians."""
    return _run("speed", num_parameters, rounds)


def time_stalls(*, num_parameters: int, rounds: int) -> dict[str, Any]:
    """Measure how long training waits for saves in the background, in their own process; times are medians."""
    return _run("stall", num_parameters, rounds)


def _run(program: str, num_parameters: int, rounds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, program, str(num_parameters), str(rounds)]
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


def main() -> None:
    program = {"speed": print_speed, "stall": print_stalls}[sys.argv[1]]
    program(int(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
