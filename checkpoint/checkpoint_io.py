"""`CheckpointIO`: the plugin through which a strategy saves and loads files; users pass one with `plugins=`."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ..protocols import BackgroundPlugin, CheckpointPlugin, MapLocation, StateDict, StorageOptions
from . import storage

before_next_step: list[Callable[[], object]] = []
"""What Fabric calls before an optimizer step: saves in the background that still copy what the step changes.

Each removes itself when it is called.
"""


class CheckpointIO(ABC):
    """Interface for saving, loading and removing checkpoints. It is called on the ranks that save."""

    is_background: bool = False
    """Whether `save_checkpoint` returns before the file is complete: True for `AsyncCheckpointIO` and its subclasses.

    The Trainer then uses further methods of `AsyncCheckpointIO`: `wait`, `on_failure`, and the argument `also_to`.
    """

    @abstractmethod
    def save_checkpoint(
        self,
        checkpoint: StateDict,
        path: str | Path,
        storage_options: Any = None,  # Any: belongs to the plugin
    ) -> None:
        """Write a checkpoint; when this returns, it is written or being written.

        Args:
            checkpoint: Tensors and plain values.
            path: File or URL.
            storage_options: Passed by the user to `trainer.save_checkpoint`.
        """

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: MapLocation = None, weights_only: bool | None = True
    ) -> StateDict:
        """Return the checkpoint at the path.

        Args:
            path: File or URL.
            map_location: Device for the tensors, as in torch.load.
            weights_only: Whether to read tensors and plain values only.
        """

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint at the path."""

    def wait_for(self, path: str | Path) -> None:  # noqa: B027  # optional
        """Return when no save is pending; called before a checkpoint is read if `is_background` is True.

        Raises:
            CheckpointError: The save to this very path failed.
        """

    def teardown(self) -> None:  # noqa: B027  # optional
        """Finish pending saves; called once, when the run ends."""


class TorchCheckpointIO(CheckpointIO):
    """The default: one file per checkpoint, written atomically, or a folder if it holds sharded tensors."""

    def save_checkpoint(
        self,
        checkpoint: StateDict,
        path: str | Path,
        storage_options: StorageOptions | None = None,
        *,
        group: Any = None,  # Any: ProcessGroup, whose import is heavy
    ) -> None:
        """Write a checkpoint; see `storage.save`. With sharded tensors (DTensor) in it, see `sharded.save`.

        Args:
            checkpoint: Tensors and plain values; with DTensors, called on every rank of the group.
            path: File, folder or URL.
            storage_options: Arguments of the remote file system.
            group: The ranks that save sharded tensors together; None is the default group.
        """
        if "torch.distributed.tensor" in sys.modules:  # else there can be no DTensor
            from . import sharded

            if sharded.holds_sharded(checkpoint):
                sharded.save(checkpoint, path, storage_options, group=group)
                return
        storage.save(checkpoint, path, storage_options)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: MapLocation = None,
        weights_only: bool | None = True,
        *,
        lazy: bool = False,
        verify: bool = True,
    ) -> StateDict:
        """Return the checkpoint at the path, a file or a folder; see `storage.load`."""
        return storage.load(path, map_location=map_location, weights_only=weights_only, lazy=lazy, verify=verify)

    def verify_share(self, path: str | Path, rank: int, size: int) -> bool:
        """Verify this rank's share of the checkpoint at the path; see `storage.verify_share`.

        Returns:
            Whether `load_checkpoint` accepts verify=False afterwards: that of a subclass may not.
        """
        if "verify" not in inspect.signature(self.load_checkpoint).parameters:
            return False
        storage.verify_share(path, rank, size)
        return True

    def identify(self, path: str | Path) -> str | None:
        """Return a fingerprint of the checkpoint at the path; None if there is none. See `identity.identify`."""
        from .identity import identify

        return identify(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint at the path; see `storage.remove`."""
        storage.remove(path)


def saves_in_background(io: CheckpointPlugin | None) -> TypeGuard[BackgroundPlugin]:
    """Return whether a save through this plugin returns before the file is complete."""
    return isinstance(io, CheckpointIO) and io.is_background


def load_through(
    io: CheckpointPlugin,
    path: str | Path,
    *,
    map_location: MapLocation,
    weights_only: bool | None,
    optional: Mapping[str, object],
) -> Any:  # Any: what a user's own returns
    """Call the `load_checkpoint` of an IO with the arguments that it accepts.

    Older plugins accept neither map_location nor weights_only.

    Args:
        io: Reads the checkpoint.
        path: File, folder or URL.
        map_location: Device for the tensors, as in torch.load.
        weights_only: Whether to read tensors and plain values only.
        optional: Arguments that are passed only to an IO that names them: `lazy`, `verify`.
    """
    known = inspect.signature(io.load_checkpoint).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    usual: dict[str, object] = {"map_location": map_location, "weights_only": weights_only}
    options = {name: value for name, value in usual.items() if takes_any or name in known}
    options |= {name: value for name, value in optional.items() if name in known}
    return io.load_checkpoint(path, **options)
