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
        aten = torch.ops.aten
        if func not in (aten.detach.default, aten._to_copy.default, aten.view.default):  # a view as its own shape
            raise NotImplementedError(f"{func} of Rounded")
        return cls(args[0].codes, args[0].scale, args[0].dtype)

    def values(self) -> Tensor:
        return self.codes.to(self.dtype) * self.scale


def rounded(values: Tensor) -> Rounded:
    """Return 8-bit codes of the values."""
    scale = (
        torch.linalg.vector_norm(values, float("inf")).clamp(min=1e-12) / 127 if len(values) else values.new_ones(())
    )
    return Rounded((values / scale).round().to(torch.int8), scale, values.dtype)


class RoundedMomentum(torch.optim.Optimizer):
    """SGD with momentum in 8 bits; sharded like its parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                grad, before = one.grad, self.state[one].get("momentum")
                if hasattr(one, "to_local"):
                    from torch.distributed.tensor import DTensor

                    local = rounded(grad.to_local())
                    self.state[one]["momentum"] = DTensor.from_local(local, one.device_mesh, one.placements)
                    one.add_(grad, alpha=-group["lr"])
                    continue
                after = grad if before is None else grad + 0.9 * before.values()
                self.state[one]["momentum"] = rounded(after)
                one.add_(after, alpha=-group["lr"])
