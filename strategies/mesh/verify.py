"""Comparison of a split module over ranks that read the same batch, and with the full module.

What is compared is in tensor/verify.py (layers), pipeline/verify.py (stages) and context/verify.py (sequences).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import ModuleError
from ..distributed.collectives import gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_buffers(module: nn.Module, group: ProcessGroup | None, axis: str) -> None:
    """Compare the buffers in the state of a module over ranks that read the same batch. On every rank of the group.

    Args:
        module: The user's, after a training step.
        group: The ranks; None: all.
        axis: Name of the axis along which they differ: "cp" or "tp".

    Raises:
        ModuleError: A buffer differs: the step has computed it from a part of a sequence or of features.
    """
    saved = {name: one for name, one in saved_buffers(module).items() if not one.is_meta}
    unlike, size = unlike_over_ranks(saved, group), dist.get_world_size(group)
    if unlike:
        shown = f"{', '.join(unlike[:5])}{' ...' if len(unlike) > 5 else ''}"
        raise ModuleError(
            f"Expected equal buffers on the {size} ranks of {axis}={size} after a training step, got "
            f"different values of {shown}: they are updated from this rank's part of the batch.",
            fix="pass sync_batchnorm=True for batch norms on GPUs; update other buffers from what all ranks have, such "
            f"as the batch or outputs of the model; or train with {axis}=1.",
        )


def unlike_over_ranks(tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> list[str]:
    """Return the names of tensors that are not equal, byte for byte, on the ranks of a group. On every rank of it."""
    marks = {name: mark_of(one) for name, one in tensors.items()}
    everywhere = gather_objects(marks, group)
    return [name for name in marks if any(one.get(name) != marks[name] for one in everywhere)]


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


def difference(found: Tensor, wanted: Tensor, scale: float | None = None) -> float:
    """Return the largest difference as a share of the scale; infinity for another shape or NaN.

    Args:
        found: A value of the split module.
        wanted: The same of the full module.
        scale: None: the largest magnitude in `wanted`.
    """
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    exact = wanted.to(torch.promote_types(wanted.dtype, torch.float64))
    largest = float((found.to(exact.dtype) - exact).abs().max())
    scale = float(exact.abs().max()) if scale is None else scale
    ratio = largest / scale if scale else largest
    return ratio if ratio == ratio else float("inf")


def dtypes_of(tensor: Tensor) -> list[torch.dtype]:
    """Return the dtypes in which a tensor may have been computed: its dtype, and that of autocast if active."""
    kind = tensor.device.type
    return [tensor.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
