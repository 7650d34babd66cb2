"""Fingerprints of batches, to detect processes or workers that read the same data."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ...protocols import Batch
from ..move import apply_to_collection

__all__ = ["SAME_DATA", "SAME_IN_WORKERS", "fingerprint_batch", "is_same_on_all"]

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
        found.append(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
        flat = tensor.detach().reshape(-1)[: max(1, _MOST_BYTES // max(1, tensor.element_size()))]
        found.append(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        return tensor

    apply_to_collection(batch, Tensor, see)
    return zlib.crc32(b"".join(found)) if found else None


def is_same_on_all(fingerprints: Sequence[int | None]) -> bool:
    """Return whether all ranks saw the same values, from what `fingerprint_batch` returned on each."""
    return len(fingerprints) > 1 and fingerprints[0] is not None and len(set(fingerprints)) == 1
