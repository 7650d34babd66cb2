"""Requeueing of a SLURM job: SLURM warns before the time is up, the run saves itself, and the job goes back into the
queue.

The signal's handler only sets a flag; all ranks stop at one step, as after any other signal. The checkpoint is
`hpc_ckpt_<n>.ckpt` in `default_root_dir`; a requeued job resumes from the newest complete one, whatever
`ckpt_path` its script passes.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from typing import TYPE_CHECKING, Protocol, TypeGuard

from ...checkpoint import storage
from ...remote import names_in

if TYPE_CHECKING:
    from ...protocols import Cluster
    from ..view import TrainerView

logger = logging.getLogger(__name__)

_KEPT = 2
_NUMBERED = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


class _RequeuingCluster(Protocol):
    """A cluster environment that can put the job back into the queue, such as `SLURMEnvironment`."""

    requeue_signal: signal.Signals | None

    def job_id(self) -> object:
        """Return what identifies the job; None if it does not belong to one."""
        ...

    def restart_count(self) -> int:
        """Return the number of times that the job was requeued."""
        ...

    def requeue(self) -> object:
        """Put the job back into the queue."""
        ...


def _requeues(cluster: Cluster | None) -> TypeGuard[_RequeuingCluster]:
    """Return whether the cluster environment has the methods above; the attribute `auto_requeue` says so."""
    return bool(getattr(cluster, "auto_requeue", False))


def requeue_signal(trainer: TrainerView) -> signal.Signals | None:
    """Return the signal that requests a requeue of the job; None if the job cannot be requeued."""
    cluster = trainer.fabric.cluster_environment
    if _requeues(cluster) and cluster.job_id() is not None:
        return cluster.requeue_signal
    return None


def requeue(trainer: TrainerView) -> None:
    """Save the run and put the job back into the queue. On every rank, all of them between the same two steps."""
    found = numbered_checkpoints(trainer.default_root_dir) if trainer.is_global_zero else {}
    number = trainer.strategy.broadcast(max(found, default=0) + 1)
    path = os.path.join(trainer.default_root_dir, f"hpc_ckpt_{number}.ckpt")
    trainer.save_checkpoint(path)
    trainer.wait_for_save()  # the job ends next
    if not trainer.is_global_zero:
        return
    logger.warning("the run is saved in %s", path)
    for old in sorted(found)[: -(_KEPT - 1)]:
        trainer.fabric.checkpoint_io.remove_checkpoint(found[old])
    cluster = trainer.fabric.cluster_environment
    assert _requeues(cluster)  # or there would be no signal
    cluster.requeue()


def find_requeued(trainer: TrainerView) -> str | None:
    """Return the checkpoint that this requeued job resumes from; None if the job was not requeued."""
    cluster = trainer.fabric.cluster_environment
    if requeue_signal(trainer) is None or not (_requeues(cluster) and cluster.restart_count()):
        return None
    found = numbered_checkpoints(trainer.default_root_dir)

    def skip(path: str, error: Exception) -> None:
        logger.warning("%s is damaged and skipped: %s", path, error)

    newest = storage.newest_valid([found[number] for number in sorted(found, reverse=True)], skip)
    if newest is None:
        return None
    logger.warning("The job was requeued: resuming from %s", newest)
    return str(newest)


def numbered_checkpoints(folder: str) -> dict[int, str]:
    """Return the paths of `hpc_ckpt_<n>.ckpt` in a folder, which may be at a URL, by number."""
    found = (_NUMBERED.fullmatch(name) for name in names_in(folder))
    return {int(match[1]): os.path.join(folder, match[0]) for match in found if match is not None}
