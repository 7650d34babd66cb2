"""A finetuning by `loopwright recipe finetune` beside other programs, on the same model and data; run.py prints it.

Each program is its own process with the python of .venv-peers, and prints a line after each step. This process
reads the clock, and the CPU time and the peak memory of the other one, when a line arrives: what is measured does not
depend on what programs say about themselves. Programs take turns, and the order rotates from round to round.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from language_models.inputs import LEARNING_RATE, LENGTH, MICRO_BATCH, WARMUP_STEPS

# Any in this file: measured numbers, as they are in results/latest.json.

BENCHMARKS = Path(__file__).resolve().parents[1]
PYTHON = BENCHMARKS.parent / ".venv-peers" / "bin" / "python"
STEP = re.compile(r"\bstep (\d+)\b.*\bloss(?: train:)? ([0-9.]+)")

NAMES = {
    "recipe": "`loopwright recipe finetune`",
    "unpacked": "the same, `packing=false`",
    "litgpt": "`litgpt finetune_full`",
    "sft": "SFTTrainer of TRL",
    "hf": "Trainer of transformers",
    "hand": "hand-written loop",
}
# Samples of equal length fill a row, so that packing changes nothing.
WORKLOADS = {
    "equal": ("recipe", "litgpt", "sft", "hf", "hand"),
    "different": ("recipe", "unpacked", "litgpt", "sft", "hf", "hand"),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """A step's end: wall clock and CPU time in seconds, peak memory in bytes, and the loss."""

    step: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    loss: float


def measure_recipes(*, num_steps: int, rounds: int) -> dict[str, Any]:
    """Run every program `rounds` times; "skipped" says why nothing was measured."""
    if not PYTHON.exists():
        reason = "there is no .venv-peers, the environment with LitGPT and TRL: `make .venv-peers/installed` creates it"
        print(f"skipping recipes: {reason}", file=sys.stderr, flush=True)
        return {"skipped": reason}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        workload: {program: [] for program in programs} for workload, programs in WORKLOADS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder), num_steps)
        for at, (workload, program) in enumerate(turns(rounds)):
            out = Path(folder) / f"out{at}"
            marks = run(command(program, Path(folder), workload, out, num_steps), out)
            runs[workload][program].append(numbers(marks, inputs[workload]["trained_tokens"]))
            print(f"  {workload} {program}: {runs[workload][program][-1]}", file=sys.stderr, flush=True)
    return {"inputs": inputs, "versions": versions(), "rounds": rounds, "workloads": runs}


def turns(rounds: int) -> Iterator[tuple[str, str]]:
    """Give what runs next; each round begins with another program."""
    for turn in range(rounds):
        for workload, programs in WORKLOADS.items():
            first = turn % len(programs)
            yield from ((workload, program) for program in (*programs[first:], *programs[:first]))


def numbers(marks: Sequence[Mark], trained_tokens: int) -> dict[str, float]:
    """Return the numbers of one run; the first step counts as start, not as a step."""
    if len(marks) < 2:
        raise RuntimeError(f"Expected at least 2 steps, got {len(marks)}.")
    first, last = marks[0], marks[-1]
    tokens = trained_tokens * (len(marks) - 1) / len(marks)
    return {
        "tokens_per_s": tokens / (last.wall_s - first.wall_s),
        "cpu_s_per_1000": 1000 * (last.cpu_s - first.cpu_s) / tokens,
        "peak_mib": last.peak_bytes / 2**20,
        "first_step_s": first.wall_s,
        "first_step_cpu_s": first.cpu_s,
        "steps": len(marks),
        "first_loss": first.loss,
        "last_loss": sum(mark.loss for mark in marks[-5:]) / len(marks[-5:]),
    }


# --- processes --------------------------------------------------------------------------------------------------------


