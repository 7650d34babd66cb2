"""Sharded checkpoints: a folder that all ranks write, each its own shards; any process reads it, without a group.

    name.ckpt/
      manifest.json                                   the commit mark: without it the folder is not a checkpoint
      state-<token>.ckpt                              all that is not sharded, as a file of storage.py, by rank 0
      shard-<token>-00000-of-00002.safetensors        one per rank that has something to write

Saving needs torch.distributed.checkpoint, which takes most of a second to import; reading does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...protocols import StateDict, StorageOptions
from ..tensors import StoredTensor
from .backends import identify, is_folder_checkpoint, remove
from .manifest import FileEntry, Manifest, TensorEntry
from .reader import load, read_manifest, verify, verify_share
from .tree import holds_sharded

__all__ = [
    "FileEntry",
    "Manifest",
    "StoredTensor",
    "TensorEntry",
    "holds_sharded",
    "identify",
    "is_folder_checkpoint",
    "load",
    "read_manifest",
    "remove",
    "save",
    "verify",
    "verify_share",
]


def save(
    checkpoint: StateDict,
    path: str | Path,
    storage_options: StorageOptions | None = None,
    *,
    group: Any = None,  # Any: ProcessGroup, whose import is heavy
    is_part: bool = False,
) -> None:
    """Write a checkpoint as a folder, each rank its local shards; it is complete when this returns.

    Called on every rank of the group with the same structure: it communicates. Values that are not sharded come from
    rank 0. `RemoteShards` represent sharded tensors that only other ranks have. A replicated shard is written once. No
    copy is made in memory, except of one tensor at a time that is on a device or not contiguous.

    A checkpoint folder at the path stays intact until the new manifest replaces the old one in one step, so the disk
    needs space for both. A link is replaced, not followed. A single-file checkpoint at the path, and a folder with
    other files, are refused before anything is written: no system call could replace them in one step.

    If a rank is killed, the path has the old checkpoint or the new one. The next sharded save into the same parent
    folder (temporary folders) or over the same folder (files) removes the remains, once no process holds their lock. At
    a URL there are no locks: the next save over the folder removes all files of Loopwright that its manifest does not
    name, so only one program may save to an address at a time.

    Args:
        checkpoint: Tensors, DTensors and plain values, and `Trusted` objects.
        path: Folder or URL, seen by all ranks; rank 0's counts. Missing parents are made.
        storage_options: Arguments of the remote file system.
        group: Ranks that save, on a backend for CPU objects; None is the default group. Without torch.distributed, one
            process saves.
        is_part: Whether the group holds a part of the tensors only, as the ranks of one of several nodes do. Each of
            its ranks can read its shards again; reading what others hold is an error.

    Raises:
        CheckpointError: Some rank could not write, or the content is not plain; raised on all ranks, names the ranks.
            Unless the commit was done already (its message then comes from fsync or from removing old files), the old
            checkpoint is intact and nothing unfinished is left.
        RuntimeError: torch.distributed's own: a rank has died. The old checkpoint or the new one is intact.
    """
    from .writer import save as save_on_all_ranks

    save_on_all_ranks(checkpoint, path, storage_options, group=group, is_part=is_part)
