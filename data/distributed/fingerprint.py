"""Fingerprints of batches and data sets, to detect processes or workers that read the same data, or other data."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ...protocols import AnyDataset, Batch, Tree
from ...strategies.distributed.digest import unwrapped
from ..move import apply_to_collection

_MOST_BYTES = 1 << 16

SAME_DATA = (
    "All processes read the same first batch: %s yields all of the data in each of them, so every sample is trained on "
    "once per process. To split it over ranks and workers, wrap the data set: "
    "DataLoader(lw.ShardedIterable(dataset), ...)."
)

SAME_IN_WORKERS = (
    "The %d workers of %s read the same data: each of them yields all of %s, so every sample comes %d times. "
    "To split it over the workers, wrap the data set: DataLoader(lw.ShardedIterable(dataset), ...); or pass "
    "num_workers=0 or 1."
)


def fingerprint_batch(batch: Batch) -> int | None:
    """Return a checksum over the tensors and arrays of a batch, of at most 64 KiB of each; None if it has none.

    Waits for the device if the batch is on one.
    """
    found: list[bytes] = []

    def see(tensor: Tensor) -> Tensor:
        for part in strided_parts(tensor.detach()):
            found.append(repr((str(part.dtype), tuple(part.shape))).encode())
            flat = part.reshape(-1)[: max(1, _MOST_BYTES // max(1, part.element_size()))]
            has_bits = flat.numel() and not flat.is_meta
            found.append(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if has_bits else b"")
        return tensor

    apply_to_collection(batch, Tensor, see)
    return zlib.crc32(b"".join(found)) if found else None


def strided_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Return the strided tensors that hold the bits of a tensor on this rank: of shards, nested and sparse ones."""
    for one in unwrapped(tensor):
        if one.is_nested:
            yield from (part for inner in one.unbind() for part in strided_parts(inner))
        elif one.layout is torch.strided:
            yield one.resolve_conj().resolve_neg()
        elif one.is_mkldnn:
            yield one.to_dense()
        else:
            sparse = one.to_sparse_coo().coalesce()
            yield from (sparse.indices(), sparse.values())


def is_same_on_all(fingerprints: Sequence[int | None]) -> bool:
    """Return whether all ranks saw the same values, from what `fingerprint_batch` returned on each."""
    return len(fingerprints) > 1 and fingerprints[0] is not None and len(set(fingerprints)) == 1


# --- data sets -------------------------------------------------------------------------------------------------------

_NUM_LOOKED_AT = 64
_MOST_PARTS = 64
_MOST_BYTES_OF_ALL = 1 << 30
_PLAIN = (str, bytes, int, float, bool, PurePath)


def listed_in(data: AnyDataset, path: str = "dataset", depth: int = 8) -> dict[str, Any]:
    """Return the attributes of a map-style data set that have one entry per sample, by path.

    Those of nested data sets are included. Nothing is read through `__getitem__` of a data set, which may draw random
    numbers or open files.
    """
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return {}
    if type(data) in (list, tuple) or isinstance(data, Tensor):
        return {path: data}
    found: dict[str, Any] = {}
    count = len(data)
    for name, value in getattr(data, "__dict__", {}).items() if depth else ():
        here = f"{path}.{name}"
        is_list = type(value) in (list, tuple)
        if isinstance(value, Dataset):
            found.update(listed_in(value, here, depth - 1))
        elif is_list and 0 < len(value) <= _MOST_PARTS and isinstance(value[0], Dataset | Tensor):
            for number, one in enumerate(value):
                found.update(listed_in(one, f"{here}[{number}]", depth - 1))
        elif len(value) == count if is_list else getattr(value, "shape", ())[:1] == (count,):
            found[here] = value
    return found


def fingerprint_listed(values: Any) -> int | None:
    """Return a checksum over some entries of what `listed_in` returned, in their order; None if they have none."""
    count = len(values)
    entries = _entries(values, slice(0, count, max(1, count // _NUM_LOOKED_AT)))
    return None if entries is None else zlib.crc32(repr((count, entries)).encode())


def count_listed(values: Any) -> int | None:
    """Return a sum over all entries of what `listed_in` returned, which does not depend on their order.

    None if they have none, or if reading them all takes long.
    """
    if getattr(values, "nbytes", 0) > _MOST_BYTES_OF_ALL:
        return None
    entries = _entries(values, slice(None))
    return None if entries is None else sum(zlib.crc32(repr(entry).encode()) for entry in entries)


def _entries(values: Any, part: slice) -> list[object] | None:
    """Return what is the same in every process for equal entries of the part; None if there is no such thing."""
    if hasattr(values, "iloc"):  # of pandas
        values = values.iloc[part].to_numpy().tolist()
    elif isinstance(values, Tensor):
        if values.layout is not torch.strided or values.is_quantized:
            return None
        return [fingerprint_batch(row) for row in values.detach()[part]]
    elif hasattr(values, "shape"):
        if values.dtype.hasobject or not values.ndim:
            return None
        return [zlib.crc32(row.tobytes()) for row in values[part]]
    else:
        values = values[part]
    entries = [value if _is_plain(value) else fingerprint_batch(value) for value in values]
    return None if any(entry is None for entry in entries) else entries


def _is_plain(value: Tree) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    return isinstance(value, _PLAIN)
