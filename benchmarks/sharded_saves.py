"""What saving and loading a sharded model costs, beside torch's own ways, and how long training waits; for run.py.

This file is also the program that is measured, which starts the other process itself:
`python benchmarks/sharded_saves.py speed 1 64 3`, `python benchmarks/sharded_saves.py stall 2 64 3`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsdp import run_program, silence
from torch import Tensor, nn

import loopwright as lw
from loopwright.strategies import FSDPStrategy

# Any in this file: contents of checkpoints, and what the measured programs print.

WIDTH = 1024
STEPS_BETWEEN = 4


# --- tables for run.py ----------------------------------------------------------------------------------------------


def measure_sharded_saves(*, megabytes: int, rounds: int) -> dict[str, Any]:
    """Measure saves and loads on one rank and on two, and what a training on two ranks waits for them."""
    speed = [run_program(__file__, "speed", ranks, megabytes, rounds) for ranks in (1, 2)]
    return {"speed": speed, "stall": run_program(__file__, "stall", 2, megabytes, rounds)}


# --- the programs that are measured -----------------------------------------------------------------------------------


class Layers(nn.Module):
    """Square layers, each its own unit; 4 MiB each in float32."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, megabytes // 4)))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to the loss, shape ()."""
        total = torch.zeros(())
        for layer in self.layers:
            total = total + layer(x).square().mean()
        return total


class Step(lw.Module):
    """The same for the Trainer; with Adam, a checkpoint has three times the parameters."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.net = Layers(megabytes // 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-6)


def strategy() -> FSDPStrategy:
    return FSDPStrategy(auto_wrap_policy={nn.Linear}, state_dict_type="sharded")


def shared_folder(fabric: lw.Fabric, stack: contextlib.ExitStack) -> Path:
    """Return an empty folder that all ranks see and that goes with the stack."""
    own = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return Path(fabric.broadcast(str(own)))


def compare_speed(ranks: int, megabytes: int, rounds: int) -> None:
    """Print seconds to save and to load a sharded module with Fabric, with torch's checkpoint and with torch.save."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    fabric = lw.Fabric(accelerator="cpu", devices=ranks, strategy=strategy())
    fabric.launch()
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        folder = shared_folder(fabric, stack)
        net = Layers(megabytes)
        model = fabric.setup_module(net)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)

        def save_by_torch(path: Path) -> None:
            state = get_model_state_dict(net, options=whole)
            if fabric.is_global_zero:
                torch.save(state, path)

        def load_by_torch(path: Path) -> None:
            state = torch.load(path, weights_only=True, mmap=True) if fabric.is_global_zero else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=ranks > 1)
            set_model_state_dict(net, state, options=options)

        ways: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
            "Fabric, a folder": (
                lambda path: fabric.save(path, {"model": model}),
                lambda path: fabric.load(path, {"model": model}),
            ),
            "torch.distributed.checkpoint": (
                lambda path: dcp_save({"model": net.state_dict()}, checkpoint_id=path),
                lambda path: dcp_load({"model": net.state_dict()}, checkpoint_id=path),
            ),
            "gathered, torch.save": (save_by_torch, load_by_torch),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, (save, load) in ways.items():
                path = folder / f"{number}"
                with silence():
                    times = seconds(fabric, save, path), seconds(fabric, load, path)
                if number:  # the first of each imports and connects
                    found[name].append(times)
                if fabric.is_global_zero:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                fabric.barrier()
        if fabric.is_global_zero:
            size_bytes = sum(4 * one.numel() for one in net.parameters())
            rows = [
                {
                    "name": name,
                    "save_s": statistics.median(save_s for save_s, _ in values),
                    "load_s": statistics.median(load_s for _, load_s in values),
                }
                for name, values in found.items()
            ]
            print(json.dumps({"ranks": ranks, "size_bytes": size_bytes, "rows": rows}), flush=True)


def seconds(fabric: lw.Fabric, call: Callable[[Path], object], path: Path) -> float:
    """Return how long a call takes until the last rank is done."""
    fabric.barrier()
    began_s = time.perf_counter()
    call(path)
    fabric.barrier()
    return time.perf_counter() - began_s


class SaveNowAndThen(lw.Callback):
    """Saves every few steps, and notes how long training stood still for it and how long steps take."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stalls_s: list[float] = []
        self.steps_s: list[float] = []
        self._began_s = 0.0

    def on_train_batch_start(self, trainer: lw.Trainer, pl_module: lw.Module, batch: Any, batch_idx: int) -> None:
        self._began_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lw.Trainer, pl_module: lw.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            return
        self.steps_s.append(time.perf_counter() - self._began_s)
        if batch_idx % STEPS_BETWEEN == 0:
            began_s = time.perf_counter()
            trainer.save_checkpoint(self.path)
            self.stalls_s.append(time.perf_counter() - began_s)


def compare_stalls(ranks: int, megabytes: int, rounds: int) -> None:
    """Print how long training stands still for a save, with the default plugin and with AsyncCheckpointIO."""
    fabric = lw.Fabric(accelerator="cpu", devices=ranks, strategy=strategy())
    fabric.launch()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = shared_folder(fabric, stack)
        # The first save of a run copies into new memory; it is left out.
        batches = [torch.randn(64, WIDTH) for _ in range((STEPS_BETWEEN * (rounds + 1) + 2) * ranks)]
        for name, plugins in (("synchronous", []), ("AsyncCheckpointIO", [lw.AsyncCheckpointIO()])):
            watcher = SaveNowAndThen(folder / f"{len(rows)}.ckpt")
            quiet: dict[str, Any] = dict.fromkeys(
                ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
            )
            trainer = lw.Trainer(
                max_epochs=1,
                accelerator="cpu",
                devices=ranks,
                strategy=strategy(),
                plugins=plugins,
                callbacks=[watcher],
                **quiet,
            )
            began_s = time.perf_counter()
            with silence():
                trainer.fit(Step(megabytes), batches)
            rows.append(
                {
                    "name": name,
                    "stall_s": statistics.median(watcher.stalls_s[1:]),
                    "first_stall_s": watcher.stalls_s[0],
                    "step_s": statistics.median(watcher.steps_s),
                    "slowest_step_s": max(watcher.steps_s[1:]),
                    "fit_s": time.perf_counter() - began_s,
                }
            )
        if fabric.is_global_zero:
            print(json.dumps({"ranks": ranks, "megabytes": megabytes, "rows": rows}), flush=True)


def main() -> None:
    program = {"speed": compare_speed, "stall": compare_stalls}[sys.argv[1]]
    program(*map(int, sys.argv[2:5]))


if __name__ == "__main__":
    main()
