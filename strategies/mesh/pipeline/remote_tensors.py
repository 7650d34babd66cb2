"""Parameters and buffers of other stages: attributes whose shape and dtype can be read, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import ModuleError
from ....protocols import AnyFunction, Args, Kwargs
from ...tree import leaves

# Any in this file: arguments and results of torch's functions.

_PROPERTIES = (
    "shape", "dtype", "device", "ndim", "requires_grad", "is_meta", "layout", "is_leaf", "grad", "grad_fn", "is_cuda",
    "is_sparse", "itemsize", "nbytes", "is_quantized", "is_cpu",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "stride", "is_contiguous",
    "ndimension", "__len__", "__hash__", "get_device", "is_signed", "untyped_storage",
)  # fmt: skip
READABLE = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES] + [getattr(Tensor, name) for name in _METHODS]
)
"""Functions of torch that read what a tensor is, and none of its values."""

# Hooks that freeze a layer run on all ranks.
_ALLOWED = READABLE | {Tensor.requires_grad_, getattr(Tensor, "requires_grad").__set__}  # noqa: B009  # no bool here

_REMEDY = (
    "use a parameter only in the module that owns it; share it by assigning it to both modules (head.weight = "
    "embedding.weight), or name a smaller part of the model in Pipeline(module=...)."
)


class RemoteTensor(Tensor):
    """A tensor of another stage, on the meta device.

    Attributes:
        path: Its name in the user's module.
        stage: The stage that has it.
        remedy: What to do where a step reads it.
        is_parameter: Whether it is a parameter there.
    """

    path: str
    stage: int
    remedy: str
    is_parameter: bool = False

    @classmethod
    def of(cls, tensor: Tensor, path: str, stage: int, remedy: str = _REMEDY) -> RemoteTensor:
        """Return what stands in for a tensor."""
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        made: RemoteTensor = torch.Tensor._make_subclass(cls, empty, tensor.requires_grad)
        made.path, made.stage, made.remedy = path, stage, remedy
        made.is_parameter = isinstance(tensor, nn.Parameter)
        return made

    def with_remedy(self, remedy: str) -> RemoteTensor:
        """Return the same with another remedy."""
        made = RemoteTensor.of(self, self.path, self.stage, remedy)
        made.is_parameter = self.is_parameter
        return made

    @classmethod
    def __torch_function__(
        cls, func: AnyFunction, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Answer questions about shape and dtype; refuse to compute.

        Raises:
            ModuleError: The values are needed; names the tensor and its stage.
        """
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        one = next(value for _, value in leaves((args, kwargs)) if isinstance(value, cls))
        raise _read(one, getattr(func, "__name__", str(func)))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RemoteTensor({self.path!r}, stage={self.stage}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteTensor:
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        shape, dtype, trained = tuple(self.shape), self.dtype, self.requires_grad
        return (_rebuild, (shape, dtype, trained, self.path, self.stage, self.remedy, self.is_parameter))


def _read(one: RemoteTensor, operation: str) -> ModuleError:
    return ModuleError(
        f"this stage's part of a step read {one.path} ({operation}), which stage {one.stage} of the pipeline has.",
        fix=one.remedy,
    )


def _operator(name: str) -> Callable[..., Any]:
    def refuse(self: RemoteTensor, *others: object) -> Any:
        raise _read(self, name.strip("_"))

    return refuse


# torch's own, with a number on one side, would turn the error into one of Python, which names no parameter.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "matmul"):
    for _dunder in (f"__{_name}__", f"__r{_name}__"):
        setattr(RemoteTensor, _dunder, _operator(_dunder))


def _rebuild(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    trained: bool,
    path: str,
    stage: int,
    remedy: str,
    is_parameter: bool = False,
) -> RemoteTensor:
    empty = torch.empty(shape, dtype=dtype, device="meta")
    made = RemoteTensor.of(empty.requires_grad_(trained), path, stage, remedy)
    made.is_parameter = is_parameter
    return made
