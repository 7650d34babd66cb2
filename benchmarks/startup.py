"""What it costs to begin: imports, and the time to the first step, each in fresh processes; run.py prints them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

_IMPORT = """
import json, sys, time
{before}
modules, cpu, wall = len(sys.modules), time.process_time(), time.perf_counter()
{what}
print(json.dumps({{
    "modules": len(sys.modules) - modules,
    "cpu_s": time.process_time() - cpu,
    "wall_s": time.perf_counter() - wall,
    "has_torch": "torch" in sys.modules,
}}))
"""

# What a user's file does; process_time counts from the start of the process, so the imports are in it.
_BY_HAND = """
import json, time
import torch
from torch import nn

net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
batches = [(torch.randn(8, 32), torch.randn(8, 1)) for _ in range(4)]
began = time.perf_counter()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for x, y in batches:
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    break
print(json.dumps({"process_cpu_s": time.process_time(), "fit_s": time.perf_counter() - began}))
"""

_BY_TRAINER = """
import contextlib, json, os, tempfile, time, warnings
import torch
from torch import nn
import loopwright as lw

warnings.simplefilter("ignore")


class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:
            numbers["process_cpu_s"] = time.process_time()
            numbers["fit_s"] = time.perf_counter() - began


numbers = {}
batches = [(torch.randn(8, 32), torch.randn(8, 1)) for _ in range(4)]
with tempfile.TemporaryDirectory() as folder, OUTPUT as nowhere:
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        trainer = lw.Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=folder, OPTIONS)
        began = time.perf_counter()
        trainer.fit(Net(), batches)
print(json.dumps(numbers))
"""

# A terminal that is read.
_TERMINAL = """
import os, pty, threading
terminal, other_end = pty.openpty()
threading.Thread(target=lambda: all(iter(lambda: os.read(terminal, 65536), b"")), daemon=True).start()
"""

IMPORTS = (
    # name, what ran before, what is measured, aim in words
    ("`import loopwright`, alone", "", "import loopwright", "< 50 ms, no torch"),
    ("`lw.Trainer`, over `import torch`", "import torch", "import loopwright as lw; lw.Trainer", "100 ms, 100 modules"),
    ("the same, over torch and an optimizer", "import torch; torch.optim.SGD([torch.zeros(1)], lr=1)",
     "import loopwright as lw; lw.Trainer", ""),
)  # fmt: skip


def _by_trainer(options: str, output: str = 'open(os.devnull, "w")') -> str:
    return _BY_TRAINER.replace("OPTIONS", options).replace("OUTPUT", output)


FIRST_STEPS = (
    ("hand-written loop", _BY_HAND, ""),
    ("Trainer, `barebones=True`", _by_trainer("barebones=True"), "+ 0"),
    ("Trainer, defaults", _by_trainer(""), "+ 0.1 to bare"),
    ("Trainer, defaults, on a terminal", _TERMINAL + _by_trainer("", 'os.fdopen(other_end, "w")'), "+ 0.1 to bare"),
)


def _run(script: str) -> dict[str, Any]:
    # Users run from cached bytecode; a machine may be set not to write it, which would measure the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(float(run[key]) for run in runs)


def time_imports(*, processes: int) -> list[dict[str, Any]]:
    """Import in fresh processes; times are medians in seconds."""
    rows = []
    for name, before, what, aim in IMPORTS:
        script = _IMPORT.format(before=before, what=what)
        _run(script)
        runs = [_run(script) for _ in range(processes)]
        rows.append(
            {
                "name": name,
                "aim": aim,
                "cpu_s": _median(runs, "cpu_s"),
                "wall_s": _median(runs, "wall_s"),
                "modules": runs[0]["modules"],
                "has_torch": runs[0]["has_torch"],
            }
        )
    return rows


def time_first_steps(*, processes: int) -> list[dict[str, Any]]:
    """Run one step in fresh processes, hand-written and with a Trainer in turns; times are medians in seconds."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in FIRST_STEPS}
    for _ in range(processes):
        for name, script, _ in FIRST_STEPS:
            runs[name].append(_run(script))
    return [
        {
            "name": name,
            "aim": aim,
            "process_cpu_s": _median(runs[name], "process_cpu_s"),
            "process_cpu_min_s": min(run["process_cpu_s"] for run in runs[name]),
            "fit_s": _median(runs[name], "fit_s"),
        }
        for name, _, aim in FIRST_STEPS
    ]
