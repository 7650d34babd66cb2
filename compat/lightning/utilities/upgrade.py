"""`python -m lightning.pytorch.utilities.upgrade_checkpoint PATH`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch

from ....messages import counted
from .files import _load
from .migration import migrate_checkpoint

__all__ = ["main"]

logger = logging.getLogger(__name__)


def main() -> None:
    """Bring a checkpoint, or all in a folder, to the present form; the originals stay, with the suffix .bak."""
    parser = argparse.ArgumentParser(description="Upgrade checkpoints to the form of the present version.")
    parser.add_argument("path", type=Path, help="a checkpoint, or a folder with checkpoints")
    parser.add_argument("--extension", "-e", default=".ckpt", help="suffix of the files in a folder")
    parser.add_argument("--map-to-cpu", action="store_true", help="load all tensors to the CPU")
    arguments = parser.parse_args()
    files = _files(arguments.path.absolute(), f".{arguments.extension.removeprefix('.')}")
    if not files:
        logger.error("Expected a checkpoint, or a folder with *%s, in %s.", arguments.extension, arguments.path)
        sys.exit(1)
    for file in files:
        backup = file.with_suffix(".bak")
        if not backup.exists():
            copyfile(file, backup)
        checkpoint: Any = _load(file, "cpu" if arguments.map_to_cpu else None, weights_only=True)
        migrate_checkpoint(checkpoint)
        torch.save(checkpoint, file)
    logger.info("Upgraded %s.", counted(len(files), "checkpoint"))


def _files(path: Path, suffix: str) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob(f"*{suffix}"))
    return [path] if path.is_file() else []
