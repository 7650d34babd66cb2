"""Checkpoints: what is in one (content), how it gets to disk (storage), which objects it may hold (plain)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach
from .checkpoint_io import CheckpointIO, TorchCheckpointIO
from .plain import Trusted, Untrusted, require_plain, to_plain, untrust
from .storage import CheckpointNotFound, Verified, load, newest_valid, remove, save, verify

if TYPE_CHECKING:
    from .saving.background import AsyncCheckpointIO

__all__ = [
    "AsyncCheckpointIO",
    "CheckpointIO",
    "CheckpointNotFound",
    "TorchCheckpointIO",
    "Trusted",
    "Untrusted",
    "Verified",
    "load",
    "newest_valid",
    "remove",
    "require_plain",
    "save",
    "to_plain",
    "untrust",
    "verify",
]

__getattr__, __dir__ = attach(__name__, {"AsyncCheckpointIO": "saving.background"})
