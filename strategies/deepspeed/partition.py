"""Partitioning of a module for ZeRO stage 3 that was built without memory: one submodule at a time gets its values.

DeepSpeed's own `zero.Init` partitions each submodule at the end of its `__init__`: later changes by the parent's
`__init__` are lost, and so is a state that is loaded there. Here the model is built under `DeferredInit`, and
partitioned when it is complete. A rank holds the full parameters of one submodule at a time, beside its shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import ModuleError
from ..construction.materialize import check_materializable, materialize, update_attributes
from .ops import refusals
from .setup import engine_config
from .state import is_partitioned

if TYPE_CHECKING:
    from .engine_types import ZeroParameter
    from .strategy import DeepSpeedStrategy


def has_values(module: nn.Module) -> bool:
    """Return whether all parameters and buffers of a module have memory."""
    return not any(one.is_meta for one in [*module.parameters(), *module.buffers()])


def is_to_be_partitioned(module: nn.Module) -> bool:
    """Return whether the engine could not partition the module itself: parts of it lack values, or are partitioned.

    It takes a module with some partitioned parameters (of an earlier run) for one that is complete.
    """
    return not has_values(module) or len({is_partitioned(one) for one in module.parameters()}) == 2


def partition(strategy: DeepSpeedStrategy, module: nn.Module) -> dict[str, Tensor]:
    """Materialize a module and partition its parameters, in place. On every rank: it communicates.

    Rank 0's values count, bit for bit those of building the module in one process. Parameters that are partitioned
    already stay as they are.

    Args:
        strategy: In stage 3, connected.
        module: The same on all ranks; parts of it may have values already.

    Returns:
        By name, in float32 on the CPU, the local shard (shape (elements,), without padding) of each parameter that was
        cast to 16 bits: for the masters. Empty in full precision.

    Raises:
        ModuleError: Parts of the model have no values and cannot be given any; with their names.
    """
    import deepspeed

    _check(module)
    dtype = strategy.precision.policy.compute_dtype
    source = _Source(module, strategy.device, None if dtype is torch.float32 else dtype)
    with refusals(strategy.where):
        # DeepSpeed (0.19) takes the dtype for its own checks from the configuration, not from its argument.
        deepspeed.zero.Init(
            module=source, config_dict_or_path=engine_config(strategy), remote_device=strategy.remote_device
        )
    update_attributes(module)
    return source.shards


class _Source(nn.Module):
    """Replaces the module: its parameters exist one submodule at a time, as DeepSpeed requests them."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.__dict__["_original"] = module  # not a submodule: DeepSpeed looks at those, too
        self._device = device
        self._dtype = dtype
        self.shards: dict[str, Tensor] = {}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield each parameter that is not partitioned; DeepSpeed partitions it before it requests the next one."""
        module: nn.Module = self.__dict__["_original"]
        for path, owner in module.named_modules():
            materialize(owner, device=self._device, recurse=False, root=module)
            for name, one in owner._parameters.items():
                if one is None or is_partitioned(one):
                    continue
                values = one.data
                is_cast = self._dtype is not None and values.is_floating_point() and values.dtype != self._dtype
                one.data = (values.to(self._dtype) if is_cast else values).contiguous()
                yield one
                if is_cast and is_partitioned(one):
                    self.shards[f"{path}.{name}".lstrip(".")] = _local_shard(one, values)
                del values


def _local_shard(parameter: ZeroParameter, values: Tensor) -> Tensor:
    """Return this rank's elements of a partitioned parameter."""
    size = parameter.partition_numel()
    start = min(size * parameter.ds_zero_partition_rank, values.numel())
    return values.reshape(-1)[start : start + size].to("cpu", torch.float32, copy=True)


def _check(module: nn.Module) -> None:
    """Raise an error before the first parameter is partitioned, on all ranks."""
    names = [name for name, one in module.named_parameters() if is_partitioned(one) and one.ds_tensor.is_meta]
    if names:
        raise ModuleError(
            f"Expected {type(module).__name__} to be partitioned after its parameters have values, got partitioned "
            f"parameters without values: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}.",
            fix="remove deepspeed.zero.Init from configure_model and init_module; the strategy partitions modules "
            "that are built there.",
        )
    check_materializable(module)
