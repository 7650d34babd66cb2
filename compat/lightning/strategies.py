"""The strategies whose arguments are others in Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...strategies import ModelParallelStrategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FabricModelParallelStrategy"]

# Any in this file: arguments that are passed on.


class FabricModelParallelStrategy(ModelParallelStrategy):
    """`lw.strategies.ModelParallelStrategy`, whose first argument is the function that parallelizes in Fabric."""

    def __init__(
        self,
        parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module],
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, *args, parallelize_fn=parallelize_fn, **kwargs)
