"""The watch of this process over the other ranks, shared by all Fabrics."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from ...strategies.distributed.rendezvous import store
from ...strategies.optional import HasTimeouts
from .watch import Watch

if TYPE_CHECKING:
    from ...strategies import Launcher, Strategy

logger = logging.getLogger(__name__)

_watch: tuple[int, Any, Watch] | None = None  # process, store, watch


def watch_over(strategy: Strategy, launcher: Launcher) -> Watch | None:
    """Start the watch over the other ranks, once per process; return it, or None with one rank.

    Args:
        strategy: A connected strategy.
        launcher: Provides the exit codes of processes that this one started.
    """
    global _watch
    topology = strategy.topology
    if topology.world_size == 1:
        return None
    shared = store()
    if shared is None:
        logger.warning(
            "The ranks have no store of torch.distributed: if one fails, the others wait for it until a timeout, and a "
            "signal ends ranks at different steps. Connect them with torch.distributed to change this."
        )
        return None
    if _watch is not None and _watch[0] == os.getpid():
        if _watch[1] is shared:
            return _watch[2]
        _watch[2].stop()  # of a process group that the program has destroyed, to make another one
    limits = strategy if isinstance(strategy, HasTimeouts) else None
    starter: Any = launcher if hasattr(launcher, "local_exits") else None
    watch = Watch(
        shared,
        rank=topology.global_rank,
        size=topology.world_size,
        local_rank=topology.local_rank,
        timeout=1800.0 if limits is None or limits.timeout is None else limits.timeout,
        stall_timeout=None if limits is None else limits.stall_timeout,
        launcher=starter,
    )
    watch.start()
    if hasattr(launcher, "grace_s"):
        launcher.grace_s = None  # the watch ends this process itself when a process that it started has failed
    _watch = (os.getpid(), shared, watch)
    return watch


def stop_watching() -> None:
    """Notify the other ranks that this one is done, before a process ends by os._exit."""
    if _watch is not None and _watch[0] == os.getpid():
        _watch[2].stop()
