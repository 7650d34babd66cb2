"""`TokenShard`: the tokens of one source in memory-mapped files. `ShardWriter` writes them."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"  # Any: the type of its numbers
MANIFEST = "manifest.json"


class TokenShard:
    """The samples of one source: tokens, which of them are trained, and where samples begin.

    Arrays are mapped when first used, in each process by itself.

    Args:
        folder: Folder that a `ShardWriter` made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())  # Any: JSON

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled with its content on the way to a worker.
        return {"folder": self.folder, "manifest": self.manifest}

    @cached_property
    def ids(self) -> Array:
        """Tokens of all samples, one after the other."""
        return np.memmap(self.folder / "ids.bin", self.manifest["dtype"], "r")

    @cached_property
    def is_trained(self) -> Array | None:
        """For each token whether it is trained; None if all are."""
        return np.memmap(self.folder / "mask.bin", np.bool_, "r") if self.manifest["has_mask"] else None

    @cached_property
    def offsets(self) -> Array:
        """Where each sample begins, and the end of the last one."""
        return np.fromfile(self.folder / "offsets.bin", np.int64)

    @cached_property
    def records(self) -> Array:
        """Number of the record that each sample is from."""
        return np.fromfile(self.folder / "records.bin", np.int64)


class ShardWriter:
    """Writes a shard into a temporary folder.

    Args:
        folder: The temporary folder.
        vocab_size: All ids are below it; it selects the type of numbers on disk.
        has_mask: Whether some tokens are not trained.
    """

    def __init__(self, folder: Path, vocab_size: int, *, has_mask: bool) -> None:
        self._folder, self._has_mask = folder, has_mask
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._ids = (folder / "ids.bin").open("wb")
        self._mask = (folder / "mask.bin").open("wb") if has_mask else None
        self._offsets, self._records = [0], list[int]()
        self.tokens = self.trained = 0
        self.max_id = -1

    def append(self, ids: Array, is_trained: Array | None) -> None:
        """Add tokens to the sample that is being written."""
        if not len(ids):
            return
        self.max_id = max(self.max_id, int(ids.max()))
        self._ids.write(ids.astype(self._dtype).tobytes())
        self.tokens += len(ids)
        self.trained += len(ids) if is_trained is None else int(is_trained.sum())
        if self._mask is not None:
            mask = np.ones(len(ids), np.bool_) if is_trained is None else is_trained.astype(np.bool_)
            self._mask.write(mask.tobytes())

    def close_sample(self, record: int) -> None:
        """End the sample; an empty one is left out."""
        if self.tokens > self._offsets[-1]:
            self._offsets.append(self.tokens)
            self._records.append(record)

    def finish(self, more: dict[str, Any]) -> None:
        """Write the rest of the files; the manifest is the last of them.

        Args:
            more: Further entries of the manifest.
        """
        self.close()
        np.asarray(self._offsets, np.int64).tofile(self._folder / "offsets.bin")
        np.asarray(self._records, np.int64).tofile(self._folder / "records.bin")
        manifest = {
            "dtype": self._dtype.name,
            "has_mask": self._has_mask,
            "samples": len(self._records),
            "tokens": self.tokens,
            "trained": self.trained,
            "max_id": self.max_id,
            **more,
        }
        (self._folder / MANIFEST).write_text(json.dumps(manifest, indent=1))

    def close(self) -> None:
        """Close the files."""
        self._ids.close()
        if self._mask is not None:
            self._mask.close()


def temporary_folder(target: Path) -> Path:
    """Make a folder beside the target for its content; folders of processes of this machine that died are removed."""
    prefix = f"{target.name}.{socket.gethostname()}."
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f"{prefix}*.part"):
        if not _is_alive(left.name[len(prefix) : -len(".part")]):
            shutil.rmtree(left, ignore_errors=True)
    folder = target.with_name(f"{prefix}{os.getpid()}.part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def publish(folder: Path, target: Path) -> None:
    """Rename the temporary folder to the target: it is there with all of its content, or not at all.

    If another process was faster, its folder stays: it holds the same.
    """
    _sync([*folder.iterdir(), folder])
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(folder)
        return
    _sync([target.parent])


def _sync(paths: Sequence[Path]) -> None:
    """Sync the content to disk, so that after a power cut no folder with its final name is incomplete."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _is_alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
