"""Copies of a module with other parameters, and arguments for its forward, made from its signature."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....protocols import AnyFunction, Args, Call, Kwargs
from .styles import features, is_linear

# Any in this file: arguments of the user's modules.


def copy_with(module: nn.Module, make: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module without hooks, whose parameters and buffers are made by a function of name and tensor.

    The tensors of the module are not copied, so that they may be on the meta device, and large.
    """
    memo: dict[int, Any] = {}
    for name, one in module.named_parameters():
        memo[id(one)] = nn.Parameter(make(name, one), requires_grad=one.is_floating_point())
    for name, buffer in module.named_buffers():
        memo[id(buffer)] = make(name, buffer)
    result: nn.Module = copy.deepcopy(module, memo)
    for inner in result.modules():
        inner._forward_hooks.clear()
        inner._forward_pre_hooks.clear()
    return result.eval()


def make_arguments(module: nn.Module, device: str, dtype: torch.dtype) -> Call | None:
    """Return arguments for a module's forward: activations of shape (2, 8, width) first; None if it takes none.

    The width is the input of its first Linear layer. Other arguments without a default broadcast to any shape; masks
    are None.
    """
    first = next((one for one in module.modules() if is_linear(one)), None)
    names = [one for one in inspect.signature(module.forward).parameters.values() if one.kind not in _VARIABLE]
    if first is None or not names:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, features(first)[1], generator=generator, dtype=torch.float64).to(device, dtype)
    args: list[Tensor | None] = []
    kwargs: Kwargs = {}
    for position, one in enumerate(names):
        value: Tensor | None = (
            x.requires_grad_() if position == 0 else None if "mask" in one.name else _AnyTensor.make(device, dtype)
        )
        if position and one.default is not inspect.Parameter.empty:
            continue
        if one.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[one.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _AnyTensor(Tensor):
    """A 1 that broadcasts with anything, has any shape, and can be unpacked: cosines and sines of positions, say."""

    @classmethod
    def make(cls, device: str, dtype: torch.dtype) -> _AnyTensor:
        return torch.ones((), device=device, dtype=dtype).as_subclass(cls)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self, self))

    def __getitem__(self, key: object) -> Tensor:
        return self

    @classmethod
    def __torch_function__(
        cls, func: AnyFunction, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        tensors = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, Tensor)]
        own = next((one for one in tensors if isinstance(one, cls)), None)
        is_query = getattr(func, "__name__", "") in ("__get__", "dim", "size", "numel", "element_size")
        if own is not None and not is_query and all(isinstance(one, cls) for one in tensors):
            return own
        with torch._C.DisableTorchFunctionSubclass():
            plain = [one.as_subclass(Tensor) if isinstance(one, cls) else one for one in args]
            return func(*plain, **(kwargs or {}))
