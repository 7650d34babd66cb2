"""Lightning's helpers for data: lengths, batch sizes, and conversions of collections."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from ....data import apply_to_collection
from ....data.move import find_batch_size

__all__ = [
    "DistributedSamplerWrapper",
    "UnrepeatedDistributedSampler",
    "UnrepeatedDistributedSamplerWrapper",
    "convert_tensors_to_scalars",
    "convert_to_tensors",
    "extract_batch_size",
    "has_iterable_dataset",
    "has_len",
    "has_len_all_ranks",
    "sized_len",
    "suggested_max_num_workers",
]


def sized_len(dataloader: object) -> int | None:
    """Return the length of an object, None without one."""
    try:
        return len(dataloader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def has_iterable_dataset(dataloader: object) -> bool:
    """Return whether a loader reads an IterableDataset."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def has_len(dataloader: object) -> bool:
    """Return whether a loader's length can be relied on."""
    return sized_len(dataloader) is not None and not has_iterable_dataset(dataloader)


def has_len_all_ranks(
    dataloader: object, strategy: object = None, allow_zero_length_dataloader_with_multiple_devices: bool = False
) -> bool:
    """Return whether a loader's length can be relied on."""
    return has_len(dataloader)


def extract_batch_size(batch: object) -> int:
    """Return the size of a batch.

    Raises:
        ValueError: The batch size cannot be determined from the tensors.
    """
    size = find_batch_size(batch)
    if size is None:
        raise ValueError("the batch has no tensors, or tensors that do not agree on a first dimension")
    return size


def convert_to_tensors(data: object, device: torch.device) -> object:  # a nested collection
    """Return a collection with numbers as tensors on the device, and tensors on it."""

    def convert(value: object) -> Tensor:
        return torch.as_tensor(value).to(device)

    import numpy as np

    return apply_to_collection(data, (bool, int, float, np.ndarray, Tensor), convert)


def convert_tensors_to_scalars(data: object) -> object:  # a nested collection
    """Return a collection with tensors of one element as numbers.

    Raises:
        ValueError: A tensor has more.
    """

    def convert(value: Tensor) -> object:  # a number
        if value.numel() != 1:
            raise ValueError(f"the metric of shape {tuple(value.shape)} is not a single number")
        return value.item()

    return apply_to_collection(data, Tensor, convert)


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return the number of loader workers per process for which this machine has cores.

    Raises:
        ValueError: There are no processes.
    """
    if local_world_size < 1:
        raise ValueError(f"local_world_size={local_world_size}, expected 1 or more")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)


class _Indices(Dataset[object]):
    """A sampler's indices of one pass, as a data set."""

    def __init__(self, sampler: Sampler[object]) -> None:
        self._sampler = sampler
        self._drawn: list[object] | None = None

    def reset(self) -> None:
        """Draw again at the next use."""
        self._drawn = None

    def __getitem__(self, index: Any) -> object:  # an int; a DistributedSampler of anything yields Any
        if self._drawn is None:
            self._drawn = list(self._sampler)
        return self._drawn[index]

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Distributes the samples of any sampler over ranks. Trainer and Fabric do this by themselves."""

    def __init__(self, sampler: Sampler[object], *args: Any, **kwargs: Any) -> None:  # Any: DistributedSampler's
        self._indices = _Indices(sampler)
        super().__init__(self._indices, *args, **kwargs)

    def __iter__(self) -> Iterator[object]:
        self._indices.reset()
        return (self._indices[index] for index in super().__iter__())


class UnrepeatedDistributedSampler(DistributedSampler[Any]):
    """Distributes every sample once: some ranks get one less."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: DistributedSampler's
        super().__init__(*args, **kwargs)
        size = len(self.dataset)  # type: ignore[arg-type]
        self.total_size = size
        self.num_samples = len(range(self.rank, size, self.num_replicas))

    def __iter__(self) -> Iterator[object]:
        order = list(range(self.total_size))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.total_size, generator=generator).tolist()
        return iter(order[self.rank :: self.num_replicas])


class UnrepeatedDistributedSamplerWrapper(UnrepeatedDistributedSampler):
    """Distributes every sample of any sampler once."""

    def __init__(self, sampler: Sampler[object], *args: object, **kwargs: object) -> None:
        self._indices = _Indices(sampler)
        super().__init__(self._indices, *args, **kwargs)

    def __iter__(self) -> Iterator[object]:
        self._indices.reset()
        return (self._indices[index] for index in super().__iter__())
