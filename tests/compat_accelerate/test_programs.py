"""Programs of Accelerate's users, which compute the same to the last bit under Loopwright: `make test-lightning`.

programs/record.py writes losses, learning rates, weights and counts of each process; both sides' lines are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
REAL = os.environ.get("ACCELERATE_FOLDER", "")
COMMAND = [sys.executable, "-m", "loopwright", "run-accelerate"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

pytestmark = pytest.mark.skipif(not REAL, reason="ACCELERATE_FOLDER names no folder with Accelerate 1.15.0")

# Programs with their arguments; each runs in one process and in two.
RUNS = {
    "accumulation": ["accumulation.py"],
    "bfloat16": ["bfloat16.py"],
    "by_feature": ["by_feature.py"],
    "communication": ["communication.py"],
    "early_stopping": ["early_stopping.py"],
    "gan": ["gan.py"],
    "processes": ["processes.py"],
    "saved_states": ["saved_states.py", "states", "save"],
    "split_batches": ["split_batches.py"],
    "streaming": ["streaming.py"],
    "text_classifier": ["text_classifier.py", "--cpu"],
    "text_classifier_bf16": ["text_classifier.py", "--cpu", "--mixed_precision", "bf16"],
    "trackers": ["trackers.py"],
    "utilities": ["utilities.py"],
    "vision": ["vision.py"],
}


def environment(side: str) -> dict[str, str]:
    paths = [*([REAL] if side == "theirs" else []), os.environ.get("PYTHONPATH", "")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "LT_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def start(side: str, folder: Path, words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / "run_programs.py"), side, str(folder), *words],
        env=environment(side), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output[-3000:]
    return output


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of each side, in which all programs ran."""
    folders = {side: tmp_path_factory.mktemp(side) for side in ("theirs", "ours")}
    words = [f"{name}-{size}={size}:{','.join(program)}" for size in (1, 2) for name, program in RUNS.items()]
    for process in [start(side, folder, words) for side, folder in folders.items()]:
        finish(process)
    return folders


def lines(folder: Path, rank: int) -> list[Any]:
    """Return what a process recorded; fails with the process's output if the program failed."""
    file, output = folder / f"record_{rank}.jsonl", folder / f"output_{rank}.txt"
    text = output.read_text() if output.exists() else ""
    assert "Traceback (most recent call last)" not in text, text[-3000:]
    assert file.exists(), text[-3000:]
    return [json.loads(line) for line in file.read_text().splitlines()]


def compare(theirs: list[Any], ours: list[Any]) -> None:
    for index, (expected, got) in enumerate(zip(theirs, ours, strict=False)):
        assert got == expected, f"line {index}"
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_a_program_computes_what_it_computes_under_accelerate(name: str, size: int, recorded: dict[str, Path]) -> None:
    for rank in range(size):
        theirs = lines(recorded["theirs"] / f"{name}-{size}", rank)
        assert len(theirs) > 2
        compare(theirs, lines(recorded["ours"] / f"{name}-{size}", rank))


@pytest.fixture(scope="module")
def resumed(recorded: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which each side went on from the states of both: WRITER-READER-SIZE."""
    folder = tmp_path_factory.mktemp("resumed")
    processes = []
    for reader in recorded:
        words = []
        for writer, size in product(recorded, (1, 2)):
            states = folder / f"states-{writer}-{reader}-{size}"
            shutil.copytree(recorded[writer] / f"saved_states-{size}" / "states", states)
            words.append(f"{writer}-{reader}-{size}={size}:saved_states.py,{states},load")
        processes.append(start(reader, folder, words))
    for process in processes:
        finish(process)
    return folder


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", ["ours-ours", "ours-theirs", "theirs-ours"])
def test_a_program_goes_on_from_a_state_of_either_side(way: str, size: int, resumed: Path) -> None:
    for rank in range(size):
        expected = lines(resumed / f"theirs-theirs-{size}", rank)
        assert len(expected) > 1
        compare(expected, lines(resumed / f"{way}-{size}", rank))


def printed(command: list[str], folder: Path) -> str:
    folder.mkdir()
    done = subprocess.run(
        command, cwd=folder, env=environment("ours"), text=True, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_command_and_torchrun_start_two_processes(recorded: dict[str, Path], tmp_path: Path) -> None:
    script, arguments = str(PROGRAMS / "text_classifier.py"), ["--cpu"]
    loopwright = ["-m", "loopwright", "run-accelerate"]
    (tmp_path / "config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: 'no'\n"
        "num_machines: 1\nnum_processes: 2\nuse_cpu: true\n"
    )
    ways = {
        "command": [*COMMAND, "--num-processes", "2", "--cpu", script],
        "torchrun": [*TORCHRUN, *loopwright, script, *arguments],
        "file": [*COMMAND, "--config", str(tmp_path / "config.yaml"), script],
    }
    for way, command in ways.items():
        output = printed(command, tmp_path / way)
        assert output.count("epoch 0:") == 1, output
        for rank in range(2):
            compare(lines(recorded["theirs"] / "text_classifier-2", rank), lines(tmp_path / way, rank))


def test_the_command_passes_the_precision_on(recorded: dict[str, Path], tmp_path: Path) -> None:
    printed([*COMMAND, "--cpu", "--mixed-precision", "bf16", str(PROGRAMS / "text_classifier.py")], tmp_path / "run")
    compare(lines(recorded["theirs"] / "text_classifier_bf16-1", 0), lines(tmp_path / "run", 0))
