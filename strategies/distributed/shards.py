"""Sharded tensors: local shards, full tensors from shards, and shards from full tensors."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import CheckpointError
from ...messages import warn
from ..tree import leaves, map_leaves

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

    from ...protocols import TensorInFile, Tree

T = TypeVar("T")

# Any in this file: the content of checkpoints, and what mypy does not know of torch.

FULL_STATE = (
    "state = trainer.full_state_dict(module) on every rank, which returns the full tensors on rank 0's CPU; there, "
    "torch.save(state, path), or model.save_pretrained(path, state_dict=state) of transformers. With Fabric, call "
    "fabric.save"
)
"""What to call where a part of a module's state would be saved."""


def refuse_in_files() -> None:
    """Let `torch.save` of a sharded tensor be an error: the file would have this rank's part."""
    from torch.distributed.tensor import DTensor

    copyreg.pickle(DTensor, _reduced)


def _reduced(tensor: DTensor) -> Any:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.serialization.__file__:
        frame = frame.f_back
    if frame is None or tensor.device_mesh.size() == 1:  # None: for a process or rank that has the same mesh
        return tensor.__reduce_ex__(2)
    raise CheckpointError(
        f"Expected tensors in full to save, got one of shape {tuple(tensor.shape)} that is spread over "
        f"{tensor.device_mesh.size()} ranks (a DTensor): this rank's part would be saved as if it were everything.",
        fix=f"call {FULL_STATE}. For this rank's part alone, save tensor.to_local().",
    )


class RemoteShards:
    """Represents a sharded tensor of other ranks in a checkpoint that all ranks write, under the same name there.

    Under several names the same object represents one tensor.

    Attributes:
        shape: Of the full tensor.
        dtype: Of its elements.
    """

    # Not a dataclass: walks over structures must see it, not its fields.
    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether this is a sharded tensor (a DTensor). Imports nothing."""
    # Not imported yet, or not completely in another thread, means that there is none.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def all_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a module; on pipeline stages what stands for those of other stages, too, with shapes."""
    yield from module.parameters()
    for one in module.modules():
        yield from (
            value for value in vars(one).values() if isinstance(value, Tensor) and getattr(value, "is_parameter", False)
        )


def has_shards(tree: Tree) -> bool:
    """Return whether there is a sharded tensor in a structure of dicts, lists and tuples."""
    return "torch.distributed.tensor" in sys.modules and any(is_sharded(value) for _, value in leaves(tree))


