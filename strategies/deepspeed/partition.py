"""Partitioning a module for ZeRO stage 3 that was built without memory: a submodule at a time gets its values.

DeepSpeed's own `zero.Init` around a constructor partitions each submodule at the end of its `__init__`: what the
parent's `__init__` does to its parameters afterwards is lost, and so is a state that is loaded there. Here the model is
built under `DeferredInit`, and partitioned when it is complete. A rank holds the parameters of one submodule at a time,
beside its own parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import ModuleError
from ..construction.materialize import check_materializable, materialize, update_attributes
from .fragments import is_partitioned

if TYPE_CHECKING:
    from .strategy import DeepSpeedStrategy

__all__ = ["has_values", "is_to_be_partitioned", "partition"]

# Any in this file: deepspeed has no types.


def has_values(module: nn.Module) -> bool:
    """Return whether all parameters and buffers of a module have memory."""
    return not any(one.is_meta for one in [*module.parameters(), *module.buffers()])


def is_to_be_partitioned(module: nn.Module) -> bool:
    """Return whether the engine could not partition the module itself: some parts have no values, or are partitioned.

    It takes a module with some partitioned parameters (of an earlier run) for one that is complete.
    """
    return not has_values(module) or len({is_partitioned(one) for one in module.parameters()}) == 2


def partition(strategy: DeepSpeedStrategy, module: nn.Module) -> dict[str, Tensor]:
    """Give a module its values and partition its parameters, in place. On every rank: it communicates.

    Rank 0's values count, bit for bit those of building the module in one process. Parameters that are partitioned
    already are left alone.

    Args:
        strategy: Of stage 3, connected.
        module: The same on all ranks; parts of it may have values already.

    Returns:
        By name, in float32 on the CPU, this rank's part (shape (elements,), without padding) of each parameter that was
        cast to 16 bits: for the masters. Empty in full precision.

    Raises:
        ModuleError: Parts of the model have no values and cannot be given any; names them.
    """
    from .ops import refusals
    from .setup import engine_config

    _check(module)
    dtype = strategy.precision.policy.compute_dtype
    source = _Source(module, strategy.device, None if dtype is torch.float32 else dtype)
    with refusals(strategy.where):
        # The dtype of its own checks comes from the configuration: DeepSpeed (0.19) does not listen to its argument.
        strategy.engines.deepspeed.zero.Init(
            module=source, config_dict_or_path=engine_config(strategy), remote_device=strategy.remote_device
        )
    update_attributes(module)
    return source.parts


class _Source(nn.Module):
    """In the place of the module: its parameters exist one submodule at a time, as DeepSpeed asks for them."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.__dict__["_whole"] = module  # no submodule: DeepSpeed looks at those, too
        self._device = device
        self._dtype = dtype
        self.parts: dict[str, Tensor] = {}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Give each parameter that is not partitioned; it is when the next one is asked for."""
        module: nn.Module = self.__dict__["_whole"]
        for path, owner in module.named_modules():
            materialize(owner, device=self._device, recurse=False, root=module)
            for name, one in owner._parameters.items():
                if one is None or is_partitioned(one):
                    continue
                values = one.data
                is_cast = self._dtype is not None and values.is_floating_point() and values.dtype != self._dtype
                one.data = (values.to(self._dtype) if is_cast else values).contiguous()
                yield one
                if is_cast:
                    self.parts[f"{path}.{name}".lstrip(".")] = _own_part(one, values)
                del values


def _own_part(parameter: Any, values: Tensor) -> Tensor:
    """Return this rank's elements of a parameter that is partitioned now."""
    size = parameter.partition_numel()
    start = min(size * parameter.ds_zero_partition_rank, values.numel())
    return values.reshape(-1)[start : start + size].to("cpu", torch.float32, copy=True)


def _check(module: nn.Module) -> None:
    """Raise an error before the first parameter is partitioned, on all ranks."""
    parameters: list[tuple[str, Any]] = list(module.named_parameters())
    partitioned = [name for name, one in parameters if is_partitioned(one) and one.ds_tensor.is_meta]
    if partitioned:
        raise ModuleError(
            f"{type(module).__name__} was partitioned before its parameters had values: {', '.join(partitioned[:5])}"
            f"{' ...' if len(partitioned) > 5 else ''}.",
            fix="leave deepspeed.zero.Init out of configure_model and init_module: the strategy partitions what is "
            "built there.",
        )
    check_materializable(module)
