"""Context parallelism of a module, set up for the ranks of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..pipeline.setup import runner_of
from .options import Context
from .parallel import ContextParallel
from .parts import Parts

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["set_up"]


def set_up(
    module: nn.Module,
    options: Context | None,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    verifies: bool,
    same_batch: ProcessGroup | None = None,
    tp: int = 1,
) -> ContextParallel:
    """Return what runs a module's steps on parts of sequences.

    Args:
        module: The user's module, sharded already.
        options: None: the defaults.
        mesh: The ranks that share a sequence, as one axis.
        device: Of this process.
        verifies: Whether the first batch is compared with the one on full sequences.
        same_batch: The ranks that share a sequence or split layers; None: those of `mesh`.
        tp: Number of ranks that split layers.
    """
    parts = Parts(mesh.get_group(), mesh.get_local_rank(), mesh.size(), same_batch, tp)
    runner = runner_of(module)
    stages = None if runner is None else runner.split
    return ContextParallel(
        module, Context() if options is None else options, parts, device, verifies=verifies, stages=stages
    )
