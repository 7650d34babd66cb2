"""`loopwright plan --dry-run`: what a start of a program on many ranks would refuse; nothing is started."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ... import __version__
from ...doctor import Finding, Level
from ...doctor.disk import examine as examine_disk
from ...doctor.disk import judge_sharing
from ...doctor.finding import show_size
from ...planning.dry_run import Check, dry_run

if TYPE_CHECKING:
    from ...planning.simulation import Training
    from ...strategies import Strategy


def findings_of(
    training: Training,
    strategy: str | Strategy,
    *,
    devices: int,
    num_nodes: int,
    num_batches: int | None,
    folder: Path,
) -> Iterator[Finding]:
    """Yield what is found about ranks, data, the folder of checkpoints, and versions.

    Args:
        training: What is trained.
        strategy: That of the program's Trainer.
        devices: Devices per node.
        num_nodes: Nodes.
        num_batches: Batches of an epoch in one process; None: unknown.
        folder: Where checkpoints go.
    """
    for check in dry_run(training, strategy, devices=devices * num_nodes, num_batches=num_batches, num_nodes=num_nodes):
        yield _finding(check)
    yield judge_sharing(folder, num_nodes)
    yield from examine_disk(folder, 0)
    yield _room(training, folder)
    value = f"Loopwright {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    yield Finding("versions", "the same on all ranks", f"{value}: a start compares them")


def _finding(check: Check) -> Finding:
    level = Level.PROBLEM if check.is_problem else Level.WARNING if check.advice else Level.OK
    if check.value.startswith("not known"):
        level = Level.WARNING
    return Finding("ranks and data", check.name, check.value, level, check.advice)


def _room(training: Training, folder: Path) -> Finding:
    """Compare the room with a checkpoint of weights and two moments of the trained ones, as Adam has them."""
    with torch.device("meta"):
        parameters = list(training.build().parameters())  # with those that configure_model makes
    size = sum((3 if one.requires_grad else 1) * one.nbytes for one in parameters)
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(place).free
    value = f"about {show_size(size)} with Adam, {show_size(free)} free"
    if free >= 2 * size:
        return Finding("disk", "a checkpoint", value)
    level = Level.PROBLEM if free < size else Level.WARNING
    return Finding("disk", "a checkpoint", value, level, "make room: it is written beside the one that it replaces")
