"""Comparison of buffers over ranks whose modules are copies, after a step that may have updated them from parts."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import ModuleError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["check_buffers", "mark_of", "saved_buffers"]


def check_buffers(module: nn.Module, group: ProcessGroup | None, axis: str) -> None:
    """Compare the buffers in the state of a module over ranks that read the same batch. On every rank of the group.

    Args:
        module: The user's, after a training step.
        group: The ranks; None: all.
        axis: Name of the axis along which they differ: "cp" or "tp".

    Raises:
        ModuleError: A buffer differs: the step has computed it from a part of a sequence or of features.
    """
    marks = {name: mark_of(one) for name, one in saved_buffers(module).items() if not one.is_meta}
    size = dist.get_world_size(group)
    everywhere: list[Any] = [None] * size  # Any: what torch gathers
    dist.all_gather_object(everywhere, marks, group=group)
    unlike = [name for name in marks if any(one.get(name) != marks[name] for one in everywhere)]
    if unlike:
        shown = f"{', '.join(unlike[:5])}{' ...' if len(unlike) > 5 else ''}"
        raise ModuleError(
            f"Expected equal buffers on the {size} ranks of {axis}={size} after a training step, got "
            f"different values of {shown}: they are updated from this rank's part of the batch.",
            fix="pass sync_batchnorm=True for batch norms on GPUs; update other buffers from what all ranks have, such "
            f"as the batch or outputs of the model; or train with {axis}=1.",
        )


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint has, by their names."""
    return {
        f"{path}.{key}" if path else key: buffer
        for path, one in module.named_modules()
        for key, buffer in one._buffers.items()
        if buffer is not None and key not in one._non_persistent_buffers_set
    }


def mark_of(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bytes. On a device it waits."""
    dense = tensor.detach().cpu()
    dense = dense if dense.layout is torch.strided else dense.to_dense()
    values: bytes = dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return zlib.crc32(values)
