"""`save`: writes a checkpoint folder on all ranks.

torch.distributed.checkpoint plans which rank writes which chunk, leaves out copies of replicated ones, and carries
errors to all ranks. Its own format is not written: its `.metadata` is a pickle, which runs code when it is read.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ...errors import CheckpointError
from ...protocols import StateDict, StorageOptions
from .. import storage
from ..plain import require_plain
from . import stages
from .backends import LocalBackend, RemoteBackend, backend_of, state_entry
from .manifest import Chunk, FileEntry, Mesh, digest_of, manifest_of
from .planning import Planner, first_names, path_of, unfit, with_first_names
from .shard_file import StoredPart, lay_out, write_tensor
from .target import LocalTarget, RemoteTarget, target_of
from .tree import PLACEHOLDER_KEY, Split, take_out

_MOST_SIZED = 64


@dataclass(frozen=True, slots=True)
class _Order:
    """The instructions of rank 0 to a rank: where to write, and under which name."""

    folder: str
    shard: str


@dataclass(slots=True)
class _Written:
    """Output of one rank: its files, and the chunks of tensors by path."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)


@torch.no_grad()
def save(
    checkpoint: StateDict,
    path: str | Path,
    storage_options: StorageOptions | None,
    *,
    group: Any,  # Any: ProcessGroup | None
    is_part: bool,
) -> None:
    """See `sharded.save`."""
    is_alone = not (dist.is_available() and dist.is_initialized())
    writer = _Writer(
        take_out(checkpoint),
        path,
        storage_options,
        rank=0 if is_alone else dist.get_rank(group),
        world_size=1 if is_alone else dist.get_world_size(group),
        is_part=is_part,
    )
    try:
        with _without_warning() if is_alone else nullcontext():
            dcp_save(
                dict(writer.split.tensors),
                storage_writer=writer,
                planner=Planner(writer.split, is_part=is_part),
                process_group=group,
                no_dist=is_alone,
            )
    except CheckpointException as failure:
        # All ranks have reported to rank 0: none is writing any more, and none will commit.
        if writer.target is not None:
            writer.target.abort()
        _raise_failures(failure, str(path), writer.rank)
    finally:
        if writer.target is not None:
            writer.target.close()


