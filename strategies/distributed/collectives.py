"""Collectives for any data: tensors, numbers, and structures of them.

Every rank must make the same calls in the same order. On the CPU each call first compares its kind, shapes and dtypes
over the ranks (one small message), because gloo ends the process without a message if they differ.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ...errors import ConfigError, RankFailure, nearest
from ...protocols import ReduceOp, Tree
from ..tree import leaves, map_leaves

if TYPE_CHECKING:
    from ..autograd import AutogradContext

T = TypeVar("T")

# Any in this file: data of any structure.

_OPS = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "min": "min",
    "max": "max",
    "product": "product",
    "prod": "product",
}


def op_name(reduce_op: ReduceOp) -> str:
    """Return "mean", "sum", "min", "max" or "product" for a name in any case, a `torch.distributed.ReduceOp`, or None.

    Raises:
        ConfigError: The value is not one of these.
    """
    if reduce_op is None:
        return "mean"
    if isinstance(reduce_op, str) and reduce_op.lower() in _OPS:
        return _OPS[reduce_op.lower()]
    if not isinstance(reduce_op, str):
        for name in ("AVG", "SUM", "MIN", "MAX", "PRODUCT"):
            if reduce_op == getattr(dist.ReduceOp, name):
                return _OPS[name.lower()]
    raise ConfigError(
        f"Expected the name of a reduction, got reduce_op={reduce_op!r}{nearest(str(reduce_op).lower(), _OPS)}.",
        fix=f"use one of {', '.join(map(repr, _OPS))}.",
    )


def all_reduce(data: Tree, *, group: dist.ProcessGroup | None, reduce_op: ReduceOp, device: torch.device) -> Any:
    """Return the data with every tensor and number reduced over the ranks; nothing is changed in place.

    Args:
        data: The same structure, shapes and dtypes on all ranks. Numbers become tensors of shape () on `device`; other
            objects are returned unchanged.
        group: Ranks that take part; None for all.
        reduce_op: See `op_name`. Sums and products of integers and booleans are int64, and their mean is float64 (so
            that it is not truncated to an integer); 16-bit floats are summed in float32 and converted back.
        device: Device of the tensors that numbers become.

    Raises:
        RankFailure: On the CPU: the calls differ between ranks; lists the call of each rank.
    """
    op = op_name(reduce_op)
    data = _to_tensors(data, device)
    _check(f"all_reduce with {op!r}", data, group)
    return map_leaves(data, lambda leaf: _reduced(leaf, op, group) if isinstance(leaf, Tensor) else leaf)


def _reduced(tensor: Tensor, op: str, group: dist.ProcessGroup | None) -> Tensor:
    result = _widened(tensor, op)
    dist.all_reduce(result, _operation(op), group=group)
    return _narrowed(result, tensor.dtype, op, dist.get_world_size(group))


def _operation(op: str) -> object:
    return dist.ReduceOp.SUM if op == "mean" else getattr(dist.ReduceOp, op.upper())


def _widened(tensor: Tensor, op: str) -> Tensor:
    """Return a contiguous copy in the dtype that is reduced."""
    wide = dtype = tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        wide = torch.int64 if op in ("mean", "sum", "product") or dtype != torch.bool else torch.uint8
    elif dtype.is_floating_point and dtype.itemsize < 4:
        wide = torch.float32
    return tensor.detach().to(wide, copy=True, memory_format=torch.contiguous_format)


def _narrowed(result: Tensor, dtype: torch.dtype, op: str, size: int) -> Tensor:
    """Return the reduced tensor in the dtype of the result."""
    is_number = dtype.is_floating_point or dtype.is_complex
    if op == "mean":
        if not is_number:
            exact = torch.float32 if result.device.type == "mps" else torch.float64  # mps has no float64
            return result.to(exact) / size
        return (result / size).to(dtype)
    if op in ("sum", "product") and not is_number:
        return result
    return result.to(dtype)


def reduce_scatter(data: Tree, *, group: dist.ProcessGroup | None, reduce_op: ReduceOp, device: torch.device) -> object:
    """Return this rank's chunk of a reduction: dimension 0 is split into one chunk per rank, in rank order.

    Args:
        data: As in `all_reduce`; every tensor's dimension 0 is a multiple of the number of ranks.
        group: Ranks that take part; None for all.
        reduce_op: As in `all_reduce`, which also describes the dtypes.
        device: Device of the tensors that numbers become.

    Raises:
        ConfigError: Dimension 0 of a tensor is not divisible by the number of ranks, or the data contains a number.
        RankFailure: On the CPU: the calls differ between ranks; lists the call of each rank.
    """
    op, size = op_name(reduce_op), dist.get_world_size(group)
    check_divides(data, size)
    data = _to_tensors(data, device)
    _check(f"reduce_scatter with {op!r}", data, group)

    # torch 2.9 to 2.12 have only the earlier name, which is deprecated in 2.13.
    reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def scatter(leaf: Tree) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        full = _widened(leaf, op)
        part = full.new_empty((full.shape[0] // size, *full.shape[1:]))
        reduce_scatter_single(part, full, _operation(op), group=group)
        return _narrowed(part, leaf.dtype, op, size)

    return map_leaves(data, scatter)


def check_divides(data: Tree, size: int) -> None:
    """Check that dimension 0 of all tensors is divisible by the number of ranks.

    Raises:
        ConfigError: It is not, or the data contains numbers; lists each with its shape.
    """
    wrong = [
        f"data{path} {tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf!r}"
        for path, leaf in leaves(data)
        if (isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] % size)) or isinstance(leaf, int | float)
    ]
    if wrong:
        raise ConfigError(
            f"Expected tensors whose dimension 0 is a multiple of {size} for reduce_scatter over {size} ranks, got "
            f"{', '.join(wrong)}.",
            fix="pad dimension 0, or call reduce, which returns the full result on every rank.",
        )


def all_gather(data: Tree, *, group: dist.ProcessGroup | None, sync_grads: bool, device: torch.device) -> Any:
    """Return the data with every tensor and number of all ranks stacked along a new first dimension, in rank order.

    Args:
        data: The same structure, shapes and dtypes on all ranks. Numbers become tensors of shape () on `device`; other
            objects are returned unchanged.
        group: Ranks that take part; None for all.
        sync_grads: Whether gradients flow back: each rank gets the sum of all ranks' gradients for its tensor.
        device: Device of the tensors that numbers become.

    Raises:
        RankFailure: On the CPU: the calls differ between ranks; lists the call of each rank.
    """
    data = _to_tensors(data, device)
    _check("all_gather", data, group)

    def gather(leaf: Tree) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if sync_grads and leaf.requires_grad and torch.is_grad_enabled():
            gathered: Tensor = _AllGather.apply(leaf, group)  # type: ignore[no-untyped-call]
            return gathered
        return _gathered(leaf.detach(), group)

    return map_leaves(data, gather)


def _gathered(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)


class _AllGather(torch.autograd.Function):
    """Stack the tensors of all ranks; backward sums over the ranks and returns the gradient of this rank's tensor."""

    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