def command(program: str, folder: Path, workload: str, out: Path, num_steps: int) -> list[str]:
    """Return the command line of a program."""
    data = folder / workload
    if program == "litgpt":
        return [*_litgpt(folder / "litgpt", data), "--out_dir", str(out)]
    if program in ("recipe", "unpacked"):
        packing = ["packing=false"] if program == "unpacked" else []
        return [*_recipe(folder / "model", data), f"out={out}", *packing]
    return [str(PYTHON), "-m", "language_models.programs", program, str(folder / "model"), str(data), str(out)]


def _litgpt(model: Path, data: Path) -> list[str]:
    # Of the styles with a name none leaves the prompt as it is; this class does.
    style = {"class_path": "litgpt.prompts.Default"}
    arguments = {"json_path": str(data), "mask_prompt": True, "num_workers": 0, "prompt_style": style}
    optimizer = {"lr": LEARNING_RATE, "weight_decay": 0.0}
    settings = {
        "data": {"class_path": "litgpt.data.JSON", "init_args": arguments},
        "train": {
            "micro_batch_size": MICRO_BATCH,
            "global_batch_size": MICRO_BATCH,
            "epochs": 1,
            "max_seq_length": LENGTH,
            "lr_warmup_steps": WARMUP_STEPS,
        },
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": optimizer},
        "precision": "32-true",
        "devices": 1,
    }
    # A file, because numbers of an optimizer stay texts on LitGPT's command line.
    file = data / "litgpt.yaml"
    file.write_text(json.dumps(settings))
    return [str(PYTHON.with_name("litgpt")), "finetune_full", str(model), "--config", str(file)]


def _recipe(model: Path, data: Path) -> list[str]:
    settings = {
        "model": model,
        "data": data / "train.jsonl",
        "method": "full",
        "prompt_style": "plain",
        "max_length": LENGTH,
        "micro_batch": MICRO_BATCH,
        "global_batch": MICRO_BATCH,
        "epochs": 1,
        "learning_rate": LEARNING_RATE,
        "weight_decay": 0.0,
        "warmup": WARMUP_STEPS,
        "precision": "32-true",
        "devices": 1,
        "trainer.gradient_clip_val": "null",
        "trainer.callbacks": "[{class_path: language_models.marks.Marks}]",
    }
    return [
        str(PYTHON),
        "-m",
        "loopwright",
        "recipe",
        "finetune",
        *(f"{key}={value}" for key, value in settings.items()),
    ]


def make_inputs(folder: Path, num_steps: int) -> dict[str, Any]:
    """Write models and data, and return their sizes."""
    done = subprocess.run(
        [str(PYTHON), "-m", "language_models.inputs", str(folder), str(num_steps)],
        capture_output=True, text=True, env=environment(folder), check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"language_models.inputs failed:\n{done.stderr}")
    inputs: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return inputs


def environment(folder: Path) -> dict[str, str]:
    """Return what programs run with: one thread, nothing from a hub, caches in the folder."""
    # Users run from cached bytecode; a machine may be set not to write it, which would measure the compiler.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "PYTHONPATH": str(BENCHMARKS),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(arguments: Sequence[str], out: Path) -> list[Mark]:
    """Run a program, and return a mark for each of its steps."""
    marks: list[Mark] = []
    lines = []
    began = time.perf_counter()
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment(out), cwd=out.parent,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter()
            lines.append(line)
            found = STEP.search(line)
            if found and (not marks or int(found[1]) > marks[-1].step):
                marks.append(Mark(int(found[1]), now - began, *used_by(process.pid), float(found[2])))
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{''.join(lines[-60:])}")
    return marks


def used_by(pid: int) -> tuple[float, int]:
    """Return the CPU seconds of a process and its peak memory in bytes; NaN and 0 where there is no /proc."""
    try:
        # The name of the program, in parentheses, may have spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return float("nan"), 0
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 1024 * int(peak[1]) if peak else 0


def versions() -> dict[str, str]:
    """Return the versions of the programs."""
    code = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in %r}))"
    names = ("litgpt", "lightning", "trl", "transformers", "torch")
    done = subprocess.run([str(PYTHON), "-c", code % (names,)], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
