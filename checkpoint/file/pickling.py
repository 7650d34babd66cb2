"""`PICKLE`: the pickle module that torch.save writes a checkpoint with; the same bytes in less time.

torch.save asks of every object in the checkpoint whether it is a storage: two Python calls each, and a checkpoint has
about twenty objects per tensor. Here objects of plain types are not asked about.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor, nn

__all__ = ["PICKLE"]

# Exact types; no storage has one of them.
_NO_STORAGE = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, bytearray, tuple, list, set, dict, OrderedDict, type,
        FunctionType, BuiltinFunctionType, Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device,
    }
)  # fmt: skip


class _Pickler:
    """Stands for `pickle.Pickler` as the base of the pickler that torch.save defines.

    Args:
        file: Gets the pickle.
        protocol: Of pickle.
    """

    def __init__(self, file: IO[bytes], protocol: int | None = None) -> None:
        self._file = file
        self._protocol = protocol

    def persistent_id(self, obj: object) -> Any:  # Any: what pickle can write
        """Return what stands for an object in the pickle; None for the object itself. torch.save overrides this."""
        return None

    def dump(self, obj: object) -> None:
        """Write an object."""
        _Pickling(self._file, self._protocol, self.persistent_id).dump(obj)


class _Pickling(pickle.Pickler):
    """Writes one object. Its class outlives it: one made per save would keep the written bytes until a collection.

    Args:
        file: Gets the pickle.
        protocol: Of pickle.
        ask: Returns what stands for an object; asked where it may be a storage.
    """

    def __init__(self, file: IO[bytes], protocol: int | None, ask: Callable[[object], Any]) -> None:
        super().__init__(file, protocol)
        self._ask = ask

    def persistent_id(self, obj: object) -> Any:
        """Return what stands for an object in the pickle; None for the object itself."""
        return None if type(obj) in _NO_STORAGE else self._ask(obj)


PICKLE: Any = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
"""For the argument `pickle_module` of torch.save."""
