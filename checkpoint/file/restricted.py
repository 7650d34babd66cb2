"""Unpicklers that call nothing that a file names.

A pickle is a program: it names classes and functions and has them called. These readers know a short list of harmless
names. What else a pickle names is refused (`refusing`), or becomes an inert `Unknown` that remembers its name only
(`replacing`). pickle's Python version is used: its memo is a dict, so no number in a file makes it allocate memory.
"""

from __future__ import annotations

import argparse
import os
import pickle
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import IO, Any, NoReturn

import torch
from torch import nn

from .record_names import TooMuch, require_bounded

Known = Mapping[tuple[str, str], Any]  # Any: classes and functions that may be called

_STORAGES = (
    "DoubleStorage", "FloatStorage", "HalfStorage", "BFloat16Storage", "LongStorage", "IntStorage", "ShortStorage",
    "CharStorage", "ByteStorage", "BoolStorage", "ComplexDoubleStorage", "ComplexFloatStorage",
)  # fmt: skip
# BUILD sets attributes: only on these, never on a class or a function that a pickle has named.
_MAY_BE_BUILT = (OrderedDict, torch.Tensor, argparse.Namespace, types.SimpleNamespace)


class UnknownClass:
    """Stand for a class or function that a pickle names and that is not known; calling it gives an `Unknown`.

    Attributes:
        name: Its module and name.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: object, **kwargs: object) -> Unknown:
        """Return an inert object; the arguments are forgotten."""
        return Unknown(self.name)


class Unknown:
    """Stand for an object of an unknown class: takes whatever the pickle puts into it, and does nothing.

    Attributes:
        name: Module and name of its class.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None:
        """Forget a value."""

    def extend(self, values: object) -> None:
        """Forget values."""

    add = append


class _Unpickler(pickle._Unpickler):
    """Find known names, and build known objects."""

    known: Known = {}
    buildable: tuple[type, ...] = _MAY_BE_BUILT

    def find_class(self, module: str, name: str) -> Any:  # Any: as in pickle
        if (module, name) in self.known:
            return self.known[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        return self.unknown(f"{module}.{name}")

    def unknown(self, name: str) -> Any:  # Any: what stands for the class
        raise pickle.UnpicklingError(f"it names {name}, which is not among what such a file may hold")

    def get_extension(self, code: int) -> NoReturn:
        raise pickle.UnpicklingError(f"it names the extension code {code}")

    dispatch = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]  # typeshed has no fields of the Python version
        if isinstance(target, Unknown | UnknownClass):
            self.stack.pop()  # type: ignore[attr-defined]
            return
        if isinstance(target, type) or not isinstance(target, self.buildable):
            raise pickle.UnpicklingError(f"it sets attributes of {type(target).__name__}")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]

    def load_newobj(self) -> None:
        if len(self.stack) > 1 and isinstance(self.stack[-2], UnknownClass):  # type: ignore[attr-defined]
            self.stack.pop()  # type: ignore[attr-defined]
            self.stack[-1] = self.stack[-1]()  # type: ignore[attr-defined]
            return
        pickle._Unpickler.load_newobj(self)  # type: ignore[attr-defined]

    dispatch[pickle.NEWOBJ[0]] = load_newobj  # type: ignore[assignment]


def refusing(known: Known, buildable: tuple[type, ...]) -> Callable[[IO[bytes]], Any]:
    """Return a function that reads a pickle of known names only; it raises for any other.

    Args:
        known: What may be called, by module and name; dtypes are always known.
        buildable: Classes whose objects may get attributes.
    """

    class Refusing(_Unpickler):
        pass

    Refusing.known, Refusing.buildable = known, buildable
    return lambda file: Refusing(file).load()


def load_replacing(
    file: Any, *, mmap: bool, named: set[str] | None = None, known: Known | None = None
) -> object:  # Any: path or file, and whatever it holds
    """Read a file of torch.save; objects of classes that are not known come as `Unknown`. Nothing in it is executed.

    Args:
        file: Path or open file.
        mmap: Whether tensors stay on disk until they are used.
        named: Gets the names of those classes, and of functions, wherever in the file they are named.
        known: Further names that may be called, such as `WITHOUT_ATTRIBUTES`.
    """

    class Replacing(_Replacing):
        def unknown(self, name: str) -> UnknownClass:
            if named is not None:
                named.add(name)
            return UnknownClass(name)

    try:
        with open(file, "rb") if isinstance(file, str | os.PathLike) else nullcontext(file) as opened:
            require_bounded(opened)
    except TooMuch as error:
        raise pickle.UnpicklingError(str(error)) from None

    Replacing.known = {**_Replacing.known, **(known or {})}
    reader = types.SimpleNamespace(
        __name__="restricted", Unpickler=Replacing, load=lambda file, **kwargs: Replacing(file, **kwargs).load()
    )
    return torch.load(file, map_location="cpu", weights_only=False, mmap=mmap, pickle_module=reader)


class _Replacing(_Unpickler):
    """Know harmless values."""


class _Dict(dict[Any, Any]):  # Any: a mapping of another library, such as Lightning's AttributeDict
    """Keep the entries of a dict's subclass."""


def _known_values() -> Known:
    known: dict[tuple[str, str], Any] = {  # Any: classes and functions
        ("collections", "OrderedDict"): OrderedDict,
        ("collections", "Counter"): Counter,
        ("argparse", "Namespace"): argparse.Namespace,
        ("types", "SimpleNamespace"): types.SimpleNamespace,
        ("lightning.fabric.utilities.data", "AttributeDict"): _Dict,
        ("lightning_fabric.utilities.data", "AttributeDict"): _Dict,
        ("lightning.pytorch.utilities.parsing", "AttributeDict"): _Dict,
        ("pytorch_lightning.utilities.parsing", "AttributeDict"): _Dict,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch.nn.parameter", "Parameter"): nn.Parameter,
    }
    for kind in (set, complex, bytearray, frozenset):
        known["builtins", kind.__name__] = known["__builtin__", kind.__name__] = kind
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"):
        known["torch._utils", name] = getattr(torch._utils, name)
    for name in _STORAGES:
        known["torch", name] = getattr(torch, name)
    for module, name in (("torch.storage", "UntypedStorage"), ("torch.storage", "TypedStorage")):
        known[module, name] = getattr(torch.storage, name)
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
            known[module, name] = _join
    return known


def _join(*parts: object) -> str:
    return "/".join(str(part) for part in parts).replace("//", "/")


_Replacing.known = _known_values()


_PLAIN_TENSOR = UnknownClass("torch.Tensor")
_REBUILDERS = tuple(getattr(torch._utils, name) for name in ("_rebuild_tensor", "_rebuild_tensor_v2"))


def _tensor_alone(rebuild: object, kind: object, args: tuple[object, ...], state: object) -> object:  # as in pickle
    if rebuild not in _REBUILDERS or kind is not _PLAIN_TENSOR:
        raise pickle.UnpicklingError(f"it rebuilds a tensor as {getattr(kind, 'name', kind)!r}")
    return rebuild(*args)  # type: ignore[operator]  # one of the two above


def _parameter_alone(data: torch.Tensor, requires_grad: bool, hooks: object, state: object) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=requires_grad)


# Tensors and parameters with additional attributes, as DeepSpeed sets them, are read without these.
WITHOUT_ATTRIBUTES: Known = {
    ("torch", "Tensor"): _PLAIN_TENSOR,
    ("torch._tensor", "_rebuild_from_type_v2"): _tensor_alone,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter_alone,
}