@contextmanager
def _without_warning() -> Iterator[None]:
    """Leave out DCP's warning that it saves in one process; not used beside threads of other ranks' saves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _raise_failures(failure: CheckpointException, shown: str, rank: int) -> NoReturn:
    errors = {rank: error for rank, (error, _) in sorted(failure.failures.items())}
    own = errors.get(rank)
    if own is not None and not isinstance(own, Exception):
        raise own from None  # Ctrl-C
    first = next(iter(errors.values()))
    reports = [
        f"rank {rank}: {error.what if isinstance(error, CheckpointError) else f'{type(error).__name__}: {error}'}"
        for rank, error in errors.items()
    ]
    raise CheckpointError(
        f"the sharded checkpoint {shown!r} was not saved; {' '.join(reports)}",
        fix=first.fix if isinstance(first, CheckpointError) else "see the error of that rank.",
    ) from first


class _Writer(StorageWriter):
    """Our format of a checkpoint folder, as a StorageWriter of torch.distributed.checkpoint.

    Attributes:
        split: The checkpoint of this rank.
        target: Where the folder goes; on rank 0 only, None before planning.
        rank: In the group.
    """

    def __init__(
        self,
        split: Split,
        path: str | Path,
        options: StorageOptions | None,
        *,
        rank: int,
        world_size: int,
        is_part: bool,
    ) -> None:
        self.split = split
        self.target: LocalTarget | RemoteTarget | None = None
        self.rank = rank
        self._path = path
        self._options = options
        self._world_size = world_size
        self._is_part = is_part

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer saves once."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True; DCP never chooses this writer by itself."""
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:  # DCP's own
        """Refuse what cannot be saved; here, since an error is carried to all ranks from here on."""
        if is_coordinator:
            require_plain(self.split.rest)
        problems = [
            f"{path} looks like a placeholder: its only key is {PLACEHOLDER_KEY!r}" for path in self.split.clashes
        ]
        problems += [f"{path}: {what}" for path, tensor in self.split.tensors.items() if (what := unfit(tensor))]
        if problems:
            raise CheckpointError(
                f"{len(problems)} entries cannot be saved: {'; '.join(problems[:5])}.",
                fix="redistribute partial tensors (tensor.redistribute(placements=...)), convert or rename the others.",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, and plan where each rank writes; without empty chunks and second names of a tensor."""
        names = first_names(self.split)
        with self._explained(0):
            self.target = target_of(self._path, self._options)
            self.target.prepare()
        stages.reached("locked")
        backend, token = self.target.backend, self.target.token
        folder = str(backend.folder) if isinstance(backend, LocalBackend) else backend.url
        return [
            dataclasses.replace(
                plan,
                items=[item for item in plan.items if names[path_of(item)] == path_of(item) and _volume(item)],
                storage_data=_Order(folder, f"shard-{token}-{rank:05d}-of-{self._world_size:05d}.safetensors"),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard file, if it has any bytes, and on rank 0 the state file."""
        order: _Order = plan.storage_data
        stages.reached("planned")
        written = _Written()
        size_bytes = sum(_volume(item) * _dtype_of(item).itemsize for item in plan.items)
        with self._explained(size_bytes):
            backend = backend_of(order.folder, self._options)
            if plan.items:
                self._refuse_unseen(backend)
                self._write_shard(plan, planner, backend, order.shard, written)
        if self.target is not None:
            self._write_state(written)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(order.shard), size_bytes, written)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: rank 0 calls this when all ranks have written."""
        assert self.target is not None
        stages.reached("all-written")
        written: list[_Written] = [result.storage_data for of_rank in results for result in of_rank]
        files = {name: entry for one in written for name, entry in one.files.items()}
        chunks: dict[str, list[Chunk]] = {path: [] for path in self._saved_paths()}
        for one in written:
            for path, chunk in one.chunks.items():
                chunks[path].append(chunk)
        mesh = next((tensor.device_mesh for tensor in self.split.tensors.values()), None)
        manifest = manifest_of(
            {**self.split.tensors, **self.split.remote},
            chunks,
            files,
            state=self._state_name(),
            world_size=self._world_size,
            mesh=None if mesh is None else Mesh(tuple(mesh.shape), mesh.mesh_dim_names),
            is_part=self._is_part,
        )
        with self._explained(sum(entry.size for entry in files.values())):
            self._compare(files)
            self.target.commit(manifest)

    def _write_shard(
        self, plan: SavePlan, planner: SavePlanner, backend: LocalBackend | RemoteBackend, name: str, written: _Written
    ) -> None:
        items = {path_of(item): item for item in plan.items}
        assert len(items) == len(plan.items), "a rank holds one chunk of a tensor"
        layout = lay_out([StoredPart(path, _dtype_of(item), _sizes_of(item)) for path, item in items.items()])
        with backend.create(name) as file:
            stages.reached("shard-opened")
            file.write(memoryview(layout.header))
            for part, start in layout.starts:
                item = items[part.name]
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                if tuple(tensor.shape) != part.sizes or tensor.dtype != part.dtype:
                    raise CheckpointError(
                        f"{part.name} has a local shard of shape {tuple(tensor.shape)}, and its placement says "
                        f"{part.sizes}.",
                        fix="this is an error of Loopwright or of torch: please report it.",
                    )
                crc = write_tensor(tensor, file)
                written.chunks[part.name] = Chunk(tuple(item.index.offset or ()), part.sizes, name, start, crc)
            stages.reached("shard-written")
        stages.reached("shard-synced")
        written.files[name] = FileEntry(layout.size_bytes, digest_of(layout.header))

    def _write_state(self, written: _Written) -> None:
        assert self.target is not None
        backend, name = self.target.backend, self._state_name()
        rest = with_first_names(self.split)
        storage.save(rest, backend.address(name), self._options)
        with self._explained(0):
            written.files[name] = state_entry(backend, name)
        stages.reached("state-saved")

    def _state_name(self) -> str:
        assert self.target is not None
        return f"state-{self.target.token}.ckpt"

    def _saved_paths(self) -> set[str]:
        return set(first_names(self.split).values())

    def _refuse_unseen(self, backend: LocalBackend | RemoteBackend) -> None:
        if isinstance(backend, LocalBackend) and not backend.folder.is_dir():
            raise CheckpointError(
                f"the folder {str(backend.folder)!r}, which rank 0 has made, is not there on this rank.",
                fix="save to a file system that all hosts share, or to a URL.",
            )

    def _compare(self, files: dict[str, FileEntry]) -> None:
        """Refuse to commit unless rank 0 sees what the others have written: they may be on another file system."""
        assert self.target is not None
        backend = self.target.backend
        names = backend.names()  # one listing, which also drops what a remote store has in its cache
        if unseen := sorted(files.keys() - names):
            raise OSError(f"{', '.join(unseen[:5])}: not there for rank 0")
        for name, entry in islice(files.items(), _MOST_SIZED):  # of thousands, each would be a call to the server
            found = backend.size(name)
            if found != entry.size:
                raise OSError(f"{name} has {found} bytes where {entry.size} were written")

    @contextmanager
    def _explained(self, size_bytes: int) -> Iterator[None]:
        """Turn errors of the system, and those that could not travel to the other ranks, into a CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            # Only rank 0 has a target; the others write below the folder that it sent them.
            target = self.target or _shown_target(self._path, self._options)
            raise target.explained(error, size_bytes) from error
        except Exception as error:  # a remote store has errors of its own, which pickle may not be able to carry
            raise CheckpointError(
                f"the checkpoint {str(self._path)!r} could not be written: {type(error).__name__}: {error}",
                fix="for a URL, check the address, the credentials (storage_options) and the network; save again.",
            ) from error


def _shown_target(path: str | Path, options: StorageOptions | None) -> LocalTarget | RemoteTarget:
    backend = backend_of(path, options)
    return LocalTarget(backend.folder) if isinstance(backend, LocalBackend) else RemoteTarget(backend.url, options)


def _sizes_of(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.sizes)


def _dtype_of(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    dtype: torch.dtype = item.tensor_data.properties.dtype
    return dtype


def _volume(item: WriteItem) -> int:
    return math.prod(_sizes_of(item))
