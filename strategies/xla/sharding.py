"""How tensors are sharded over the XLA devices of one process (SPMD): batches, states that are sent, and shards read.

torch_xla marks a tensor with its sharding, and XLA's compiler adds the communication.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from ...accelerators.xla import import_xla
from ...protocols import StateDict
from ..base import plain_name

logger = logging.getLogger(__name__)

# Any in this file: torch_xla is not annotated.

Spec = tuple[str | None, ...]
"""The mesh's axis for each dimension of a tensor; None for one that is not sharded."""
_Shards = Sequence[tuple[Tensor, object]]
_Indices = Sequence[tuple[object, Sequence[slice] | EllipsisType]]


def replicated(tensor: Tensor) -> Spec:
    """Return the sharding of a tensor that every device holds in full."""
    return (None,) * tensor.ndim


def send_tensors(tensors: Sequence[Tensor], shardings: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Return host tensors on the devices, a shard to each, without waiting.

    Args:
        tensors: On the host.
        shardings: torch_xla's, one for each; None: a full copy.
        device: The device that represents all.
    """
    sent: list[Tensor] = import_xla()._XLAC._xla_tensors_from_aten(
        list(tensors), [str(device)] * len(tensors), list(shardings)
    )
    return sent


def send_state(
    module: nn.Module, state: StateDict, spec_of: Callable[[Tensor], Spec], mesh: Any, device: torch.device
) -> StateDict:
    """Return a state whose sharded tensors are on the devices: torch's copy would send each device all of them."""
    targets = {plain_name(name): one for name, one in module.named_parameters(remove_duplicate=False)}
    found: dict[str, Tensor] = {}
    shardings: list[Any] = []
    for name, value in state.items():
        target = targets.get(plain_name(name))
        if target is None or type(value) is not Tensor or value.device.type != "cpu" or value.shape != target.shape:
            continue  # torch copies it, or names the misfit
        spec = spec_of(target)
        if any(spec):
            found[name] = value.to(target.dtype)
            shardings.append(import_xla("torch_xla.distributed.spmd").ShardingSpec(mesh, spec).xla_spec(found[name]))
    if not found:
        return state
    result = copy(state)  # with the versions of modules, which torch keeps in an attribute
    result.update(zip(found, send_tensors([*found.values()], shardings, device), strict=True))
    return result


def copy_shards(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return those of the tensors that are sharded in full on the host, by their ids, from shards copied one by one.

    torch_xla would gather them on the devices: a graph that is compiled again at each save, and memory for each.
    """
    lib = import_xla()._XLAC
    # Shards can be read only when the graphs that compute them have ended.
    lib._xla_sync_multi(list(tensors), devices=[], wait=True, sync_xla_data=False)
    import_xla("torch_xla.core.xla_model").wait_device_ops()
    sharded = [tensor for tensor in tensors if "devices=" in lib._get_xla_sharding_spec(tensor)]
    shards, indices = lib._get_local_shards(sharded), lib._get_local_shard_replica_and_indices(sharded)
    return {id(tensor): _joined(tensor, *found) for tensor, *found in zip(sharded, shards, indices, strict=True)}


def _joined(tensor: Tensor, shards: _Shards, indices: _Indices) -> Tensor:
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    for (shard, _), (_, index) in zip(shards, indices, strict=True):
        if isinstance(index, EllipsisType):
            return shard.clone()
        # The last shard may be padded.
        full[tuple(index)] = shard[tuple(slice(0, one.stop - one.start) for one in index)]
    return full


class BatchSharding:
    """Sharding of batches over the devices: along the first dimension, for any number of dimensions.

    It replaces torch_xla's ShardingSpec, which is for one number of dimensions, also in torch_xla's loader.

    Args:
        mesh: torch_xla's Mesh.
        axis: Name of the sharded axis.
        size: Number of devices on it.
    """

    minibatch = False
    """For torch_xla: the batch is that of all devices, not this host's."""

    def __init__(self, mesh: Any, axis: str | None, size: int) -> None:
        self._mesh = mesh
        self._axis = axis
        self._size = size
        self._specs: dict[int, Any] = {}
        self._has_warned = False

    def xla_spec(self, tensor: Tensor) -> Any:
        """Return torch_xla's sharding of one host tensor; None for one that is replicated."""
        if not tensor.ndim:
            return None
        if tensor.shape[0] % self._size:
            self._warn(tensor.shape[0])
            return None
        spec = self._specs.get(tensor.ndim)
        if spec is None:
            spmd = import_xla("torch_xla.distributed.spmd")
            spec = self._specs[tensor.ndim] = spmd.ShardingSpec(self._mesh, (self._axis, *replicated(tensor)[1:]))
        return spec.xla_spec(tensor)

    def _warn(self, samples: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A batch of %d samples cannot be split evenly over %d devices, so each computes the full batch. Use a "
                "batch_size that is a multiple of %d, and drop_last=True",
                samples, self._size, self._size,
            )  # fmt: skip
