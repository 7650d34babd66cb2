"""manifest.json: the content of a checkpoint folder.

Its last line is a BLAKE2b digest of all bytes before it. What was decoded is consistent in itself: names lie in the
folder, the chunks of a tensor cover it exactly, and the chunks in a file cover all its bytes after the header. So
a tensor never needs more memory than the files have bytes, once their sizes were compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

import torch

from ... import __version__
from ...errors import CheckpointError
from ...strategies.distributed.shards import RemoteShards
from ..tensors import AnyTensor

FORMAT = "loopwright-sharded-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
FILE_DIGEST_SIZE = 64  # the last bytes of a state file are its digest in hexadecimal digits

_FIX = "use an older checkpoint (ckpt_path='last' skips damaged ones), or copy this one again from where it came."
_MAX_NAMED = 5
_LARGEST = 2**62
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TAIL = re.compile(rb'"digest": "([0-9a-f]{64})"\n}\n')
_TAIL_SIZE = len('"digest": "') + 64 + len('"\n}\n')


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the folder.

    Attributes:
        size: Size in bytes.
        digest: BLAKE2b in hexadecimal digits: of the header of a shard file; of the state file, the one at its end.
    """

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of a tensor, and where its bytes are.

    Attributes:
        offsets: First index in each dimension of the tensor.
        sizes: Shape of the slice; none is 0.
        file: Name of the shard file.
        start: Position of the first byte in that file.
        crc32: Checksum of the bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    crc32: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its shape, its dtype (a name such as "float32"), and the chunks that cover it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Return the number of bytes of one of the chunks."""
        return math.prod(chunk.sizes) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Mesh:
    """Shape and dimension names of the device mesh that the tensors were sharded over; no names: None."""

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint folder.

    Attributes:
        format_version: Version of the folder's layout.
        loopwright_version: Version of Loopwright that wrote it.
        torch_version: Version of torch that wrote it.
        world_size: Number of ranks that saved.
        mesh: Device mesh of the first sharded tensor; None without sharded tensors.
        state: Name of the state file.
        tensors: By path, such as "state_dict/layer.weight".
        files: By name: the state file and the shard files.
        is_part: Whether the tensors are there in part only: what the ranks of one node hold.
    """

    format_version: int
    loopwright_version: str
    torch_version: str
    world_size: int
    mesh: Mesh | None
    state: str
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    is_part: bool = False


def manifest_of(
    tensors: Mapping[str, AnyTensor | RemoteShards],
    chunks: Mapping[str, Iterable[Chunk]],
    files: dict[str, FileEntry],
    *,
    state: str,
    world_size: int,
    mesh: Mesh | None = None,
    is_part: bool = False,
) -> Manifest:
    """Return the manifest of a checkpoint that this process writes; of `tensors`, those that have `chunks`."""
    return Manifest(
        format_version=FORMAT_VERSION,
        loopwright_version=__version__,
        torch_version=str(torch.__version__),
        world_size=world_size,
        mesh=mesh,
        state=state,
        tensors={
            path: TensorEntry(
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                tuple(sorted(chunks[path], key=lambda chunk: chunk.offsets)),
            )
            for path, tensor in tensors.items()
            if path in chunks
        },
        files=files,
        is_part=is_part,
    )


def digest_of(content: bytes) -> str:
    """Return the BLAKE2b digest of some bytes in hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Return the content of manifest.json."""
    raw = {"format": FORMAT, **asdict(manifest)}
    if not manifest.is_part:
        del raw["is_part"]
    lines = [
        f' "{key}": {_block(value) if key in ("tensors", "files") else json.dumps(value)}' for key, value in raw.items()
    ]
    body = ("{\n" + ",\n".join(lines) + ",\n ").encode()
    return body + f'"digest": "{digest_of(body)}"\n}}\n'.encode()


def _block(entries: dict[str, object]) -> str:
    """Return a dict as JSON with a line for each entry: there may be many, and people look for one."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"


def decode(content: bytes, shown: str) -> Manifest:
    """Return the manifest of the checkpoint that messages call `shown`, after checking every entry.

    Raises:
        CheckpointError: It is damaged, inconsistent, or of a newer version; names the entries.
    """
    body, tail = content[:-_TAIL_SIZE], _TAIL.fullmatch(content[-_TAIL_SIZE:])
    if tail is None or digest_of(body).encode() != tail[1]:
        raise damaged(shown, [f"its {MANIFEST} is altered, truncated, or not of a checkpoint"])
    problems: list[str] = []
    try:
        raw = json.loads(content)
        if raw["format"] == FORMAT and type(raw["format_version"]) is int and raw["format_version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"the checkpoint {shown!r} has the format version {raw['format_version']}, and this Loopwright knows "
                f"versions up to {FORMAT_VERSION}; Loopwright {raw.get('loopwright_version')} wrote it.",
                fix="install that version or a newer one.",
            )
        manifest = _parse(raw)
        problems.extend(_inconsistencies(manifest))
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
        raise damaged(shown, [f"its {MANIFEST} is malformed ({type(error).__name__}: {error})"]) from error
    if problems:
        raise damaged(shown, [f"its {MANIFEST} is inconsistent: {problems[0]}", *problems[1:]])
    return manifest


def read_digest(file: IO[bytes]) -> str | None:
    """Return the digest at the end of a manifest without comparing it; None if there is none."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_SIZE))
    tail = _TAIL.fullmatch(file.read(_TAIL_SIZE))
    return None if tail is None else tail[1].decode()


