"""The two sides of a comparison: a program as a child process, in its own folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import PARITY, SITE, SWITCH, child_environment
from .compare import Trace, read_record

__all__ = ["Outcome", "copy_files", "has_lightning", "run_side"]

RECORDER = Path(__file__).with_name("recorder.py")
# Size above which a file is linked, not copied, for a side.
_MAX_FILES = 2000
_MAX_FILE_BYTES = 10 * 2**20
_MAX_BYTES = 100 * 2**20
_LEFT_OUT = {".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__"}


@dataclass(frozen=True)
class Outcome:
    """How a side ended.

    Attributes:
        record: What happened there.
        problem: Why it is not complete, or the error that ended the program; empty if the program ended well.
    """

    record: Trace
    problem: str


def has_lightning(python: str) -> bool:
    """Return whether an interpreter finds Lightning itself.

    Raises:
        OSError: The interpreter cannot be started.
    """
    code = (
        "import importlib.util as u, sys; "
        "sys.exit(not any(u.find_spec(name) for name in ('lightning', 'pytorch_lightning', 'lightning_fabric')))"
    )
    return not subprocess.run([python, "-c", code], env=_environment(None), check=False).returncode


def run_side(
    python: str, command: Sequence[str], folder: Path, *, steps: int, parity: str | None, timeout_s: float
) -> Outcome:
    """Run a program in a copy of the working folder, and return what happened.

    Args:
        python: The interpreter.
        command: The program and its arguments, as for Python.
        folder: Where the copy is made; the record stands beside it.
        steps: Training steps of each fit.
        parity: Switches, as LOOPWRIGHT_PARITY has them; None for Lightning itself.
        timeout_s: How long the program may take, in seconds.
    """
    folder.mkdir(parents=True)
    work = folder / "work"
    copy_files(Path.cwd(), work, left_out=folder)
    output = folder / "output.txt"
    record = folder / "record.jsonl"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [python, str(RECORDER), str(record), str(steps), *command],
            cwd=work, env=_environment(parity), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return Outcome(read_record(record), f"did not end within {timeout_s:g} s; see --timeout")
        except BaseException:
            process.kill()
            process.wait()
            raise
    found = read_record(record)
    if found.frames:
        return Outcome(found, found.frames.rstrip().replace(str(work), "."))
    if not found.is_complete and not found.is_absent:
        text = "\n".join(output.read_text(errors="replace").splitlines()[-8:])
        return Outcome(found, f"ended with exit code {process.returncode}:\n{text}")
    return Outcome(found, "")


def copy_files(source: Path, target: Path, *, left_out: Path | None = None) -> None:
    """Copy a folder, so that a program does not write into the original; large files are linked.

    Args:
        source: The folder.
        target: The copy, which is made.
        left_out: A folder that is not copied, also if it is within the source.
    """
    target.mkdir(parents=True)
    waiting = deque([(source, target)])
    files, total = 0, 0
    while waiting:
        here, there = waiting.popleft()
        for entry in sorted(os.scandir(here), key=lambda one: one.name):
            if entry.name in _LEFT_OUT or (left_out is not None and left_out.is_relative_to(entry.path)):
                continue
            copy = there / entry.name
            if files >= _MAX_FILES or total >= _MAX_BYTES or entry.is_symlink():
                copy.symlink_to(Path(entry.path).resolve())
            elif entry.is_dir():
                copy.mkdir()
                waiting.append((Path(entry.path), copy))
            elif entry.is_file() and entry.stat().st_size <= _MAX_FILE_BYTES:
                shutil.copyfile(entry.path, copy)
                files, total = files + 1, total + entry.stat().st_size
            elif entry.is_file():
                copy.symlink_to(entry.path)


def _environment(parity: str | None) -> dict[str, str]:
    """Return the variables of a side: those of this process, without what earlier runs set."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in (PARITY, SWITCH, "PL_GLOBAL_SEED", "PL_SEED_WORKERS")
    }
    _set_default(kept, {"WANDB_MODE": "offline", "MPLBACKEND": "Agg", "PYTHONHASHSEED": "0"})
    if parity is not None:
        return {**kept, **child_environment(kept.get("PYTHONPATH", "")), PARITY: parity}
    folders = [one for one in kept.get("PYTHONPATH", "").split(os.pathsep) if one not in ("", SITE)]
    kept["PYTHONPATH"] = os.pathsep.join(folders)
    return kept if folders else {name: value for name, value in kept.items() if name != "PYTHONPATH"}


def _set_default(variables: dict[str, str], more: Mapping[str, str]) -> None:
    for name, value in more.items():
        variables.setdefault(name, value)
