"""Ranks that work on the same samples, along a tensor, context or pipeline axis: whether they read the same batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...data.distributed.fingerprint import fingerprint_batch
from ...data.move import find_tensors
from ...errors import DataError
from ...protocols import Batch

if TYPE_CHECKING:
    from ...data.stream import BatchStream
    from ...strategies import Strategy


def watch_batches(stream: BatchStream, strategy: Strategy) -> None:
    """Let the stream compare its batches with those of ranks that must read the same. On every rank.

    Nothing is done where all ranks read different data.
    """
    topology = strategy.topology
    if strategy.traits.copies_draw_alike and topology.data_size < topology.world_size:
        stream.next_batch = _ComparedBatches(stream.next_batch, strategy, type(stream.loader).__name__)


class _ComparedBatches:
    """Returns batches, and compares their running checksum over ranks at the 1st, 2nd, 4th, 8th, ... batch.

    A difference is found before twice as many batches have been read, and the number of messages grows with the
    logarithm. The content of batches on a device is not read: only their number counts.
    """

    def __init__(self, take: Callable[[], Batch], strategy: Strategy, loader: str) -> None:
        self._take, self._strategy, self._loader = take, strategy, loader
        self._count = self._checksum = 0

    def __call__(self) -> Batch:
        batch = self._take()
        if all(tensor.device.type == "cpu" for tensor in find_tensors(batch)):
            self._checksum = zlib.crc32(repr(fingerprint_batch(batch)).encode(), self._checksum)
        self._count += 1
        if not self._count & (self._count - 1):
            self._compare()
        return batch

    def _compare(self) -> None:
        """Compare the checksums.

        Raises:
            DataError: On every rank: some differ; names the ranks.
        """
        checksums: dict[int, dict[int, list[int]]] = {}
        own = (self._strategy.topology.data_rank, self._checksum)
        for rank, (data_rank, checksum) in enumerate(self._strategy.gather_objects(own)):
            checksums.setdefault(data_rank, {}).setdefault(checksum, []).append(rank)
        unlike = [list(ranks.values()) for ranks in checksums.values() if len(ranks) > 1]
        if unlike:
            listed = "; ".join(" and ".join(map(str, groups)) for groups in unlike)
            raise DataError(
                f"Expected ranks that work on the same samples to read the same batches from {self._loader}, got "
                f"different ones among the first {self._count} on ranks {listed}: their gradients would belong to no "
                "batch.",
                fix="let the data depend on the index of a sample and on torch's, NumPy's or Python's global "
                "generators, not on a generator that each process seeds for itself, on the rank, or on a clock.",
            )
