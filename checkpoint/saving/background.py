"""`AsyncCheckpointIO`: checkpoints that are written while training continues.

    save_checkpoint    main thread: waits for the previous save, copies the state to host memory, starts a thread
    the thread         copies what may be copied later; writes through the wrapped plugin; no other thread touches files
    wait               main thread: returns when the file is complete, or raises the error of the save

The Trainer decides when to wait; all ranks do so at the same points of the program.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...errors import CheckpointError, ConfigError
from ...lazy import is_core
from ...protocols import CheckpointPlugin, MapLocation, StateDict
from ..checkpoint_io import CheckpointIO, TorchCheckpointIO, load_through, saves_in_background
from ..plain import require_plain
from ..sharded import holds_sharded
from .host_copy import HostCopy

logger = logging.getLogger(__name__)

_WORTH_SAYING_S = 1.0


class AsyncCheckpointIO(CheckpointIO):
    """Saves in the background: `save_checkpoint` returns as soon as the state is safe, and a thread writes it.

    Weights and buffers are copied. The thread copies the state of optimizers on the CPU; the next optimizer step waits
    for this, and earlier writes to the state do not change the saved values.

    At most one save is pending: the next one waits for it. The copy takes as much host memory as the state, from the
    first save to the end of the run.

    The error of a failed save is logged at once. The Trainer raises it at the next optimizer step, on all ranks, else
    at the next save, else at the end of the run; without a Trainer, the next save or `teardown` raises it.

    Args:
        checkpoint_io: Plugin that writes and reads the files; None is the default one.

    Attributes:
        checkpoint_io: The wrapped plugin.
        on_failure: Called in the thread when a save failed, so that the run calls `wait`; set by the Trainer.

    Raises:
        ConfigError: `checkpoint_io` is not a checkpoint plugin, or saves in the background itself.
    """

    is_background = True

    def __init__(self, checkpoint_io: CheckpointPlugin | None = None) -> None:
        if checkpoint_io is not None and not callable(getattr(checkpoint_io, "save_checkpoint", None)):
            raise ConfigError(
                f"Expected a CheckpointIO for AsyncCheckpointIO, got {checkpoint_io!r}.",
                fix="pass a CheckpointIO, or omit it.",
            )
        if saves_in_background(checkpoint_io):
            raise ConfigError(
                f"Expected a CheckpointIO that does not save in the background, got {type(checkpoint_io).__name__}.",
                fix="wrap the plugin that writes the files.",
            )
        self.checkpoint_io: CheckpointPlugin = checkpoint_io if checkpoint_io is not None else TorchCheckpointIO()
        self.on_failure: Callable[[], None] | None = None
        # A user's plugin may keep the checkpoint: the next copy must not overwrite it.
        self._is_ours = is_core(type(self.checkpoint_io))
        self._copies = HostCopy(keeps_memory=self._is_ours)
        self._write: _Write | None = None
        self._has_said = False
        self._group: Any = None  # Any: process groups are of the backend's own type
        self._world: Any = None  # Any: the group that it belongs to

    @property
    def is_writing(self) -> bool:
        """Whether the thread of the last save is still at work."""
        return self._write is not None and self._write.is_alive()

    def save_checkpoint(
        self,
        checkpoint: StateDict,
        path: str | Path,
        storage_options: Any = None,  # Any: belongs to the plugin
        *,
        also_to: Sequence[str | Path] = (),
    ) -> None:
        """Copy a checkpoint and begin to write it. Waits for the previous save, and raises its error.

        Args:
            checkpoint: Tensors and plain values; may be changed as soon as this returns. With DTensors, every rank
                calls this at the same place, and the threads write together.
            path: File or URL.
            storage_options: For the wrapped plugin.
            also_to: Further paths that the same content is written to, in this order, after `path`.

        Raises:
            CheckpointError: The content is not plain, or cannot be copied; or the save before failed.
        """
        self.wait(before_save=True)
        is_sharded = holds_sharded(checkpoint)
        if self._is_ours and not is_sharded:
            require_plain(checkpoint)  # here, where the caller is to blame, and not in the thread
        arguments = self._group_argument() if is_sharded else {}
        taken = self._copies.take(checkpoint)
        paths = [path, *also_to]

        def write() -> None:
            taken.settle()
            for one in paths:
                self.checkpoint_io.save_checkpoint(taken.checkpoint, one, storage_options, **arguments)

        self._write = _Write(write, paths, self.on_failure)
        self._write.start()

    def wait(self, *, before_save: bool = False) -> None:
        """Wait for the pending save. Called on the ranks that save.

        Args:
            before_save: Whether a save is waiting: a long wait is logged, once.

        Raises:
            CheckpointError: The save failed; raised once. Other plugins raise their own errors.
        """
        write = self._write
        if write is None:
            return
        began_s = time.monotonic()
        self._copies.release()
        write.join()  # Ctrl-C may interrupt this: then it is still pending
        waited_s = time.monotonic() - began_s
        self._write = None
        if before_save and waited_s >= _WORTH_SAYING_S and not self._has_said:
            self._has_said = True
            logger.warning(
                "a save waited %.1f s for %s to be written: training blocks when checkpoints come faster than the disk "
                "writes them. This warning is logged once.",
                waited_s,
                write.paths[0],
            )
        if write.error is not None:
            raise write.error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: MapLocation = None,
        weights_only: bool | None = True,
        *,
        lazy: bool = False,
        verify: bool = True,
    ) -> StateDict:
        """Return the checkpoint at the path, after waiting for pending saves.

        Args:
            path: File, folder or URL.
            map_location: Device for the tensors, as in torch.load.
            weights_only: Whether to read tensors and plain values only.
            lazy: See `storage.load`; left out if the wrapped plugin does not know it.
            verify: See `storage.load`; left out if the wrapped plugin does not know it.

        Raises:
            CheckpointError: The save to this path failed; or see the wrapped plugin.
        """
        self.wait_for(path)
        optional = {**({"lazy": True} if lazy else {}), **({} if verify else {"verify": False})}
        loaded: StateDict = load_through(
            self.checkpoint_io, path, map_location=map_location, weights_only=weights_only, optional=optional
        )
        return loaded

    def wait_for(self, path: str | Path) -> None:
        """Return when no save is pending, before a checkpoint is read.

        Raises:
            CheckpointError: The save to this very path failed.
        """
        write = self._write
        if write is not None:
            write.join()
            if any(_same_place(path, one) for one in write.paths):
                self.wait()

    def verify_share(self, path: str | Path, rank: int, size: int) -> bool:
        """Let the wrapped plugin verify this rank's share; False if it cannot. See `TorchCheckpointIO.verify_share`."""
        share = getattr(self.checkpoint_io, "verify_share", None)
        return share is not None and bool(share(path, rank, size))

    def identify(self, path: str | Path) -> str | None:
        """Return what identifies the checkpoint at the path; None if the wrapped plugin cannot."""
        identify = getattr(self.checkpoint_io, "identify", None)
        return None if identify is None else identify(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint at the path, after waiting for pending saves."""
        if self._write is not None:
            self._write.join()
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for pending saves, and release memory; called when a run ends.

        Raises:
            CheckpointError: The save failed. While another error propagates, this one is logged instead.
        """
        outer = sys.exc_info()[1]
        try:
            self.wait()
        except Exception:
            if outer is None:
                raise
            logger.exception("a checkpoint could not be written, besides %s", type(outer).__name__)
        finally:
            self._copies.forget()
            self.on_failure = None
            if hasattr(self.checkpoint_io, "teardown"):
                self.checkpoint_io.teardown()

    def _group_argument(self) -> StateDict:
        """Return the process group of the threads, as an argument; on every rank, in the main thread.

        On the group of the training, the collectives of both threads would meet in any order, and abort the process.
        """
        if "group" not in inspect.signature(self.checkpoint_io.save_checkpoint).parameters:
            return {}
        if not dist.is_initialized():
            return {}
        if self._group is None or self._world is not dist.group.WORLD:
            self._group, self._world = dist.new_group(backend="gloo"), dist.group.WORLD
        return {"group": self._group}


class _Write(threading.Thread):
    """Writes one checkpoint. No daemon: an interpreter that ends waits for it.

    Attributes:
        paths: Where to.
        error: What went wrong, when the thread has ended; None if nothing did.
    """

    def __init__(
        self, write: Callable[[], None], paths: Sequence[str | Path], on_failure: Callable[[], None] | None
    ) -> None:
        super().__init__(name="loopwright-checkpoint", daemon=False)
        self.paths = paths
        self.error: Exception | None = None
        self._write: Callable[[], None] | None = write
        self._on_failure = on_failure

    def run(self) -> None:
        """Write, and keep the error."""
        assert self._write is not None
        try:
            self._write()
        except BaseException as error:  # whatever it is, the main thread must know
            self._fail(error)
        finally:
            self._write = None  # with it goes the copy

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception):  # torch's CheckpointException; what ends a program is not for the caller
            cause, error = (
                error,
                CheckpointError(
                    f"{str(self.paths[0])!r} could not be written: {type(error).__name__}: {error}",
                    fix="look at the plugin that writes it.",
                ),
            )
            error.__cause__ = cause
        error.add_note(f"This was met while {str(self.paths[0])!r} was saved in the background (AsyncCheckpointIO).")
        self.error = error
        if self._on_failure is not None:
            self._on_failure()
        else:  # without a Trainer, nothing may call `wait` before the program ends
            logger.error("%s could not be saved in the background", self.paths[0], exc_info=error)


def _same_place(one: str | Path, other: str | Path) -> bool:
    return str(one) == str(other) or os.path.realpath(one) == os.path.realpath(other)
