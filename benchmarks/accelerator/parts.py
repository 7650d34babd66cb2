"""The parts of `make gpu`: each returns rows; run.py starts a process for each."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import loopwright as lw
from accelerator.training import GPT, Task, by_hand, by_trainer, toy, wait

__all__ = ["PARTS", "Row"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was measured or checked.
        value: The result, with its unit.
        target: What it should be; "" without one.
        holds: Whether it is so; None if there is nothing to hold, or no device to hold it on.
    """

    what: str
    value: str
    target: str = ""
    holds: bool | None = None


def run_tests(device: torch.device, *, is_quick: bool) -> list[Row]:
    """Run the tests marked gpu; on the CPU, only find them."""
    # Of these files alone: others import packages that are not needed here.
    files = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-c", "tests/pytest.ini", "--rootdir", "tests", "-m", "gpu"]
    command += files if device.type == "cuda" else [*files, "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1].strip("= ")
    print(done.stdout, done.stderr, file=sys.stderr)
    if device.type != "cuda":
        return [Row("tests marked gpu", f"not run: {last}", "found", holds=done.returncode == 0)]
    holds = done.returncode == 0 and "skipped" not in last
    return [Row("tests marked gpu", last, "all pass, none skipped", holds)]


def time_overhead(device: torch.device, *, is_quick: bool) -> list[Row]:
    """Time a step that the host limits, beside a handwritten loop: eager, compiled, and as CUDA graphs."""
    batches = [torch.randn(8, 32, device=device) for _ in range(60 if is_quick else 1000)]
    modes: dict[str, dict[str, Any] | None] = {"eager": None}  # Any: arguments of torch.compile
    if device.type == "cuda":
        modes |= {"compiled": {}, "CUDA graphs": {"mode": "reduce-overhead"}}
    else:
        modes["compiled (eager backend)"] = {"backend": "eager"}
    rows = []
    for name, options in modes.items():
        task = Task(toy, batches, device, compile=options)
        pairs = [(by_hand(task)[1], by_trainer(task)[1]) for _ in range(1 if is_quick else 3)]
        hand, ours = (1e6 * statistics.median(column) for column in zip(*pairs, strict=True))
        holds = None if is_quick else ours - hand <= 20
        rows.append(Row(f"a step, {name}", f"{ours:.0f} us, handwritten {hand:.0f} us", "at most 20 us more", holds))
    return rows


def _gpt_task(device: torch.device, *, is_quick: bool, compile: dict[str, Any] | None = None) -> Task:
    """Return the training of the 124 M GPT in bf16; of a tiny one for a quick run."""
    if is_quick:
        build: Callable[[], nn.Module] = partial(GPT, vocabulary=64, length=16, width=32, heads=2, layers=2)
        size, length, vocabulary, steps, warm_up = 2, 16, 64, 6, 2
    else:
        memory = torch.cuda.get_device_properties(device).total_memory
        build, length, vocabulary, steps, warm_up = GPT, 1024, 50304, 40, 10
        size = 16 if memory > 60e9 else 8 if memory > 30e9 else 4
    batches = [torch.randint(vocabulary, (size, length + 1), device=device) for _ in range(steps)]
    return Task(build, batches, device, precision="bf16-mixed", compile=compile, warm_up=warm_up)


def measure_mfu(device: torch.device, *, is_quick: bool) -> list[Row]:
    """Measure the use of the device by the 124 M GPT, eager and compiled, beside a handwritten loop."""
    from loopwright.fabric.peak_flops import get_available_flops, measure_peak_flops

    peak = get_available_flops(device, torch.bfloat16) or measure_peak_flops(device, torch.bfloat16)
    rows = []
    modes: dict[str, dict[str, Any] | None] = {"eager": None}  # Any: arguments of torch.compile
    if device.type == "cuda":
        modes["compiled"] = {}
    for name, options in modes.items():
        task = _gpt_task(device, is_quick=is_quick, compile=options)
        hand, ours = by_hand(task)[1], by_trainer(task)[1]
        size, length = task.batches[0].shape
        model = task.module()
        assert isinstance(model, GPT)
        flops = model.flops_per_token() * size * (length - 1)
        rows.append(
            Row(
                f"GPT with {sum(one.numel() for one in model.parameters()) / 1e6:.0f} M, {name}, batch {size}",
                f"{100 * flops / ours / peak:.1f} % MFU, {size * (length - 1) / ours:,.0f} tokens/s; "
                f"{100 * hand / ours:.1f} % of the handwritten loop",
                "at least 99 % of the handwritten loop",
                None if is_quick else hand / ours >= 0.99,
            )
        )
    return rows


def compare_memory(device: torch.device, *, is_quick: bool) -> list[Row]:
    """Compare the peak of torch's allocator with what planning has said."""
    from loopwright.planning.simulation import Training, simulate

    task = _gpt_task(device, is_quick=is_quick)
    training = Training(
        task.build, task.batches[0].cpu(), precision=task.precision, optimizers=task.optimizer, loss=_loss_of
    )
    planned = simulate(training, "single_device").peak_bytes
    if device.type != "cuda":
        return [Row("peak memory", f"planned {planned / 1e6:.2f} MB; the CPU has no allocator that counts")]
    task.batches = task.batches[:4]
    task.warm_up = 2
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) - task.batches[0].nbytes
    by_trainer(task)
    measured = torch.cuda.max_memory_allocated(device) - before
    value = f"{measured / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB ({100 * (planned / measured - 1):+.1f} %)"
    return [Row("peak memory of the GPT", value, "within 10 %", holds=abs(planned / measured - 1) <= 0.1)]


