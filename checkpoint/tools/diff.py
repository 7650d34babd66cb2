"""`compare`: the differences between two checkpoints, with one tensor at a time in memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...messages import counted
from ...protocols import Advance, Tree
from ...strategies.base import plain_name
from ..plain import Untrusted
from ..tensors import flatten, is_tensor, read_tensor, size_bytes

_ORDERED = (list, tuple)
_MISSING = object()
_LONGEST = 80


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerance for differences: |a - b| <= atol + rtol * |b|. With zeros, bit for bit."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether every bit counts."""
        return self.rtol == 0 and self.atol == 0


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that differs.

    Attributes:
        path: Such as `state_dict/layer.weight`.
        kind: "only in A", "only in B", "shape", "dtype", "values" (of a tensor) or "value".
        detail: What it is, or both, in words.
        count: Elements that differ, of a tensor.
        largest: Largest absolute difference, of a tensor of numbers; NaN where one has NaN and the other not.
    """

    path: str
    kind: str
    detail: str
    count: int = 0
    largest: float = 0.0


def compare(
    first: Tree,
    second: Tree,
    tolerance: Tolerance,
    *,
    num_values: int = 3,
    advance: Advance | None = None,
) -> Iterator[Difference]:
    """Yield what differs, in the order of the first; the order of keys counts for nothing.

    Args:
        first: A tree of plain values and tensors, read or not.
        second: The other.
        tolerance: For tensors of floating point numbers, and for floats.
        num_values: How many elements of a tensor are named.
        advance: Called with the number of bytes whenever a pair of tensors was compared.
    """
    for path, value, other in _pairs(first, second, ""):
        if other is _MISSING:
            yield Difference(path, "only in A", _describe(value))
        elif value is _MISSING:
            yield Difference(path, "only in B", _describe(other))
        elif is_tensor(value) and is_tensor(other):
            yield from _compare_tensors(path, value, other, tolerance, num_values)
            if advance is not None:
                advance(size_bytes(value))
        elif is_tensor(value) or is_tensor(other) or not _same(value, other, tolerance):
            yield Difference(path, "value", f"{_describe(value)} != {_describe(other)}")


def _pairs(first: Tree, second: Tree, path: str) -> Iterator[tuple[str, object, object]]:  # nested checkpoints
    """Yield path and both values of every leaf, and of every branch that one of the two lacks."""
    if isinstance(first, dict) and isinstance(second, dict):
        ours, theirs = _plain(first), _plain(second)
    elif type(first) is type(second) and isinstance(first, _ORDERED) and isinstance(second, _ORDERED):
        ours, theirs = dict(enumerate(first)), dict(enumerate(second))
    else:
        yield path, first, second
        return
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        below = f"{path}/{key}" if path else str(key)
        if key in ours and key in theirs:
            yield from _pairs(ours[key], theirs[key], below)
        else:
            yield below, ours.get(key, _MISSING), theirs.get(key, _MISSING)


def _plain(branch: dict[Any, object]) -> dict[Any, object]:  # Any: a name or a number
    """Return a branch under the names without torch.compile, with which a load compares them."""
    plain = {plain_name(key) if isinstance(key, str) else key: value for key, value in branch.items()}
    return plain if len(plain) == len(branch) else branch


def _compare_tensors(
    path: str,
    first: Any,  # Any: Tensor or StoredTensor
    second: Any,  # Any: Tensor or StoredTensor
    tolerance: Tolerance,
    num_values: int,
) -> Iterator[Difference]:
    if first.shape != second.shape:
        yield Difference(path, "shape", f"{tuple(first.shape)} != {tuple(second.shape)}")
        return
    if first.dtype != second.dtype:
        yield Difference(path, "dtype", f"{first.dtype} != {second.dtype}".replace("torch.", ""))
        return
    a, b = read_tensor(first).contiguous(), read_tensor(second).contiguous()
    if a.is_quantized or b.is_quantized:
        a, b = a.dequantize(), b.dequantize()
    if torch.equal(_as_bytes(a), _as_bytes(b)):
        return
    differs = _differs(a, b, tolerance)
    count = int(differs.sum())
    if count:
        where = differs.nonzero()[:num_values].tolist()
        named = ", ".join(f"{tuple(index)}: {a[tuple(index)].item()} != {b[tuple(index)].item()}" for index in where)
        largest = _largest(a, b)
        text = f"{count:,} of {a.numel():,} elements differ, by at most {largest:.3g}"
        yield Difference(path, "values", f"{text}; {named}" if named else text, count, largest)


def _differs(a: Tensor, b: Tensor, tolerance: Tolerance) -> Tensor:
    """Return which elements differ, as booleans of the tensors' shape."""
    if not tolerance.is_exact and (a.is_floating_point() or a.is_complex()):
        wide = torch.complex128 if a.is_complex() else torch.float64
        return ~torch.isclose(a.to(wide), b.to(wide), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    return (_as_bytes(a) != _as_bytes(b)).view(-1, a.element_size()).any(dim=1).view(a.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _largest(a: Tensor, b: Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    distance = (a.to(wide) - b.to(wide)).abs()
    both_nan = a.to(wide).isnan() & b.to(wide).isnan()
    distance[both_nan | (a.to(wide) == b.to(wide))] = 0.0  # inf - inf is NaN
    return float(distance.max())


def _same(a: Any, b: Any, tolerance: Tolerance) -> bool:  # Any: plain values
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        if not tolerance.is_exact and math.isclose(a, b, rel_tol=0, abs_tol=tolerance.atol + tolerance.rtol * abs(b)):
            return True
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Untrusted):  # the bytes of their pickles
        return list(a.__reduce__()[4]) == list(b.__reduce__()[4])
    return bool(a == b)


def _describe(value: object) -> str:  # a plain value or a tensor
    if is_tensor(value):
        return f"tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict | list | tuple) and value:
        leaves = [leaf for _, leaf in flatten(value)]
        if any(map(is_tensor, leaves)) or len(repr(value)) > _LONGEST:
            entries = counted(len(leaves), "entry")
            return f"{type(value).__name__} of {entries}, {sum(map(is_tensor, leaves))} of them tensors"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
