"""The checkpoints that a run has kept, and what they record: step, score, versions, epochs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from ..errors import CheckpointError
from ..protocols import Tree

if TYPE_CHECKING:
    from ..protocols import StateDict
    from .runs import LoggedRun

_SUFFIX = ".ckpt"
_STEP_IN_NAME = re.compile(r"step[=_-](\d+)")
_MOST_OPENED = 100  # of a run that keeps them all, the newest are opened, and the names of the others are read


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint on disk.

    Attributes:
        path: A file, or a folder for a sharded one.
        step: Optimizer steps done; None if neither the content nor the name shows it.
        epoch: Epochs done; None if the content does not record them.
        size_bytes: Of all its files.
        modified: Seconds since 1970.
        roles: "best", "last", ...: what the callbacks that saved it call it.
        score: The metric value by which it was chosen; None if it was not chosen.
        monitor: Name of the score.
        problem: Why it cannot be read; "" if it can, or was not opened.
    """

    path: Path
    step: int | None
    epoch: int | None
    size_bytes: int
    modified: float
    roles: tuple[str, ...] = ()
    score: float | None = None
    monitor: str | None = None
    problem: str = ""


class CheckpointReader:
    """Finds checkpoints and opens each one once for every time that it is written.

    Args:
        is_closed: Whether a file cannot be opened: its content is not on this machine.
    """

    def __init__(self, is_closed: Callable[[Path], bool] = lambda path: False) -> None:
        self._is_closed = is_closed
        self._known: dict[Path, tuple[tuple[int, int, int], StateDict]] = {}  # Any: what checkpoints hold

    def assign(self, root: Path, runs: Sequence[LoggedRun]) -> None:
        """Assign checkpoints to the runs found below a directory."""
        by_run: dict[int, list[Path]] = {}
        for path in find_checkpoints(root):
            owner = owner_of(path, runs)
            if owner is not None:
                by_run.setdefault(owner, []).append(path)
        for number, paths in by_run.items():
            self._describe(runs[number], paths)

    def _describe(self, run: LoggedRun, paths: list[Path]) -> None:
        newest_first = sorted(paths, key=_modified, reverse=True)
        found: list[CheckpointFile] = []
        newest: StateDict = {}
        for number, path in enumerate(newest_first):
            try:
                size, modified = _size(path), _modified(path)
            except OSError:
                continue  # a running run has removed it
            facts = self._open(path) if number < _MOST_OPENED else {}
            newest = newest or (facts if "problem" not in facts else {})
            named = _STEP_IN_NAME.search(path.name)
            step = facts.get("step", int(named[1]) if named else None)
            epoch, problem = facts.get("epoch"), facts.get("problem", "")
            found.append(CheckpointFile(path, step, epoch, size, modified, problem=problem))
        roles = newest.get("roles", {})
        marked = [
            replace(file, roles=tuple(role), score=score, monitor=monitor)
            for file in found
            for role, score, monitor in [roles.get(file.path.name, ((), None, None))]
        ]
        run.checkpoints = sorted(marked, key=lambda file: (-1 if file.step is None else file.step, file.path.name))
        for name, value in newest.get("environment", {}).items():
            run.environment.setdefault(name, value)
        if not run.config:
            run.config.update(newest.get("config", {}))

    def _open(self, path: Path) -> StateDict:
        try:
            state = path.stat()
        except OSError as error:
            return {"problem": str(error)}
        stamp = (state.st_ino, state.st_mtime_ns, state.st_size)
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            known = self._known[path] = (stamp, {} if path.is_dir() or self._is_closed(path) else _read(path))
        return known[1]


def find_checkpoints(root: Path) -> list[Path]:
    """Return all checkpoints below a folder, files and folders; no hidden ones, and none that a rollback abandoned."""
    found = []
    for folder, below, files in os.walk(root):
        found += [Path(folder, name) for name in files if name.endswith(_SUFFIX) and not name.startswith(".")]
        found += [Path(folder, name) for name in below if name.endswith(_SUFFIX)]
        below[:] = [name for name in below if not name.startswith(".") and not name.endswith((_SUFFIX, ".abandoned"))]
    return found


def owner_of(path: Path, runs: Sequence[LoggedRun], *, is_of_one: bool = True) -> int | None:
    """Return the number of the run in whose folder a checkpoint is, None if it is in that of none.

    Args:
        path: The checkpoint.
        runs: The runs.
        is_of_one: Whether, with one run only, the checkpoint is that run's wherever it is.
    """
    if len(runs) == 1 and is_of_one:
        return 0
    above = {Path(os.path.abspath(parent)) for parent in path.parents}
    depth = {
        number: len(folder.parts)
        for number, run in enumerate(runs)
        for folder in (Path(os.path.abspath(one)) for one in run.folders)
        if folder in above
    }
    return max(depth, key=lambda number: depth[number], default=None)


def _read(path: Path) -> StateDict:
    """Return what a file records about its run; the tensors stay on disk, and nothing in it is executed."""
    from ..checkpoint import storage

    try:
        content = storage.load(path, map_location="cpu", mmap=True, verify=False)
    except CheckpointError as error:
        return {"problem": error.what[:200]}
    facts: StateDict = {"roles": _roles(content.get("callbacks")), "environment": _environment(content)}
    for ours, its in (("step", "global_step"), ("epoch", "epoch")):
        if isinstance(content.get(its), int):
            facts[ours] = content[its]
    parameters = content.get("hyper_parameters")
    if isinstance(parameters, dict):
        facts["config"] = {str(name): str(value) for name, value in parameters.items()}
    return facts


def _roles(callbacks: Tree) -> dict[str, tuple[list[str], float | None, str | None]]:
    """Return, by file name, what the states of ModelCheckpoint callbacks record; the run may have been moved."""
    found: dict[str, tuple[list[str], float | None, str | None]] = {}
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if not isinstance(state, Mapping):
            continue
        monitor = state.get("monitor")
        for path, score in (state.get("best_k_models") or {}).items():
            found[Path(path).name] = ([], _float(score), monitor)
        for role, key in (("best", "best_model_path"), ("last", "last_model_path")):
            name = Path(state.get(key) or "").name
            if name:
                roles, score, its = found.get(name, ([], None, None))
                best = _float(state.get("best_model_score")) if role == "best" and score is None else score
                found[name] = ([*roles, role], best, its or (monitor if role == "best" else None))
    return found


def _environment(content: StateDict) -> dict[str, str]:
    ours = content.get("loopwright")
    if not isinstance(ours, dict):
        version = content.get("pytorch-lightning_version")
        return {"lightning": str(version)} if version else {}
    versions = ours.get("versions")
    found = {str(name): str(version) for name, version in versions.items()} if isinstance(versions, dict) else {}
    if "world_size" in ours:
        found["processes"] = str(ours["world_size"])
    saved = ours.get("progress")
    progress = saved if isinstance(saved, dict) else {}
    for name in ("steps", "samples", "tokens"):
        if progress.get(name):
            found[f"{name} done"] = f"{progress[name]:,}"
    return found


def _float(value: SupportsFloat | None) -> float | None:
    return None if value is None else float(value)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