def damaged(shown: str, problems: list[str]) -> CheckpointError:
    """Return the error for a damaged checkpoint that names the first problems and counts the rest."""
    more = f"; and {len(problems) - _MAX_NAMED} more problems" if len(problems) > _MAX_NAMED else ""
    return CheckpointError(f"the checkpoint {shown!r} is damaged: {'; '.join(problems[:_MAX_NAMED])}{more}.", fix=_FIX)


def _parse(raw: Any) -> Manifest:  # Any: whatever JSON held
    if raw["format"] != FORMAT:
        raise ValueError(f"the format is {raw['format']!r}")
    mesh = raw["mesh"]
    files = {
        _file_name(name): FileEntry(_count(entry["size"]), _text(entry["digest"], _DIGEST))
        for name, entry in raw["files"].items()
    }
    tensors = {
        _text(path): TensorEntry(
            _counts(entry["shape"]),
            _dtype(entry["dtype"]),
            tuple(
                Chunk(
                    _counts(chunk["offsets"]),
                    _counts(chunk["sizes"]),
                    _file_name(chunk["file"]),
                    _count(chunk["start"]),
                    _count(chunk["crc32"]),
                )
                for chunk in entry["chunks"]
            ),
        )
        for path, entry in raw["tensors"].items()
    }
    return Manifest(
        format_version=_count(raw["format_version"]),
        loopwright_version=_text(raw["loopwright_version"]),
        torch_version=_text(raw["torch_version"]),
        world_size=_count(raw["world_size"]),
        mesh=None if mesh is None else Mesh(_counts(mesh["shape"]), _names(mesh["dim_names"])),
        state=_file_name(raw["state"]),
        tensors=tensors,
        files=files,
        is_part=raw.get("is_part") is True,
    )


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is not a list")
    return tuple(_count(item) for item in value)


def _names(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is not a list")
    return tuple(_text(item) for item in value)


def _text(value: object, pattern: re.Pattern[str] | None = None) -> str:
    if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
        raise ValueError(f"{value!r:.80} is not as it should be")
    return value


def _file_name(value: object) -> str:
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value) or value == MANIFEST:
        raise ValueError(f"{value!r:.80} is not the name of a file in the folder")
    return value


def _dtype(value: object) -> str:
    found = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(value, str) or not isinstance(found, torch.dtype) or value[:1] == "q" or not found.itemsize:
        raise ValueError(f"{value!r:.80} is not a dtype")
    return value


def _inconsistencies(manifest: Manifest) -> Iterator[str]:
    shards = {name: list[tuple[int, int, str]]() for name in manifest.files if name != manifest.state}
    if manifest.state not in manifest.files:
        yield f"the state file {manifest.state!r} is not among its files"
    for path, entry in manifest.tensors.items():
        if math.prod(entry.shape) > _LARGEST:
            yield f"{path} has the shape {entry.shape}"
            continue
        wrong = next(_wrong_chunks(entry, shards), None) or _uncovered(entry, is_part=manifest.is_part)
        if wrong:
            yield f"{path}: {wrong}"
            continue
        for chunk in entry.chunks:
            shards[chunk.file].append((chunk.start, entry.chunk_bytes(chunk), path))
    for name, spans in shards.items():
        spans.sort()
        end = spans[0][0] if spans else -1  # after the header
        for start, size, path in spans:
            if start != end:
                yield f"the bytes of {path} in {name} do not follow those of the tensor before"
                break
            end = start + size
        else:
            if end != manifest.files[name].size:
                yield f"{name} has {manifest.files[name].size} bytes, and its tensors end at byte {end}"


def _wrong_chunks(entry: TensorEntry, shards: dict[str, list[tuple[int, int, str]]]) -> Iterator[str]:
    for chunk in entry.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.shape):
            yield f"a chunk has another number of dimensions than the shape {entry.shape}"
        elif 0 in chunk.sizes:
            yield "a chunk is empty"
        elif any(o + s > e for o, s, e in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)):
            yield f"the chunk at {chunk.offsets} reaches beyond the shape {entry.shape}"
        elif chunk.file not in shards:
            yield f"the chunk at {chunk.offsets} is in {chunk.file!r}, which is not a shard file of the manifest"
        elif chunk.start < 8 or chunk.start % entry.torch_dtype.itemsize:
            yield f"the chunk at {chunk.offsets} begins at byte {chunk.start}"


def _uncovered(entry: TensorEntry, *, is_part: bool) -> str | None:
    """Return what is wrong with the covering: slices cover it that lie within, are disjoint and have its volume."""
    volume = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if volume != math.prod(entry.shape) and not is_part:
        return f"its chunks have {volume} elements, and its shape {entry.shape} has {math.prod(entry.shape)}"
    if len(entry.chunks) < 2:
        return None
    # Sweep along the dimension that is split most often, so that few slices are compared.
    dim = max(range(len(entry.shape)), key=lambda d: len({chunk.offsets[d] for chunk in entry.chunks}))
    active: list[Chunk] = []
    for chunk in sorted(entry.chunks, key=lambda chunk: chunk.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        for other in active:
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            ):
                return f"the chunks at {other.offsets} and {chunk.offsets} overlap"
        active.append(chunk)
    return None
