"""The source of Python's standard library as bytes; examples/gpt/train.py trains on it.

Every machine that can run the example has this text: about 11 MB in 600 files.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

import loopwright as lw

# Not part of the library: packages installed later, and tests (they contain unusual encodings and data).
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
HELD_OUT_FILE_EVERY = 20
VALIDATION_WINDOWS = 640  # enough for two digits of the loss; a validation takes a second or two


def library_files() -> list[Path]:
    """List the standard library's Python files in an order that does not depend on the file system."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in sorted(files) if not LEFT_OUT & set(path.parts)]


def concatenate(files: Iterable[Path]) -> Tensor:
    """Return the concatenated bytes of the files: shape (size_bytes,), uint8."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """A text split into windows that do not overlap: item i is (block_size + 1,) uint8, inputs and targets."""

    def __init__(self, text: Tensor, block_size: int) -> None:
        self.text = text
        self.block_size = block_size

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.block_size

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.block_size
        return self.text[start : start + self.block_size + 1]


class StandardLibrary(lw.DataModule):
    """Training and validation loaders; every 20th file is held out for validation.

    Args:
        cache_dir: Folder for the text, stored as one file of tensors.
        block_size: Context length of a sample, in bytes.
        batch_size: Number of samples per batch.
    """

    def __init__(self, cache_dir: Path, block_size: int = 128, batch_size: int = 16) -> None:
        super().__init__()
        self.cache = cache_dir / f"stdlib-{platform.python_version()}.pt"
        self.block_size = block_size
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        if self.cache.exists():
            return
        files = library_files()
        held_out = files[::HELD_OUT_FILE_EVERY]
        text = {"train": concatenate(sorted(set(files) - set(held_out))), "val": concatenate(held_out)}
        self.cache.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.cache.with_suffix(f".{os.urandom(8).hex()}.tmp")
        torch.save(text, unfinished)
        unfinished.replace(self.cache)  # atomic: a killed run leaves no incomplete file

    def setup(self, stage: str) -> None:
        text = torch.load(self.cache, weights_only=True)
        self.train_windows = Windows(text["train"], self.block_size)
        held_out = Windows(text["val"], self.block_size)
        # Evenly spaced, so that every held-out file contributes.
        self.val_windows = Subset(held_out, range(0, len(held_out), max(1, len(held_out) // VALIDATION_WINDOWS)))

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train_windows, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val_windows, batch_size=self.batch_size)