def broadcast(obj: T, *, src: int, device: torch.device) -> T:
    """Return rank `src`'s object, which must be picklable; on `src`, the same object.

    Tensors that are not on the CPU are received on `device`.
    """
    is_source = dist.get_rank() == src
    box = [map_leaves(obj, _packed) if is_source else None]
    dist.broadcast_object_list(box, src=src)
    return obj if is_source else map_leaves(box[0], lambda leaf: _unpacked(leaf, device))


class _Elsewhere:
    """The CPU copy of a tensor that is sent from another device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().cpu()


def _packed(leaf: Tree) -> object:
    return _Elsewhere(leaf) if isinstance(leaf, Tensor) and leaf.device.type != "cpu" else leaf


def _unpacked(leaf: Tree, device: torch.device) -> object:
    return leaf.tensor.to(device) if isinstance(leaf, _Elsewhere) else leaf


def gather_objects(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks of a group in rank order, on every one; tensors are received on the CPU.

    What all ranks have alike, as most of what they compare, is not sent: 16 bytes are. The places of the other ranks
    then have one object.

    Args:
        obj: Any that can be pickled.
        group: None: all ranks.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = pickle.dumps(map_leaves(obj, _packed))
    texts: list[Any] = [own] * size
    # torch's choice for objects; private, from torch 2.4 on.
    device = torch.device(distributed_c10d._get_object_coll_device(group))
    if same_everywhere(own, group=group, device=device):
        other = _unpickled(own) if size > 1 else obj
        return [obj if index == rank else other for index in range(size)]
    dist.all_gather_object(texts, own, group=group)
    return [obj if index == rank else _unpickled(text) for index, text in enumerate(texts)]


def gather_to_first(obj: T) -> list[T] | None:
    """Return the objects of all ranks in rank order, on rank 0; None on the others. See `gather_objects`."""
    rank = dist.get_rank()
    texts: list[Any] | None = None if rank else [None] * dist.get_world_size()
    dist.gather_object(pickle.dumps(map_leaves(obj, _packed)), texts)
    return None if texts is None else [obj if not index else _unpickled(text) for index, text in enumerate(texts)]


def _unpickled(text: bytes) -> Any:
    return map_leaves(pickle.loads(text), _on_cpu)


def _on_cpu(leaf: Tree) -> object:
    return leaf.tensor if isinstance(leaf, _Elsewhere) else leaf


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors with the tensors of the group's first rank, in place.

    Args:
        tensors: The same number, shapes and dtypes on all ranks of the group.
        group: Ranks that take part; None for all.
    """
    first = 0 if group is None else dist.get_global_rank(group, 0)
    for tensor in tensors:
        if tensor.layout is not torch.strided:  # ranks may have other numbers of elements
            box = [tensor.detach()]
            dist.broadcast_object_list(box, src=first, group=group)
            tensor.detach().copy_(box[0])
    dense_ones = [as_bytes(tensor.detach()) for tensor in tensors if tensor.layout is torch.strided]
    copies = [(tensor, tensor.contiguous()) for tensor in dense_ones]
    for work in [dist.broadcast(dense, src=first, group=group, async_op=True) for _, dense in copies]:
        work.wait()
    for tensor, dense in copies:
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return an 8-bit floating-point tensor as bytes, which all backends send, sharing memory; others as they are."""
    is_small = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.view(torch.uint8) if is_small else tensor


def barrier(device: torch.device) -> None:
    """Wait until all ranks have called this function."""
    if device.type == "cuda" and "nccl" in dist.get_backend():
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def host_device(device: torch.device) -> torch.device:
    """Return the device for reductions of small host values: the CPU if the backend supports it, otherwise `device`."""
    return torch.device("cpu") if "gloo" in str(dist.get_backend_config()) else device


def same_everywhere(
    fact: str | bytes, *, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> bool:
    """Return whether all ranks passed the same string or bytes; sends 16 bytes on `device` (None: the CPU)."""
    data = fact.encode() if isinstance(fact, str) else fact
    digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
    # The maximum of d and the maximum of -d have equal magnitude exactly if every rank has the same d.
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    largest, smallest = both.tolist()
    return bool(largest == -smallest)


def _check(call: str, data: Tree, group: dist.ProcessGroup | None) -> None:
    """Compare the calls of the ranks if their tensors are on the CPU, where gloo would end the process."""
    described = [(path, leaf) for path, leaf in leaves(data) if isinstance(leaf, Tensor)]
    if not all(leaf.device.type == "cpu" for _, leaf in described):
        return  # NCCL's watchdog reports differences; comparing would make the host wait for the device
    mine = f"{call} of " + ", ".join(f"data{path} {tuple(leaf.shape)} {leaf.dtype}" for path, leaf in described)
    if same_everywhere(mine, group=group):
        return
    raise RankFailure(
        "Expected the same collective on all ranks, got different calls:\n"
        + "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(gather_objects(mine, group))),
        fix="make the same call with the same shapes on every rank; for tensors of different sizes, use "
        "strategy.gather_objects or pad them.",
    )


def _to_tensors(data: Tree, device: torch.device) -> object:
    def convert(leaf: Tree) -> object:
        if isinstance(leaf, bool | int | float | complex):
            return torch.tensor(leaf, device=device)
        # NumPy arrays; NumPy may not be installed.
        if type(leaf).__module__ == "numpy" and hasattr(leaf, "__array__"):
            return torch.as_tensor(leaf).to(device)
        return leaf

    return map_leaves(data, convert)
