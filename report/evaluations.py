"""Evaluations in processes of their own: which checkpoints they read, and the runs that their metrics belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import replace_file
from ..messages import warn
from ..protocols import StateDict, Tree
from ..remote import is_url
from .checkpoints import owner_of
from .names import natural

if TYPE_CHECKING:
    from .runs import LoggedRun, Series

EVALUATION_FILE = "evaluation.json"


def add_evaluated(folder: str | os.PathLike[str], checkpoint: str) -> None:
    """Add a checkpoint to those that `evaluation.json` in a run's folder names; called on rank zero.

    Other entries stay. A file of that name with another content is left alone, with a warning.

    Args:
        folder: Where the evaluation logged.
        checkpoint: Its path or URL. A path is written relative to the folder: both may be moved together.
    """
    path = Path(folder, EVALUATION_FILE)
    content: StateDict = {}
    names: Tree = []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = content.get("checkpoints", [])
    except FileNotFoundError:
        pass
    except (ValueError, AttributeError, RecursionError):
        names = None
    if not isinstance(names, list):
        warn(f"{path} seems to be another program's and is left alone; reports show this evaluation as another run")
        return
    if not is_url(checkpoint):
        with suppress(ValueError):  # on another drive
            checkpoint = os.path.relpath(checkpoint, folder)
    if checkpoint not in names:
        replace_file(path, json.dumps({**content, "checkpoints": [*names, checkpoint]}, indent=2) + "\n")


def join_evaluations(runs: Sequence[LoggedRun], root: Path | None = None) -> list[LoggedRun]:
    """Return runs in which metrics of evaluations are those of the runs whose checkpoints they read.

    An evaluation of checkpoints of several runs, or of one that is not among these, remains a run.

    Args:
        runs: What was read.
        root: The directory of all of them; None if they are below several.
    """
    trained = [run for run in runs if not run.evaluated]
    joined = []
    for run in runs:
        owners = {_owner(run, checkpoint, trained, root) for checkpoint in run.evaluated}
        owner = owners.pop() if len(owners) == 1 else None
        if owner is None:
            joined.append(run)
        else:
            _join(run, trained[owner])
    return joined


def _owner(run: LoggedRun, checkpoint: str, trained: Sequence[LoggedRun], root: Path | None) -> int | None:
    if is_url(checkpoint):
        return next(
            (n for n, one in enumerate(trained) if any(checkpoint.startswith(f"{p}/") for p in one.places)), None
        )
    path = Path(os.path.abspath(run.folders[0] / checkpoint))
    is_below = root is not None and Path(os.path.abspath(root)) in path.parents
    return owner_of(path, trained, is_of_one=is_below)


def _join(evaluation: LoggedRun, run: LoggedRun) -> None:
    for name, series in evaluation.series.items():
        known = run.series.get(name)
        run.series[name] = series if known is None else _both(known, series)
    run.series = {name: run.series[name] for name in sorted(run.series, key=natural)}
    run.folders += evaluation.folders
    run.places += evaluation.places
    run.kinds += evaluation.kinds
    run.media += evaluation.media
    run.problems += evaluation.problems


def _both(first: Series, second: Series) -> Series:
    points = dict(zip([*first.steps, *second.steps], [*first.values, *second.values], strict=True))
    steps = sorted(points)
    return replace(first, steps=steps, values=[points[step] for step in steps])
