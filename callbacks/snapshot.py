"""`Snapshot`: the state of a run in the memory of its nodes, for a restart between two checkpoints.

    <folder>/loopwright-<uid>/              memory of the node, by default /dev/shm
      <place>-<run>/                        the folder of the checkpoints, hashed, and what `.loopwright-run` there says
        .running                            locked while the run trains
        <host>.all/                         of all ranks; or <host>.<crc32>: of those of this node, one of several
          step=14-<start>-<last>.ckpt       a checkpoint; the start of the ranks, and the step of the checkpoint before

A copy is taken up if it belongs to this run, all nodes have it from the same start, no later start has begun before
its step, and the checkpoint before it is there still: whoever removes the last checkpoints wants to go back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import weakref
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..checkpoint import sharded, storage
from ..checkpoint.checkpoint_io import TorchCheckpointIO
from ..checkpoint.file.remote import as_local
from ..checkpoint.saving.background import AsyncCheckpointIO
from ..checkpoint.sharded.backends import RemoteBackend, backend_of
from ..errors import CheckpointError, ConfigError
from ..fabric.on_all_ranks import run_on_all_ranks
from ..files import replace_file
from ..messages import warn
from ..strategies.distributed.shards import has_parts, has_shards, local
from ..strategies.optional import SavesShards
from ..strategies.tree import leaves
from .base import AnyModule, Checkpoint, from_rank_zero
from .model_checkpoint import files as files
from .model_checkpoint.callback import ModelCheckpoint

if TYPE_CHECKING:
    from ..protocols import AnyBatch, AnyOutput, StateDict, StorageOptions
    from ..trainer import Trainer

_log = logging.getLogger(__name__)

_MEMORY = "/dev/shm"  # of Linux; whose folders these are is checked
_RUN = ".loopwright-run"
_RUNNING = ".running"
_NAME = re.compile(r"step=(\d+)-([0-9a-f]{8})-(-?\d+)\.ckpt")


class Snapshot(Checkpoint):
    """Copy the state of the run to the memory of its nodes every few steps; a restart takes the newest copy.

    A copy is written as a checkpoint of `AsyncCheckpointIO` is, while training continues. It is left out at a step
    where an earlier copy, or a checkpoint in the background, is not complete yet: no step waits for a write.

    `fit(ckpt_path="last")` resumes from a copy of the same run if it is newer than the last checkpoint. If a node was
    lost, or lacks its part of the step, the checkpoint is used, and the log says so. The copies are removed when
    training has ended.

    With sharded parameters each rank writes its shards, else one rank of each node all. On one node, any number of
    ranks may continue; on several, the same ranks on the same nodes.

    Args:
        every: Number of optimizer steps between two copies.
        keep: Number of copies to keep. With 1, there are two while the next one is written.
        folder: Folder in the memory of each node, or on its disk; None is /dev/shm.

    Raises:
        ConfigError: `every` or `keep` is below 1; or, at the start, the folder cannot be used, or the Trainer has two
            of these callbacks.
        CheckpointError: At the first copy: the folder does not have space for the copies.
    """

    ends_with_run = True

    def __init__(self, every: int, keep: int = 2, *, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        if every < 1 or keep < 1:
            raise ConfigError(
                f"Snapshot: expected every and keep of 1 or more, got every={every}, keep={keep}.",
                fix="correct these arguments.",
            )
        self.every, self.keep = every, keep
        self.folder = Path(_MEMORY if folder is None else folder).expanduser()
        self._lw_io: AsyncCheckpointIO | None = None
        self._lw_memory: _Memory | None = None
        self._lw_running: weakref.finalize[..., Snapshot] | None = None  # closes the locked file
        self._lw_resumed: tuple[_Run, int] | None = None  # the run, and the step of its last checkpoint
        self._lw_has_space = False

    # --- a restart -------------------------------------------------------------------------------------------------

    def find_newer(self, trainer: Trainer, step: int) -> str | None:
        """Return the newest copy of this run after the step, if all nodes have their part of it. On every rank."""
        run = from_rank_zero(trainer, lambda: _read_run(_place_of(trainer)))
        self._lw_finish()
        if self._lw_io is None:  # before training
            self._lw_resumed = None if run is None else (run, step)
        if run is None or not _can_meet(trainer):
            return None
        node, strategy = _Node.of(trainer), trainer.strategy
        found = node.copies(self._lw_folder(trainer, run))
        here = {one.path.name: one for one in found if run.has(one) and one.last <= step < one.step}
        everywhere = strategy.gather_objects(sorted((one.step, name) for name, one in here.items()))
        for number, name in sorted(set(everywhere[0]).intersection(*everywhere[1:]), reverse=True):
            path = str(here[name].path)
            try:
                verify = partial(storage.verify_share, path, node.ranks.index(node.rank), len(node.ranks))
                run_on_all_ranks(strategy, verify)
            except CheckpointError as error:
                warn(f"Snapshot: {path} is damaged and skipped: {error}")
                continue
            _log.info("Snapshot: the copy of step %d is newer than the last checkpoint (step %d)", number, step)
            return path
        newest = max((one for copies in everywhere for one in copies), default=None)
        if newest is not None:
            warn(f"Snapshot: not every node has the copy of step {newest[0]}, so that the last checkpoint is used")
        return None

    def kept_step(self, trainer: Trainer) -> int:
        """Return the step of the newest copy on this node; -1 if there is none after the last checkpoint."""
        if self._lw_memory is None:
            return -1
        self._lw_finish()
        newest = max((one.step for one in self._lw_memory.node.copies(self._lw_memory.folder)), default=-1)
        return newest if newest > self._lw_last(trainer, self._lw_memory) else -1

    def return_to(self, trainer: Trainer, path: str, step: int) -> None:
        """Leave out the copies of later steps: the run returns to a checkpoint or copy. On every rank."""
        memory = self._lw_memory
        if memory is None:
            return
        self._lw_finish()
        copy = _NAME.fullmatch(Path(path).name)
        memory.last = int(copy[3]) if copy else step
        place = _place_of(trainer)
        _, memory.start = from_rank_zero(trainer, lambda: _write_start(place, _read_run(place), step, memory.last))

    # --- a run -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Refuse a second callback: a run has its copies in one place."""
        count = sum(isinstance(one, Snapshot) for one in trainer.checkpoint_callbacks)
        if count > 1:
            raise ConfigError(f"Expected one Snapshot callback, got {count}.", fix="leave out the others.")

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Prepare the folder, and remove the copies of other runs of this place."""
        resumed, self._lw_resumed = self._lw_resumed, None
        if trainer.fast_dev_run or not _can_meet(trainer):
            return
        place, (known, last) = _place_of(trainer), resumed or (None, -1)
        run, start = from_rank_zero(trainer, lambda: _write_start(place, known, trainer.global_step, last))
        node = _Node.of(trainer)
        folder = self._lw_folder(trainer, run)
        _make_private(folder.parent)
        if node.is_first:
            folder.mkdir(exist_ok=True)
            held = _lock(folder)
            self._lw_running = None if held is None else weakref.finalize(self, os.close, held)
            for other in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):
                # Containers may share memory, and have other folders at the same path, where another run trains.
                free = None if other == folder else _lock(other)
                if free is not None:
                    shutil.rmtree(other, ignore_errors=True)  # another rank of this host may be at it
                    os.close(free)
            for one in _copies_of_host(folder):
                if not run.has(one):
                    _remove(one.path)
        self._lw_memory = _Memory(node, folder, start, self.keep, last=last)
        self._lw_io = AsyncCheckpointIO(self._lw_memory)
        self._lw_io.on_failure = _noted_later
        self._lw_has_space = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Copy the state, if it is time."""
        step = trainer.global_step
        if step % self.every or not step or not trainer.at_step_boundary or self._lw_io is None:
            return
        assert self._lw_memory is not None, "it comes with the IO"
        last = self._lw_last(trainer, self._lw_memory)
        is_free = not (self._lw_io.is_writing or trainer._lw_saving.is_writing)
        if last < step and trainer.strategy.reduce_boolean_decision(is_free):
            self._lw_finish()
            self._lw_take(trainer, self._lw_io, self._lw_memory.path_of(step, last))

    def _lw_last(self, trainer: Trainer, memory: _Memory) -> int:
        written = [one.written_step for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        return max((memory.last, *written))

    def _lw_take(self, trainer: Trainer, io: AsyncCheckpointIO, path: Path) -> None:
        memory, strategy = self._lw_memory, trainer.strategy
        assert memory is not None
        run = trainer.present_run()
        assert run is not None, "a step was made"
        checkpoint = trainer._lw_saving.take(run, for_each_node=not memory.node.is_whole)
        writes = memory.node.is_first
        if isinstance(strategy, SavesShards):
            checkpoint = strategy.arrange_shards(checkpoint)
        elif has_parts(checkpoint):  # of an engine that joins them on rank 0: other nodes have no copy
            checkpoint, writes = strategy.gather_state(checkpoint), trainer.is_global_zero
        is_sharded = has_shards(checkpoint)
        writes = writes or is_sharded
        if not self._lw_has_space:
            self._lw_check_space(trainer, checkpoint if writes else {})
        if is_sharded:
            memory.connect()
        if writes:
            io.save_checkpoint(checkpoint, path)

    def _lw_check_space(self, trainer: Trainer, checkpoint: StateDict) -> None:
        """Refuse to fill the memory of a node, once: a full /dev/shm also ends loader workers. On every rank."""
        assert self._lw_memory is not None
        own = sum(part.nbytes for part in local(one for _, one in leaves(checkpoint) if isinstance(one, Tensor)))
        node, folder = self._lw_memory.node, self._lw_memory.folder
        sizes = trainer.strategy.gather_objects(own)
        needed = sum(sizes[rank] for rank in node.ranks) * max(2, self.keep)
        present = sum(one.stat().st_size for one in folder.rglob("*.*") if one.is_file())
        free = shutil.disk_usage(self.folder).free + present
        for host, size, space in trainer.strategy.gather_objects((platform.node(), needed, free)):
            if size > space:
                raise CheckpointError(
                    f"Snapshot: expected {size:,} bytes in {str(self.folder)!r} of {host} for {max(2, self.keep)} "
                    f"copies, got {space:,} free bytes.",
                    fix="raise its size (containers: --shm-size, or an emptyDir with medium: Memory), pass keep=2 or "
                    "another folder=.",
                )
        self._lw_has_space = True

    def on_fit_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Remove the copies: training has ended."""
        self._lw_finish()
        memory = self._lw_memory
        if memory is not None and memory.node.is_first:
            shutil.rmtree(memory.folder, ignore_errors=True)
        if memory is not None and trainer.is_global_zero:
            backend_of(_place_of(trainer)).remove({_RUN})

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Wait for a copy that is being written, and release memory."""
        if stage == "fit" and self._lw_io is not None:
            self._lw_finish()
            self._lw_io.teardown()
            self._lw_io = self._lw_memory = None
        self._lw_release()

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Let go of the folder: another start may take the copies."""
        self._lw_release()

    def _lw_release(self) -> None:
        if self._lw_running is not None:
            self._lw_running()
            self._lw_running = None

    def _lw_finish(self) -> None:
        """Wait for the copy before, whose failure costs no more than that copy."""
        if self._lw_io is not None:
            try:
                self._lw_io.wait()
            except (CheckpointError, OSError, RuntimeError) as error:
                _log.warning("Snapshot: a copy could not be written; training continues: %s", error)

    def _lw_folder(self, trainer: Trainer, run: _Run) -> Path:
        place = _place_of(trainer)
        local = as_local(place)
        named = os.fsencode(place if local is None else os.path.abspath(local))
        hashed = hashlib.blake2b(named, digest_size=8).hexdigest()
        return self.folder / f"loopwright-{_user()}" / f"{hashed}-{run.name}"


class _Copy(NamedTuple):
    """A complete copy: its path, its step, the start of the ranks that wrote it, and the last checkpoint's step."""

    path: Path
    step: int
    start: str
    last: int


class _Run(NamedTuple):
    """What `.loopwright-run` says: the run's name, and of each start the step up to which its copies belong to the run.

    A start makes the steps again that follow its first one, so that it ends what earlier ones have, on all nodes.
    """

    name: str
    starts: dict[str, int]

    def with_start(self, start: str, step: int, last: int) -> _Run:
        """Return the run with a start at a step; `last` is the step of the checkpoint before."""
        ends = {one: min(end, step) for one, end in self.starts.items()}
        return _Run(self.name, {**{one: end for one, end in ends.items() if end > last}, start: sys.maxsize})

    def has(self, copy: _Copy) -> bool:
        """Return whether a copy is of a step that this run has made and has not gone back behind."""
        return copy.step <= self.starts.get(copy.start, -1)


class _Node(NamedTuple):
    """This rank, all ranks of its node, and how many there are on all nodes."""

    rank: int
    ranks: list[int]
    world_size: int

    @classmethod
    def of(cls, trainer: Trainer) -> _Node:
        """Return this rank's node. On every rank."""
        topology = trainer.strategy.topology
        nodes = trainer.strategy.gather_objects(topology.node_rank)
        ranks = [rank for rank, node in enumerate(nodes) if node == topology.node_rank]
        return cls(topology.global_rank, ranks, topology.world_size)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what its node has once."""
        return self.rank == self.ranks[0]

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are on this node."""
        return len(self.ranks) == self.world_size

    @property
    def name(self) -> str:
        """Name of the node's folder."""
        part = "all" if self.is_whole else f"{zlib.crc32(repr((self.ranks, self.world_size)).encode()):08x}"
        return f"{platform.node()}.{part}"

    def copies(self, folder: Path) -> list[_Copy]:
        """Return the copies of a run on this host that the ranks of this node can use."""
        whole = (self.name, f"{platform.node()}.all")
        return [one for one in _copies_of_host(folder) if one.path.parent.name in whole or one.path.is_file()]


class _Memory(TorchCheckpointIO):
    """Writes the copies of one start of the ranks, and removes older ones.

    Args:
        node: The ranks that write together.
        folder: Folder of the run.
        start: Distinguishes this start of the ranks from others of the run.
        keep: Number of copies to keep.
        last: Step of the checkpoint that the run has resumed from.
    """

    def __init__(self, node: _Node, folder: Path, start: str, keep: int, *, last: int) -> None:
        self.node, self.folder, self.last = node, folder, last
        self.start, self._keep = start, keep
        self._group: dist.ProcessGroup | None = None

    def path_of(self, step: int, last: int) -> Path:
        """Return the path of a copy."""
        return self.folder / self.node.name / f"step={step}-{self.start}-{last}.ckpt"

    def connect(self) -> None:
        """Connect the ranks of the node, on each: their threads write shards together, beside the training's group."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(self.node.ranks, backend="gloo", use_local_synchronization=True)

    def save_checkpoint(  # type: ignore[override]  # the group is this object's
        self, checkpoint: StateDict, path: str | Path, storage_options: StorageOptions | None = None
    ) -> None:
        """Write a copy; on all ranks of the node with sharded tensors, else on the first one."""
        if self.node.is_first:
            self._trim(max(1, self._keep - 1))
        if has_shards(checkpoint):
            sharded.save(checkpoint, path, group=self._group, is_part=not self.node.is_whole)
        elif self.node.is_first:
            storage.save(checkpoint, path)
        if self.node.is_first:
            self._trim(self._keep)

    def _trim(self, keep: int) -> None:
        copies = self.node.copies(self.folder)
        for one in sorted(copies, key=lambda one: (one.start == self.start, one.step))[:-keep]:
            _remove(one.path)


def _can_meet(trainer: Trainer) -> bool:
    return trainer.world_size == 1 or trainer.ranks_answer


def _copies_of_host(folder: Path) -> list[_Copy]:
    paths = folder.glob(f"{platform.node()}.*/step=*.ckpt")
    found = [(path, match) for path in paths if (match := _NAME.fullmatch(path.name))]
    return [_Copy(path, int(match[1]), match[2], int(match[3])) for path, match in found]


def _place_of(trainer: Trainer) -> str:
    """Return the folder or URL that makes two starts of a program one run: where `ckpt_path="last"` looks."""
    own = [one.given_dirpath for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    return next((one for one in own if one is not None), None) or files.last_place(trainer)


def _read_run(place: str) -> _Run | None:
    try:
        run = _Run(**json.loads(backend_of(place).read(_RUN)))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return run if re.fullmatch("[0-9a-f]{16}", run.name) else None


def _write_start(place: str, run: _Run | None, step: int, last: int) -> tuple[_Run, str]:
    """Note a start of the ranks at a step, of a new run for None, and return the run and the name of the start."""
    start, backend = secrets.token_hex(4), backend_of(place)
    run = (run or _Run(secrets.token_hex(8), {})).with_start(start, step, last)
    text = json.dumps(run._asdict())
    if isinstance(backend, RemoteBackend):
        backend.put(_RUN, text.encode())
    else:
        backend.folder.mkdir(parents=True, exist_ok=True)
        replace_file(backend.folder / _RUN, text)
    return run, start


def _lock(folder: Path) -> int | None:
    """Return the locked file that says that a run trains, to be closed at its end; None if another process has it."""
    opened = os.open(folder / _RUNNING, os.O_WRONLY | os.O_CREAT, 0o600)
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(opened)
            return None
    return opened


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can write to, below one that all may write to."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == _user()
        why = "" if is_private else "it belongs to another user, or is a link"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise ConfigError(
            f"Snapshot: expected a folder in memory, got {str(folder)!r}: {why}.",
            fix="pass folder=, a folder on each node that you may write to.",
        )


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _remove(path: Path) -> None:
    try:
        storage.remove(path)
    except CheckpointError as error:  # another process of this host was faster
        _log.debug("Snapshot: %s", error)


def _noted_later() -> None:
    """Do nothing: the next copy notes that this one could not be written."""