def _loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = module(batch)
    return loss


def _difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two modules' weights."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((_whole(a).cpu() - _whole(b).cpu()).abs().max()) for a, b in pairs)


def _whole(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def train_fsdp(device: torch.device, *, is_quick: bool) -> list[Row]:
    """Train with fsdp on one rank, through NCCL on a GPU, beside a handwritten loop."""
    batches = [torch.randn(8, 32, device=device) for _ in range(20)]
    task = Task(toy, batches, device)
    whole = by_hand(task)[0]
    strategy = lw.FSDPStrategy()
    net, _, _ = by_trainer(task, strategy=strategy)
    worst = _difference(whole, net)
    return [Row("fsdp on one rank", f"weights differ by at most {worst:.1e}", "at most 1e-6", holds=worst <= 1e-6)]


def check_scaler(device: torch.device, *, is_quick: bool) -> list[Row]:
    """Train with fp16 and a loss scale, beside a handwritten GradScaler."""
    task = Task(toy, [torch.randn(8, 32, device=device) for _ in range(30)], device, precision="16-mixed")
    worst = _difference(by_hand(task)[0], by_trainer(task)[0])
    return [Row("fp16 with a loss scale", f"weights differ by at most {worst:.1e}", "0", holds=worst == 0)]


def time_transfer(device: torch.device, *, is_quick: bool) -> list[Row]:
    """Time steps whose batches come from pinned host memory, beside batches that are on the device."""
    width, rows = (64, 64) if is_quick else (4096, 4096)
    steps = 12 if is_quick else 60

    def build() -> nn.Module:
        class Wide(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))

            def forward(self, batch: Tensor) -> Tensor:
                loss: Tensor = self.layers(batch).square().mean()
                return loss

        return Wide()

    own = [torch.randn(rows, width) for _ in range(4)]
    pinned = [one.pin_memory() for one in own] if device.type == "cuda" else own
    resident = [one.to(device) for one in own]
    times = {}
    for name, four in {"on the device": resident, "pinned": pinned}.items():
        task = Task(build, [four[number % 4] for number in range(steps)], device, warm_up=4)
        times[name] = by_trainer(task)[1]
    added = times["pinned"] / times["on the device"] - 1
    size = own[0].nbytes / 1e6
    value = f"{1e3 * times['pinned']:.2f} ms a step, {1e3 * times['on the device']:.2f} ms from the device"
    holds = None if device.type != "cuda" else added <= 0.05
    return [Row(f"pinned batches of {size:.0f} MB", value, "at most 5 % more", holds)]


