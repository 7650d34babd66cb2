"""`save_split`: a sharded checkpoint written by one process, without a group."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...protocols import Advance, StateDict
from .. import storage
from ..plain import require_plain
from ..sharded.backends import state_entry
from ..sharded.manifest import Chunk, FileEntry, digest_of, manifest_of
from ..sharded.shard_file import StoredPart, lay_out, write_tensor
from ..sharded.target import target_of
from ..sharded.tree import PLACEHOLDER_KEY, step_of
from ..tensors import AnyTensor, Key, map_tensors, memory_key, read_slice, read_tensor, size_bytes


def save_split(checkpoint: StateDict, path: str | Path, *, num_shards: int, advance: Advance | None = None) -> None:
    """Write a checkpoint as a folder, its tensors split along their first dimension into a number of files.

    Weights and optimizer states of one dimension or more are split; the rest is in the state file. One shard is
    in memory at a time.

    Args:
        checkpoint: The content.
        path: Folder, or URL.
        num_shards: Number of files.
        advance: Called with the number of bytes whenever some were written.

    Raises:
        CheckpointError: The content is not plain, or cannot be written; an existing one is intact.
    """
    tensors: dict[str, AnyTensor] = {}
    first: dict[object, str] = {}

    def take_out(value: AnyTensor, keys: tuple[Key, ...]) -> object:
        if keys[0] not in ("state_dict", "optimizer_states") or not _is_split(value):
            return value if isinstance(value, Tensor) else read_tensor(value)
        name = first.setdefault(memory_key(value), "/".join(map(step_of, keys)))  # a tied tensor is written once
        tensors.setdefault(name, value)
        return {PLACEHOLDER_KEY: name}

    rest = map_tensors(checkpoint, take_out)
    require_plain(rest)
    target = target_of(path, None)
    total = sum(size_bytes(tensor) for tensor in tensors.values())
    try:
        target.prepare()
        files: dict[str, FileEntry] = {}
        chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
        for number in range(num_shards):
            shards = {name: shard for name, tensor in tensors.items() if (shard := _shard(tensor, number, num_shards))}
            if not shards:
                continue
            name = f"shard-{target.token}-{number:05d}-of-{num_shards:05d}.safetensors"
            layout = lay_out([StoredPart(path, tensors[path].dtype, sizes) for path, (_, sizes) in shards.items()])
            with target.backend.create(name) as file:
                file.write(memoryview(layout.header))
                for part, start in layout.starts:
                    offsets, sizes = shards[part.name]
                    crc = write_tensor(read_slice(tensors[part.name], offsets, sizes), file)
                    chunks[part.name].append(Chunk(offsets, sizes, name, start, crc))
                    if advance is not None:
                        advance(part.size_bytes)
            files[name] = FileEntry(layout.size_bytes, digest_of(layout.header))
        state = f"state-{target.token}.ckpt"
        storage.save(rest, target.backend.address(state))
        files[state] = state_entry(target.backend, state)
        target.commit(manifest_of(tensors, chunks, files, state=state, world_size=num_shards))
    except OSError as error:
        target.abort()
        raise error if isinstance(error, CheckpointError) else target.explained(error, total) from error
    except BaseException:
        target.abort()
        raise
    finally:
        target.close()


def _is_split(value: AnyTensor) -> bool:
    is_dense = not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_quantized)
    return is_dense and len(value.shape) > 0 and value.shape.numel() > 0


def _shard(tensor: AnyTensor, number: int, num_shards: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return offsets and sizes of one shard, split as FSDP does (torch.chunk); None if nothing is left for it."""
    rows = -(-tensor.shape[0] // num_shards)
    start, end = number * rows, min((number + 1) * rows, tensor.shape[0])
    if start >= end:
        return None
    return (start, *[0] * (len(tensor.shape) - 1)), (end - start, *tensor.shape[1:])
