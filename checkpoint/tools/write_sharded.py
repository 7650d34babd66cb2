"""`save_cut`: a sharded checkpoint written by one process, without a group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...errors import CheckpointError
from .. import storage
from ..file.lazy import is_tensor, map_tensors, read_tensor, size_bytes
from ..plain import require_plain
from ..sharded import StoredTensor
from ..sharded.manifest import FORMAT_VERSION, SEAL_DIGEST_SIZE, Chunk, FileEntry, Manifest, TensorEntry, digest_of
from ..sharded.shard_file import Part, lay_out, write_tensor
from ..sharded.target import target_of
from ..sharded.tree import PLACEHOLDER_KEY, step_of

__all__ = ["save_cut"]


def save_cut(
    checkpoint: dict[str, Any],  # Any: plain values and tensors, read or not
    path: str | Path,
    *,
    num_shards: int,
    advance: Callable[[int], object] | None = None,
) -> None:
    """Write a checkpoint as a folder, its tensors cut along their first dimension into a number of files.

    Weights and optimizer states of one dimension or more are cut; the rest stands in the state file. One piece is in
    memory at a time, where it can be read alone.

    Args:
        checkpoint: The content.
        path: Folder, or URL.
        num_shards: Number of files.
        advance: Called with the number of bytes whenever some were written.

    Raises:
        CheckpointError: The content is not plain, or cannot be written; what stood at the path is whole.
    """
    tensors: dict[str, Any] = {}  # Any: Tensor or StoredTensor
    first: dict[object, str] = {}
    rest = {
        key: _take_out(value, step_of(key), tensors, first) if key in ("state_dict", "optimizer_states") else value
        for key, value in checkpoint.items()
    }
    rest = _read_rest(rest)
    require_plain(rest)
    target = target_of(path, None)
    total = sum(size_bytes(tensor) for tensor in tensors.values())
    try:
        target.prepare()
        files: dict[str, FileEntry] = {}
        chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
        for number in range(num_shards):
            boxes = {name: box for name, tensor in tensors.items() if (box := _box(tensor, number, num_shards))}
            if not boxes:
                continue
            name = f"shard-{target.token}-{number:05d}-of-{num_shards:05d}.safetensors"
            layout = lay_out([Part(path, tensors[path].dtype, sizes) for path, (_, sizes) in boxes.items()])
            with target.place.create(name) as file:
                file.write(memoryview(layout.header))
                for part, start in layout.starts:
                    offsets, sizes = boxes[part.name]
                    crc = write_tensor(_read_box(tensors[part.name], offsets, sizes), file)
                    chunks[part.name].append(Chunk(offsets, sizes, name, start, crc))
                    if advance is not None:
                        advance(part.size_bytes)
            files[name] = FileEntry(layout.size_bytes, digest_of(layout.header))
        state = f"state-{target.token}.ckpt"
        storage.save(rest, target.place.address(state))
        size = target.place.size(state)
        with target.place.open(state) as file:
            file.seek(size - SEAL_DIGEST_SIZE)
            files[state] = FileEntry(size, file.read(SEAL_DIGEST_SIZE).decode())
        target.commit(
            Manifest(
                format_version=FORMAT_VERSION,
                loopwright_version=__version__,
                torch_version=str(torch.__version__),
                world_size=num_shards,
                mesh=None,
                state=state,
                tensors={
                    name: TensorEntry(
                        tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(chunks[name])
                    )
                    for name, tensor in tensors.items()
                },
                files=files,
            )
        )
    except OSError as error:
        target.abort()
        raise error if isinstance(error, CheckpointError) else target.explained(error, total) from error
    except BaseException:
        target.abort()
        raise
    finally:
        target.close()


def _take_out(value: Any, path: str, tensors: dict[str, Any], first: dict[object, str]) -> Any:  # Any: nested
    """Return a copy with placeholders for what is cut, which goes to `tensors`; a tied tensor goes there once."""
    if is_tensor(value):
        if not _is_cut(value):
            return value
        memory: object = id(value)
        if isinstance(value, Tensor):
            memory = (value.data_ptr(), value.dtype, value.shape, value.stride())
        name = first.setdefault(memory, path)
        tensors.setdefault(name, value)
        return {PLACEHOLDER_KEY: name}
    if isinstance(value, dict):
        items = [(key, _take_out(item, f"{path}/{step_of(key)}", tensors, first)) for key, item in value.items()]
        copied = type(value)(items)
        if hasattr(value, "__dict__"):  # state_dict()._metadata
            copied.__dict__.update(value.__dict__)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_take_out(item, f"{path}/{index}", tensors, first) for index, item in enumerate(value))
    return value


def _is_cut(value: Any) -> bool:  # Any: Tensor or StoredTensor
    is_dense = not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_quantized)
    return is_dense and len(value.shape) > 0 and value.shape.numel() > 0


def _read_rest(tree: Any) -> Any:  # Any: nested
    return map_tensors(tree, lambda value, _: value if isinstance(value, Tensor) else read_tensor(value))


def _box(tensor: Any, number: int, num_shards: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    # Any: Tensor or StoredTensor
    """Return offsets and sizes of one of the pieces, cut as FSDP does (torch.chunk); None if nothing is left for it."""
    rows = -(-tensor.shape[0] // num_shards)
    start, end = number * rows, min((number + 1) * rows, tensor.shape[0])
    if start >= end:
        return None
    return (start, *[0] * (len(tensor.shape) - 1)), (end - start, *tensor.shape[1:])


def _read_box(tensor: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:  # Any: Tensor or StoredTensor
    if isinstance(tensor, StoredTensor):
        return tensor.read(offsets, sizes)
    return read_tensor(tensor)[offsets[0] : offsets[0] + sizes[0]]
