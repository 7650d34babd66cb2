"""`python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER`, and that of Fabric."""

from __future__ import annotations

import argparse
from pathlib import Path

from ....checkpoint.file.streamed import save_streaming
from ....checkpoint.tools.formats import Reading, open_checkpoint

__all__ = ["main"]


def main() -> None:
    """Write a sharded checkpoint as one file, beside its folder by default."""
    parser = argparse.ArgumentParser(description="Convert a sharded checkpoint to one file.")
    parser.add_argument("checkpoint_folder", type=Path, help="folder of the sharded checkpoint")
    parser.add_argument("--output_file", type=Path, help="file to write; default: FOLDER.consolidated")
    arguments = parser.parse_args()
    folder: Path = arguments.checkpoint_folder
    file: Path = arguments.output_file or folder.with_suffix(f"{folder.suffix}.consolidated")
    if file.exists():
        parser.error(f"{file} exists; name another one with --output_file")
    save_streaming(open_checkpoint(folder, Reading(verify=True)).tree, file)