class _Save(lw.Callback):
    """Saves in one step, and notes how long training stood still."""

    def __init__(self, at: int, path: Path, device: torch.device) -> None:
        self.at, self.path, self.device, self.stall_s = at, path, device, 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            wait(self.device)
            began_s = time.perf_counter()
            trainer.save_checkpoint(self.path)
            self.stall_s = time.perf_counter() - began_s


def time_saves(device: torch.device, *, is_quick: bool) -> list[Row]:
    """Time how long a save holds up training, with and without a background writer."""
    from loopwright.checkpoint.saving.background import AsyncCheckpointIO

    task = _gpt_task(device, is_quick=is_quick)
    task.batches = task.batches[:6]
    task.warm_up = 1
    stalls = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, plugins in {"at once": [], "in the background": [AsyncCheckpointIO()]}.items():
            save = _Save(3, Path(folder, f"{name}.ckpt"), device)
            by_trainer(task, callbacks=[save], plugins=plugins)
            stalls[name] = save.stall_s
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 2e9
    value = ", ".join(f"{1e3 * stall:.0f} ms {name}" for name, stall in stalls.items())
    holds = None if is_quick else stalls["in the background"] < 0.5 * stalls["at once"]
    return [Row(f"a save of {size:.2f} GB holds up training", value, "less than half in the background", holds)]


class _Reads(lw.Callback):
    """Counts the warnings of torch's sync debug mode by step."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._caught: list[warnings.WarningMessage] = []
        self._before = 0

    def watch(self, caught: list[warnings.WarningMessage]) -> None:
        self._caught = caught

    def _count(self) -> int:
        return sum("synchronizing CUDA operation" in str(one.message) for one in self._caught)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self._count())


def count_reads(device: torch.device, *, is_quick: bool) -> list[Row]:
    """Count what makes the host wait for the device, at log boundaries and between them."""
    if device.type != "cuda":
        return [Row("host reads", "only a GPU has torch's sync debug mode")]
    steps, every = 200, 50

    class Logged(lw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = toy()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), fused=True)

    reads = _Reads()
    batches = [torch.randn(8, 32, device=device) for _ in range(steps)]
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        reads.watch(caught)
        trainer = lw.Trainer(
            max_epochs=1, accelerator="cuda", devices=1, log_every_n_steps=every, callbacks=[reads],
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, default_root_dir=folder,
            logger=lw.CSVLogger(folder),
        )  # fmt: skip
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.fit(Logged(), batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    per_step = [after - before for before, after in zip(reads.seen, reads.seen[1:], strict=False)]
    at_logs = [count for step, count in enumerate(per_step, 1) if step % every == 0]
    between = sum(count for step, count in enumerate(per_step, 1) if step % every and step > 3)
    value = f"{between} between log boundaries, {max(at_logs, default=0)} at one"
    return [Row(f"host reads in {steps} steps, logged every {every}", value, "none between", holds=between == 0)]


PARTS: dict[str, tuple[Callable[..., Sequence[Row]], int]] = {
    "tests": (run_tests, 180),
    "reads": (count_reads, 60),
    "steps": (time_overhead, 150),
    "mfu": (measure_mfu, 240),
    "memory": (compare_memory, 90),
    "fsdp": (train_fsdp, 60),
    "fp16": (check_scaler, 60),
    "transfer": (time_transfer, 60),
    "saves": (time_saves, 90),
}
"""Name -> what measures it, and after how many seconds it is ended."""


def main() -> None:
    """Run one part in this process, and print its rows as JSON."""
    import json

    name, device, is_quick = sys.argv[1], torch.device(sys.argv[2]), sys.argv[3] == "quick"
    rows = PARTS[name][0](device, is_quick=is_quick)
    print(json.dumps([asdict(row) for row in rows]), flush=True)
