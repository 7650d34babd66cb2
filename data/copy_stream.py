"""`CopyStream`: copies of batches to a CUDA device that overlap with its computation.

On the current stream, the copy of a batch would wait for the step before it. Here copies run on their own CUDA
stream: the host is ahead of the device, so a batch is copied while the device still computes the previous step. Batches
are not read from the loader early: a checkpoint misses nothing, and random numbers are drawn in the usual order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ..protocols import AnyBatch, Batch
from .move import find_opaque, find_tensors

log = logging.getLogger(__name__)


class CopyStream:
    """Moves batches on its own stream; the current stream waits for the copy.

    Batches with objects that move themselves, or with tensors that are on a device already, are moved on the current
    stream, because other work on their memory is unknown.

    Args:
        move: Batch on the host -> batch on the device; must not wait for its copies.
        device: The device.
        backend: Module with `Stream`, `stream` and `current_stream`: `torch.cuda`.
    """

    def __init__(
        self, move: Callable[[AnyBatch], AnyBatch], device: torch.device, backend: Any = torch.cuda
    ) -> None:  # Any: a module
        self._move = move
        self._device = device
        self._backend = backend
        self._stream = backend.Stream(device)
        self._has_looked = False

    def __call__(self, batch: Batch, *_: object) -> AnyBatch:
        """Return the batch on the device; further arguments are ignored."""
        sources = list(find_tensors(batch))
        if not sources or find_opaque(batch) or any(source.device.type != "cpu" for source in sources):
            return self._move(batch)
        if not self._has_looked:
            self._look(sources)
        with self._backend.stream(self._stream):
            moved = self._move(batch)
        current = self._backend.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in find_tensors(moved):
            if tensor.device.type != "cpu":
                # Its memory belongs to the copy stream. Without this, the next copy may take it while it is in use.
                tensor.record_stream(current)
        return moved

    def _look(self, sources: list[torch.Tensor]) -> None:
        self._has_looked = True
        if not any(source.is_pinned() for source in sources):
            log.info("batches are not in pinned memory: pass pin_memory=True to the DataLoader to copy them faster.")