def has_parts(tree: Tree) -> bool:
    """Return whether other ranks are needed to read a structure: it has shards, or objects that an engine gathers."""
    return has_shards(tree) or any(getattr(value, "is_part", False) is True for _, value in leaves(tree))


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the local shards, without empty ones; tensors that are not sharded are returned unchanged.

    The shards share memory with the tensors, so that changes in place change the tensors.
    """
    shards = [_local(tensor) if is_sharded(tensor) else tensor for tensor in tensors]
    return [shard for shard in shards if shard.numel()]


def _local(tensor: DTensor) -> Tensor:
    with torch.no_grad():  # else it is a new tensor with a graph
        return tensor.to_local()


def local_slice(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of the local shard in the full tensor.

    Raises:
        NotImplementedError: The local shard is not one contiguous slice: the sharding is strided.
    """
    # The method that torch.distributed.checkpoint calls on a sharded tensor.
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise NotImplementedError(f"Expected one slice of a sharded tensor on this rank, got {len(chunks)}.")
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def as_shards(value: Tensor | TensorInFile, like: DTensor, *, is_kept: bool = True) -> DTensor:
    """Return a full tensor sharded like another one; each rank reads its shard only. Does not communicate.

    Args:
        value: The same on all ranks, with the shape of `like`; in memory, or in a file and not read yet.
        like: Provides the placement and the device of the result; its dtype is ignored.
        is_kept: Whether to allocate memory for the result. If False, it may share memory with `value` or its file, for
            callers that copy it immediately.
    """
    from torch.distributed.tensor import DTensor

    if is_sharded(value):
        return value
    offsets, sizes = local_slice(like)
    if not all(sizes):
        part = torch.empty(like.to_local().shape, dtype=value.dtype)
    elif isinstance(value, Tensor):
        part = value[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
    else:
        viewed = None if is_kept else value.view_slice(offsets, sizes)
        part = value.read(offsets, sizes) if viewed is None else viewed
    # Contiguous and in newly allocated memory, as `read` returns it: a view would keep the full tensor alive.
    is_copied = is_kept and isinstance(value, Tensor)
    part = part.to(like.device, copy=is_copied, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def full_tensor(tensor: DTensor) -> Tensor:
    """Return the full tensor in newly allocated memory, on its device. Call it on every rank: it communicates."""
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = tensor.placements
    is_strided = any(isinstance(one, _StridedShard) for one in placements)
    with torch.no_grad():
        part = tensor.to_local()
        if is_strided and not any(one.is_partial() for one in placements):
            return _gather_strided(tensor, part)
        result = tensor.full_tensor()
        is_same = result.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        return result.clone() if is_same else result


class _Reading:
    """Whether all ranks run the same code now, so that a number may be gathered."""

    is_shared = False


@contextmanager
def reading_numbers() -> Iterator[None]:
    """Return a context in which `item()` of a sharded tensor is the number of all ranks: all of them run it."""
    before, _Reading.is_shared = _Reading.is_shared, True
    try:
        yield
    finally:
        _Reading.is_shared = before


def watch_numbers() -> None:
    """See each `item()`, `float(...)` and `bool(...)` of a sharded tensor, which is a part of a norm or sum in torch.

    Within `reading_numbers` it is the number of all ranks. Elsewhere it stays a part, with a warning: hooks may run
    on one rank, which would wait forever. Torch's table of special operations is the only place that sees this
    operation alone: a mode would see each operation of a step, and a subclass is lost with the first result.
    """
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _read_number


def _read_number(operation: Any, args: tuple[DTensor, ...], kwargs: object) -> bool | float | int | complex:
    tensor = args[0]
    part: Any = _local(tensor)
    if not all(one.is_replicate() for one in tensor.placements):
        if _Reading.is_shared:
            part = full_tensor(tensor)
        elif any(one.is_partial() for one in tensor.placements):
            warn(
                "item(), float(...) or bool(...) of a sharded tensor, such as the norm of a gradient, is that of this "
                "rank's part. Call .full_tensor() before it, on every rank; or log the tensor with self.log"
            )
    result: bool | float | int | complex = part.item()
    return result


def _gather_strided(tensor: DTensor, part: Tensor) -> Tensor:
    """Gather one mesh axis at a time, the one that split the tensor last first.

    `DTensor.full_tensor` gathers in the same order, but warns of it, and torch 2.9 misorders unequal shards.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    # A strided shard was split after axes to its right; its factor is the number of their shards.
    factors = {axis: getattr(one, "split_factor", 1) for axis, one in enumerate(placements) if not one.is_replicate()}
    order = sorted(factors, key=lambda axis: (factors[axis], axis))
    shape, sizes = list(tensor.shape), {}
    for axis in order:
        dim = _dim_of(placements[axis])
        sizes[axis] = shape[dim]
        chunk = -(-shape[dim] // mesh.size(axis))
        shape[dim] = max(0, min(chunk, shape[dim] - mesh.get_local_rank(axis) * chunk))
    for axis in reversed(order):
        part = _gather_axis(part, _dim_of(placements[axis]), sizes[axis], mesh.get_group(axis))
    return part


def _dim_of(placement: Any) -> int:
    return int(placement.dim)  # of Shard and _StridedShard


def _gather_axis(part: Tensor, dim: int, size: int, group: ProcessGroup) -> Tensor:
    """Return the chunks of a group's ranks, which `torch.chunk` made of `size` elements of `dim`, as one tensor."""
    rows, count = part.movedim(dim, 0), group.size()
    chunk = -(-size // count)
    if len(rows) < chunk:
        rows = torch.cat([rows, rows.new_zeros(chunk - len(rows), *rows.shape[1:])])
    gathered = rows.new_empty(chunk * count, *rows.shape[1:])
    # Its name since torch 2.13, where the former one warns.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, rows.contiguous(), group=group)
    if dim == 0 and len(gathered) == size:
        return gathered
    return gathered[:size].movedim(0, dim).clone(memory_format=torch.contiguous_format)


def gather_full(tree: T, *, keep: bool) -> T:
    """Return a structure with full CPU tensors instead of sharded ones. Call it on every rank: it communicates.

    One full tensor at a time is in device memory. Tensors that share memory (tied weights) still do in the result.

    Args:
        tree: The same on all ranks, except for the local shards.
        keep: Whether this rank keeps the full tensors; if False, its result has None instead of them.
    """
    # The sharded tensors are kept beside the full ones: else their memory, and with it the key, could be used again.
    done: dict[tuple[object, ...], tuple[DTensor, Tensor]] = {}

    def gather(value: object) -> object:
        if not is_sharded(value):
            return value
        full = full_tensor(value)  # also for a second name, which a rank with an empty shard cannot recognize
        if not keep:
            return None
        part = _local(value)
        key = (part.data_ptr(), tuple(value.shape), value.dtype) if part.numel() else (id(value),)
        return done.setdefault(key, (value, full.cpu()))[1]

    full: T = map_leaves(tree, gather)
    return full


def read_full(tree: Any) -> Any:  # Any: the same structure, with tensors
    """Return a structure whose tensors in files are read in full; sharded tensors are left unchanged."""
    return map_leaves(tree, lambda value: value.read() if _is_stored(value) else value)


def _is_stored(value: object) -> TypeGuard[TensorInFile]:
    return not isinstance(value, Tensor) and hasattr(value, "read") and hasattr(value, "dtype")


def fits(value: object, like: Sequence[int]) -> bool:
    """Return whether this is a tensor, in memory or in a file, of that shape."""
    return (isinstance(value, Tensor) or _is_stored(value)) and tuple(value.shape) == tuple(like)
