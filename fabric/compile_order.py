"""The order in which the ranks of a node compile: local rank 0 first, the others then read its results from the cache.

Without an order all ranks compile the same graphs at the same time, and take the cores from each other.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..strategies import Strategy

_GRACE_S = 2.0
_POLL_S = 0.01


def order_ranks(strategy: Strategy, backend: object, stack: ExitStack) -> None:
    """Let local rank 0 compile each graph first, until the stack is closed. On every rank: it communicates.

    Only inductor has a cache. Its keys contain the index of the device, so that ranks share entries on a CPU, and where
    each process sees one device only; elsewhere, all compile at the same time as before.
    """
    if strategy.topology.world_size == 1:
        return
    shares = strategy.device.type == "cpu" or torch.accelerator.device_count() == 1
    name = strategy.broadcast(uuid.uuid4().hex)
    if backend != "inductor" or not shares or os.name != "posix":
        return
    from torch._dynamo.callback import callback_handler

    path = os.path.join(tempfile.gettempdir(), f"loopwright-compile-{name}.lock")
    order = RankOrder(path, is_first=strategy.local_rank == 0)
    callback_handler.register_start_callback(order.start)
    callback_handler.register_end_callback(order.end)
    stack.callback(order.close)
    stack.callback(callback_handler.remove_start_callback, order.start)
    stack.callback(callback_handler.remove_end_callback, order.end)


class RankOrder:
    """Two processes' turns: the first one holds a lock while it compiles, the others wait for it.

    A wait lasts as long as the first one compiles, plus a moment until it begins. A rank that compiles what the first
    one never will continues by itself, so that no order of communication can make them wait for each other.

    Args:
        path: File that the processes of a node share. Its size is the number of graphs that the first one has begun.
        is_first: Whether this is the process that compiles first.
    """

    def __init__(self, path: str, *, is_first: bool) -> None:
        self._path, self._is_first = path, is_first
        self._count = 0
        self._file = open(path, "ab")  # noqa: SIM115  # it is closed with the run

    def start(self, _: object = None) -> None:
        """Wait for this process's turn to compile a graph."""
        import fcntl

        self._count += 1
        if self._is_first:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.write(b".")
            self._file.flush()
            return
        until_s = time.monotonic() + _GRACE_S
        while os.fstat(self._file.fileno()).st_size < self._count and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def end(self, _: object = None) -> None:
        """Let the others compile the graph."""
        import fcntl

        if self._is_first:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Remove the file; the others of a node have it open for as long as they need it."""
        self._file.close()
        if self._is_first:
            os.unlink(self._path)
