"""Batches of few lengths: `bucket_sizes` chooses these, `BucketBatchSampler` groups samples, `pad_to_buckets` pads.

A compiled step has one graph for each length that batches have; with buckets there are as many graphs as buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Sampler, default_collate

from ..errors import ConfigError, DataError
from ..protocols import AnyBatch

_MOST_CANDIDATES = 256
Number: TypeAlias = int | float | bool
Samples: TypeAlias = list[AnyBatch]  # of a batch, as the data set returns them
Field: TypeAlias = Any  # of a sample or batch: a tensor, if it is padded
T = TypeVar("T")


def bucket_sizes(lengths: Sequence[int] | Tensor, count: int, *, multiple_of: int = 8) -> list[int]:
    """Return the bucket sizes with which samples of these lengths need the least padding.

    Args:
        lengths: Lengths of all samples, or of a representative part.
        count: Number of buckets; fewer are returned if lengths differ less.
        multiple_of: Divisor of each size: kernels are faster for multiples of 8, or of 64.

    Returns:
        Ascending sizes; the last one is at least the greatest length.

    Raises:
        ConfigError: There are no lengths, or a number is below 1.
    """
    found = sorted(map(int, lengths))
    if not found or found[0] < 0 or count < 1 or multiple_of < 1:
        raise ConfigError(
            f"Expected lengths from 0, and count and multiple_of from 1, got {len(found)} lengths, count={count} and "
            f"multiple_of={multiple_of}.",
            fix="pass for example bucket_sizes([len(text) for text in texts], 4).",
        )
    step = multiple_of
    while found[-1] // step > _MOST_CANDIDATES:  # that many sizes to choose from are enough
        step += multiple_of
    rounded = [max(step, -(-length // step) * step) for length in found]
    samples = Counter(rounded)
    sizes = sorted(samples)
    below = [0, *accumulate(samples[size] for size in sizes)]  # samples up to each size
    # least[k]: the least number of positions for samples up to size k with the buckets so far, the last one being k.
    least = [sizes[k] * below[k + 1] for k in range(len(sizes))]
    chosen = [[size] for size in sizes]
    for _ in range(min(count, len(sizes)) - 1):
        next_least, next_chosen = list(least), list(chosen)
        for k in range(len(sizes)):
            for j in range(k):
                positions = least[j] + sizes[k] * (below[k + 1] - below[j + 1])
                if positions < next_least[k]:
                    next_least[k], next_chosen[k] = positions, [*chosen[j], sizes[k]]
        least, chosen = next_least, next_chosen
    return chosen[-1]


class BucketBatchSampler(Sampler[list[int]]):
    """Batches of samples whose lengths are in one bucket, in an order that depends only on seed and epoch.

    For `DataLoader(batch_sampler=...)`. Batches are distributed over ranks; if `group` is their number, all ranks have
    batches of the same bucket at a time, and none waits for a longer one.

    Args:
        lengths: Length of each sample of the data set.
        batch_size: Samples per batch; or one number for each bucket, such as `[tokens // size for size in sizes]`.
        sizes: Greatest length of each bucket, ascending.
        shuffle: Whether samples and batches have another order in each epoch.
        seed: Seed of the order.
        drop_last: Whether to drop samples at a bucket's end that do not fill a batch. A short batch has another shape,
            for which a compiled step is compiled again.
        group: Number of consecutive batches from one bucket. Batches that do not fill a group come last.

    Raises:
        ConfigError: A sample is longer than the largest bucket, or an argument is out of range.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        batch_size: int | Sequence[int],
        sizes: Sequence[int],
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        group: int = 1,
    ) -> None:
        _check_sizes(sizes)
        batch_sizes = [batch_size] * len(sizes) if isinstance(batch_size, int) else list(batch_size)
        if len(batch_sizes) != len(sizes) or min(batch_sizes) < 1 or group < 1:
            raise ConfigError(
                f"Expected one batch size from 1 for each of {len(sizes)} buckets, and a group from 1, got "
                f"batch_size={batch_size!r} and group={group!r}.",
                fix="pass one integer, or a list as long as sizes.",
            )
        self.sizes = list(sizes)
        self.batch_sizes = batch_sizes
        self.shuffle, self.seed, self.drop_last, self.group = shuffle, seed, drop_last, group
        self._epoch = 0
        self._members: list[list[int]] = [[] for _ in sizes]
        too_long = []
        for index, length in enumerate(map(int, lengths)):
            bucket = bisect_left(self.sizes, length)
            if bucket == len(self.sizes):
                too_long.append(length)
            else:
                self._members[bucket].append(index)
        if too_long:
            raise ConfigError(
                f"Expected lengths of at most {self.sizes[-1]}, the largest of sizes={self.sizes}, got {len(too_long)} "
                f"longer samples, up to {max(too_long)}.",
                fix="add a larger size, cut long samples, or leave them out of the data set.",
            )

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch; the Trainer calls it."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        counts = zip(map(len, self._members), self.batch_sizes, strict=True)
        return sum(count // size if self.drop_last else -(-count // size) for count, size in counts)

    def __iter__(self) -> Iterator[list[int]]:
        random = torch.Generator().manual_seed((self.seed * 1_000_003 + self._epoch) % (1 << 63))
        groups: list[list[list[int]]] = []
        rest: list[list[int]] = []
        for members, size in zip(self._members, self.batch_sizes, strict=True):
            order = self._shuffled(members, random)
            full = len(order) // size
            batches = [order[at * size : (at + 1) * size] for at in range(full)]
            whole = full // self.group * self.group
            groups += [batches[at : at + self.group] for at in range(0, whole, self.group)]
            rest += batches[whole:]
            if len(order) > full * size and not self.drop_last:
                rest.append(order[full * size :])
        for batches in self._shuffled(groups, random):
            yield from batches
        yield from rest

    def _shuffled(self, items: list[T], random: torch.Generator) -> list[T]:
        if not self.shuffle:
            return items
        return [items[at] for at in torch.randperm(len(items), generator=random).tolist()]


def pad_to_buckets(
    sizes: Sequence[int],
    *,
    dim: int = 1,
    value: Number | Mapping[str, Number] | Mapping[int, Number] = 0,
    keys: Sequence[Hashable] | None = None,
    collate: Callable[[Samples], AnyBatch] | None = None,
) -> Callable[[Samples], AnyBatch]:
    """Return a `collate_fn` that pads each batch to the smallest size that holds it.

    A batch is a tensor, or a mapping, tuple or list of tensors. All tensors that have the dimension `dim` are padded to
    the same size.

    Args:
        sizes: Lengths that batches may have, ascending.
        dim: The dimension of a batch that is padded: 1 for (batch, length) and (batch, length, features).
        value: The padding value: a number, or a mapping from keys (positions in tuples) to numbers, 0 for missing keys:
            `{"labels": -100}`.
        keys: Keys, or positions, of the tensors that are padded; None: all tensors that have the dimension.
        collate: Function that collates samples of different lengths, such as a collator of transformers; None: each
            sample's tensors (or lists of numbers) are padded, then torch's `default_collate` is called.

    Raises:
        ConfigError: The sizes are not ascending numbers from 1, or `dim` is below 1.
        DataError: (by the returned function) A batch is longer than the largest size.
    """
    _check_sizes(sizes)
    if dim < 1:
        raise ConfigError(f"Expected dim from 1, got {dim}: dimension 0 counts the samples.", fix="pass dim=1.")
    values: Number | dict[Hashable, Number] = dict(value.items()) if isinstance(value, Mapping) else value
    return _PadToBuckets(list(sizes), dim, values, None if keys is None else set(keys), collate)


@dataclass
class _PadToBuckets:
    """A class, not a closure: worker processes get it by pickle."""

    sizes: list[int]
    dim: int
    value: Number | dict[Hashable, Number]
    keys: set[Hashable] | None
    collate: Callable[[Samples], AnyBatch] | None

    def __call__(self, samples: Samples) -> AnyBatch:
        if self.collate is not None:
            batch = self.collate(samples)
            return self._padded([batch], self.dim)[0]
        return default_collate(self._padded(samples, self.dim - 1))

    def _padded(self, items: Samples, dim: int) -> Samples:
        """Return batches, or samples, with their tensors padded to one size."""
        items = [_map_fields(item, self._tensor) for item in items]
        lengths: list[int] = []

        def note(key: Hashable, field: Field) -> Field:
            if self._is_padded(key, field, dim):
                lengths.append(field.shape[dim])
            return field

        for item in items:
            _map_fields(item, note)
        if not lengths:
            raise DataError(
                f"Expected a tensor with dimension {self.dim} in each batch, got none.",
                fix="pass dim= and keys= of pad_to_buckets so that they name what has different lengths.",
            )
        at = bisect_left(self.sizes, max(lengths))
        if at == len(self.sizes):
            raise DataError(
                f"Expected lengths of at most {self.sizes[-1]}, the largest of sizes={self.sizes}, got {max(lengths)}.",
                fix="add a larger size, or cut long samples.",
            )
        size = self.sizes[at]
        return [_map_fields(item, lambda key, field: self._pad(key, field, dim, size)) for item in items]

    def _tensor(self, key: Hashable, field: Field) -> Field:
        is_wanted = self.keys is None or key in self.keys
        return torch.as_tensor(field) if is_wanted and (_is_numbers(field) or hasattr(field, "__array__")) else field

    def _is_padded(self, key: Hashable, field: Field, dim: int) -> bool:
        return isinstance(field, Tensor) and field.ndim > dim and (self.keys is None or key in self.keys)

    def _pad(self, key: Hashable, field: Field, dim: int, size: int) -> Field:
        if not self._is_padded(key, field, dim) or field.shape[dim] == size:
            return field
        value = self.value.get(key, 0) if isinstance(self.value, dict) else self.value
        shape = list(field.shape)
        shape[dim] = size
        padded = field.new_full(shape, value)
        padded.narrow(dim, 0, field.shape[dim]).copy_(field)
        return padded


def _map_fields(item: AnyBatch, function: Callable[[Hashable, Field], Field]) -> AnyBatch:
    """Return a batch, or sample, with the function applied to each field; a tensor is one, with key None."""
    if isinstance(item, Mapping):
        return {key: function(key, field) for key, field in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(function(key, field) for key, field in enumerate(item)))
    if isinstance(item, tuple | list) and not _is_numbers(item):
        return type(item)(function(key, field) for key, field in enumerate(item))
    return function(None, item)


def _is_numbers(item: Field) -> bool:
    return isinstance(item, list | tuple) and bool(item) and all(isinstance(one, int | float) for one in item)


def _check_sizes(sizes: Sequence[int]) -> None:
    is_ascending = all(a < b for a, b in pairwise(sizes))
    if not sizes or sizes[0] < 1 or not is_ascending:
        raise ConfigError(
            f"Expected sizes that are ascending numbers from 1, got sizes={list(sizes)}.",
            fix="pass for example sizes=[64, 128, 256], or bucket_sizes(lengths, 4).",
        )
