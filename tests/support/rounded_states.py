"""An optimizer whose state is a tensor subclass with inner tensors, as torchao's 8-bit ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Any in this file: torch's dispatch.


class Rounded(Tensor):
    """Codes and a scale. Torch may load it where it is registered."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Rounded:
        made: Rounded = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]
        return made

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], list[torch.dtype]]:
        return ["codes", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Rounded:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Rounded:
        aten, collectives = torch.ops.aten, torch.ops._c10d_functional
        codes, scale, dtype = args[0].codes, args[0].scale, args[0].dtype
        gathering = ("all_gather_into_tensor", "wait_tensor", "_wrap_tensor_autograd")
        known = [name for name in gathering if hasattr(collectives, name)]  # torch 2.9 does not have the last one
        if func in [getattr(collectives, name).default for name in known]:
            return cls(func(codes, *args[1:]), func(scale, *args[1:]), dtype)
        if func is aten.slice.Tensor:
            return cls(func(codes, *args[1:]), func(scale, *args[1:]), dtype)
        if func not in (aten.detach.default, aten._to_copy.default, aten.view.default):  # a view as its own shape
            raise NotImplementedError(f"{func} of Rounded")
        return cls(codes, scale, dtype)

    def values(self) -> Tensor:
        return self.codes.to(self.dtype) * _by_rows(self.scale, self.codes)


def rounded(values: Tensor) -> Rounded:
    """Return 8-bit codes of the values, with a scale for each row."""
    scale = (values.abs().flatten(1).sum(1) if values.ndim > 1 else values.abs()).clamp(min=1e-12) / 127
    return Rounded((values / _by_rows(scale, values)).round().to(torch.int8), scale, values.dtype)


def _by_rows(scale: Tensor, like: Tensor) -> Tensor:
    return scale.reshape(-1, *[1] * (like.ndim - 1))


class RoundedMomentum(torch.optim.Optimizer):
    """SGD with momentum in 8 bits; sharded like its parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                grad, before = _local(one.grad), self.state[one].get("momentum")
                after = grad if before is None else grad + 0.9 * _local(before).values()
                self.state[one]["momentum"] = _sharded(rounded(after), one)
                _local(one).add_(after, alpha=-group["lr"])


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _sharded(value: Rounded, like: Any) -> Any:
    if not hasattr(like, "to_local"):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
