"""Fill benchmarks/RESOURCES.md: memory and samples per second by model and number of devices, where this is run.

    python benchmarks/resources.py                    # 1, 2, 4, ... devices of this machine
    python benchmarks/resources.py --models gpt-124m --devices 1 8 --strategy fsdp

Each row is a training of a model of `loopwright.demos` on data that are in memory, in processes of its own, so that a
row that runs out of memory says so and leaves the others. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from tables import table
from torch.utils.data import DataLoader, Dataset

import loopwright as lw
from loopwright import demos

HERE = Path(__file__).resolve()
HEADER = ("model", "parameters", "devices", "strategy", "precision", "batch per device", "samples/s", "memory (GB)")
WARM_UP = 3
MARK = "row: "

Build = Callable[[], tuple[lw.Module, Dataset[object]]]


def gpt(vocabulary: int, length: int, *sizes: int) -> Build:
    """Return a GPT of a width, layers and heads, and its data."""
    return lambda: (
        demos.GPT(vocabulary, length, *sizes),
        demos.SyntheticText(length=length + 1, vocabulary=vocabulary),
    )


def vit(size: int, patch: int, channels: int, *sizes: int) -> Build:
    """Return a vision transformer, and its data."""
    return lambda: (demos.ViT(size, patch, channels, 4, *sizes), demos.SyntheticImages(size=size, channels=channels))


# Name -> model and data, and the batch of a device.
LARGE: dict[str, tuple[Build, int]] = {
    "gpt-124m": (gpt(50304, 1024, 768, 12, 12), 8),
    "gpt-355m": (gpt(50304, 1024, 1024, 24, 16), 4),
    "gpt-774m": (gpt(50304, 1024, 1280, 36, 20), 2),
    "vit-b/16": (vit(224, 16, 3, 768, 12, 12), 64),
}
SMALL: dict[str, tuple[Build, int]] = {
    "gpt-0.1m": (gpt(64, 64, 64, 2, 4), 32),
    "gpt-10m": (gpt(4096, 128, 320, 7, 5), 8),
    "text classifier": (lambda: (demos.TextClassifier(), demos.SyntheticTopics()), 32),
    "vit-0.1m": (vit(16, 4, 1, 64, 2, 4), 32),
}


def parse_arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*LARGE, *SMALL]
    parser.add_argument(
        "--models", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}; all that suit the device"
    )
    parser.add_argument(
        "--devices", nargs="+", type=int, metavar="N", help="numbers of devices (default: 1, 2, 4, ...)"
    )
    parser.add_argument("--strategy", default="ddp", help="strategy on several devices (default ddp)")
    parser.add_argument("--precision", help="default: bf16-mixed on GPUs, 32-true on the CPU")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed, after three others (default 30)")
    parser.add_argument("--output", type=Path, default=HERE.parent / "RESOURCES.md", help="the file to write")
    parser.add_argument("--row", nargs=2, metavar=("NAME", "N"), help=argparse.SUPPRESS)
    return parser.parse_args()


class Clock(lw.Callback):
    """Measures the steps after the warm-up."""

    began_s = rate = 0.0

    def on_train_batch_start(self, trainer: lw.Trainer, pl_module: object, batch: object, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == WARM_UP:
            self._wait(trainer)
            self.began_s = time.perf_counter()

    def on_train_end(self, trainer: lw.Trainer, pl_module: object) -> None:
        """Set steps per second."""
        self._wait(trainer)
        self.rate = (trainer.global_step - WARM_UP) / (time.perf_counter() - self.began_s)

    @staticmethod
    def _wait(trainer: lw.Trainer) -> None:
        if trainer.model is not None and next(trainer.model.parameters()).is_cuda:
            torch.cuda.synchronize()


def measure(name: str, devices: int, arguments: argparse.Namespace) -> None:
    """Train, and print a row on rank 0."""
    build, batch_size = {**LARGE, **SMALL}[name]
    module, data = build()
    batch = next(iter(DataLoader(data, batch_size=batch_size)))  # the same for each step: data are not what is measured
    on_gpu = torch.cuda.is_available()
    precision = arguments.precision or ("bf16-mixed" if on_gpu else "32-true")
    strategy = arguments.strategy if devices > 1 else "auto"
    clock = Clock()
    trainer = lw.Trainer(
        max_steps=WARM_UP + arguments.steps, devices=devices, strategy=strategy, precision=precision, callbacks=[clock],
        accelerator="gpu" if on_gpu else "cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, limit_val_batches=0,
    )  # fmt: skip
    count = sum(parameter.numel() for parameter in module.parameters())
    trainer.fit(module, [batch] * (WARM_UP + arguments.steps))
    if trainer.is_global_zero:
        row = [
            name, f"{count / 1e6:.1f} M", devices, strategy if devices > 1 else "none", precision, batch_size,
            f"{clock.rate * batch_size * devices:,.0f}", f"{_peak_bytes() / 1e9:.2f}",
        ]  # fmt: skip
        print(MARK + json.dumps(row), flush=True)


def _peak_bytes() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024)  # bytes on macOS


def run_row(name: str, devices: int, arguments: argparse.Namespace) -> list[object]:
    """Return a row, measured in another process, or why there is none."""
    print(f"{name} on {devices} ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE), "--row", name, str(devices), "--steps", str(arguments.steps)]
    command += [
        "--strategy",
        arguments.strategy,
        *(["--precision", arguments.precision] if arguments.precision else []),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # one device would use all cores, and compare with nothing
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            row: list[object] = json.loads(line.removeprefix(MARK))
            return row
    reason = "out of memory" if "out of memory" in done.stderr.lower() else f"failed ({done.returncode})"
    if reason != "out of memory":
        print(done.stderr[-2000:], file=sys.stderr)
    return [name, "", devices, arguments.strategy if devices > 1 else "none", "", "", reason, ""]


def main() -> int:
    """Measure all rows and write the file; return the exit code."""
    arguments = parse_arguments()
    if arguments.row is not None:
        measure(arguments.row[0], int(arguments.row[1]), arguments)
        return 0
    on_gpu = torch.cuda.is_available()
    available = torch.cuda.device_count() if on_gpu else (os.cpu_count() or 1)
    counts = arguments.devices or [count for count in (1, 2, 4, 8, 16) if count <= available]
    names = arguments.models or list(LARGE if on_gpu else SMALL)
    rows = [run_row(name, count, arguments) for name in names for count in counts]
    where = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, one thread per rank"
    memory = "allocated by torch on rank 0's device" if on_gpu else "resident memory of rank 0, torch's code included"
    arguments.output.write_text(
        "# Memory and samples per second\n\n"
        f"Measured on {date.today().isoformat()} with `python benchmarks/resources.py`, torch {torch.__version__}, on "
        f"{where}. Models and data are those of `loopwright.demos`. Memory is the peak: {memory}.\n\n"
        f"{table(HEADER, rows)}\n",
        encoding="utf-8",
    )
    print(arguments.output.read_text(encoding="utf-8"))
    return int(any("failed" in str(row[6]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
