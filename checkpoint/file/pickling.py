"""`PICKLE`: the pickle module that torch.save writes a checkpoint with; the same bytes in less time.

torch.save asks of every object in the checkpoint whether it is a storage: two Python calls each, and a checkpoint has
about twenty objects per tensor. Here objects of plain types are not asked about. And a tensor describes itself in
twelve Python calls that exclude special kinds; ordinary tensors are described here.
"""

from __future__ import annotations

import copyreg
import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.storage import TypedStorage

_PROTOCOL = 2
_rebuild = torch._utils._rebuild_tensor_v2

# Exact types; no storage has one of them.
_NO_STORAGE = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, bytearray, tuple, list, set, dict, OrderedDict, type,
        FunctionType, BuiltinFunctionType, Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device,
    }
)  # fmt: skip


# Others are described by another function, or as what torch decides.
_ORDINARY = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64,
    }
)  # fmt: skip


def _describe(tensor: Tensor) -> Any:  # Any: what `__reduce_ex__` returns
    """Return what `Tensor.__reduce_ex__` returns."""
    is_ordinary = (
        tensor.dtype in _ORDINARY
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.__dict__ or tensor._backward_hooks or tensor.is_neg() or tensor.is_nested)
    )
    if not is_ordinary:
        return tensor.__reduce_ex__(_PROTOCOL)
    storage = TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
    size, stride = tuple(tensor.size()), tensor.stride()
    return _rebuild, (storage, tensor.storage_offset(), size, stride, tensor.requires_grad, OrderedDict())


def _dispatch_table() -> dict[Any, Any]:  # Any: as in copyreg
    """Return how objects are described by type: tensors as above, if torch describes an ordinary one in this way."""
    example = torch.zeros(2, 3)[1:]
    theirs, ours = example.__reduce_ex__(_PROTOCOL), _describe(example)
    (one, *described), (other, *expected) = ours[1], theirs[1]
    is_same = (ours[0], described) == (theirs[0], expected) and type(one) is type(other) and one.dtype == other.dtype
    return {**copyreg.dispatch_table, **({Tensor: _describe} if is_same else {})}


class _Pickler:
    """Stands for `pickle.Pickler` as the base of the pickler that torch.save defines.

    Args:
        file: Gets the pickle.
        protocol: Protocol of pickle.
    """

    def __init__(self, file: IO[bytes], protocol: int | None = None) -> None:
        self._file = file
        self._protocol = protocol

    def persistent_id(self, obj: object) -> Any:  # Any: what pickle can write
        """Return what replaces an object in the pickle; None for the object itself. torch.save overrides this."""
        return None

    def dump(self, obj: object) -> None:
        """Write an object."""
        _Pickling(self._file, self._protocol, self.persistent_id).dump(obj)


class _Pickling(pickle.Pickler):
    """Writes one object. Its class outlives it: one made per save would keep the written bytes until a collection.

    Args:
        file: Gets the pickle.
        protocol: Protocol of pickle.
        ask: Returns what replaces an object; called where it may be a storage.
    """

    def __init__(self, file: IO[bytes], protocol: int | None, ask: Callable[[object], Any]) -> None:
        super().__init__(file, protocol)
        self._ask = ask
        self.dispatch_table = _dispatch_table()

    def persistent_id(self, obj: object) -> Any:
        """Return what replaces an object in the pickle; None for the object itself."""
        return None if type(obj) in _NO_STORAGE else self._ask(obj)


PICKLE: Any = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
"""For the argument `pickle_module` of torch.save."""
