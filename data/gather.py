"""`gathering`: batches of a `TensorDataset`, read with one gather per tensor instead of a Python loop and a collation.

torch's DataLoader indexes every tensor once per sample and stacks the results. Where dataset and collation are torch's
own, `index_select` returns the same bits. Whatever was overridden is read as torch reads it.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

from ..protocols import AnyBatch, AnyDataset, Batch, Indices, StateDict
from .tree import change_loader

_GET_ITEM = TensorDataset.__getitem__  # it may be replaced later
_GET_ITEMS = Subset.__getitems__
_COLLATE = default_collate_fn_map.get(Tensor)
_SIMPLE_INDICES = frozenset((list, tuple, range))

L = TypeVar("L")


def gathering(loader: L) -> L:
    """Return a DataLoader that yields the same batches faster; the loader itself where that is not possible.

    It draws the same random numbers and is a copy: the given loader is not modified.
    """
    if not isinstance(loader, DataLoader):
        return loader
    iterates = (type(loader).__iter__, type(loader)._get_iterator)
    parts = gathering_parts(loader) if iterates == (DataLoader.__iter__, DataLoader._get_iterator) else {}
    return change_loader(copy.copy(loader), **parts) if parts else loader


def gathering_parts(loader: DataLoader[Batch], *, pins: bool = False) -> StateDict:
    """Return the attributes of a copy of the loader that gathers; empty where something was overridden.

    Args:
        loader: A DataLoader.
        pins: Whether to gather into pinned memory.
    """
    subsets: list[Subset[Batch]] = []
    dataset: AnyDataset = loader.dataset
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    is_plain = (
        loader.num_workers == 0
        and loader.batch_sampler is not None  # else the sampler gives what the data set is indexed with
        and type(dataset) is TensorDataset
        and not any(name in vars(one) for one in (dataset, *subsets) for name in ("__getitem__", "__getitems__"))
        and TensorDataset.__getitem__ is _GET_ITEM
        and Subset.__getitems__ is _GET_ITEMS
        and not hasattr(dataset, "__getitems__")
        and loader.collate_fn is default_collate
        and default_collate_fn_map.get(Tensor) is _COLLATE is collate_tensor_fn
    )
    if not is_plain:
        return {}
    pins = pins or (loader.pin_memory and torch.cuda.is_available())
    return {"dataset": GatherDataset(loader.dataset, subsets, dataset, pins=pins), "collate_fn": _as_it_is}


def pinned_parts(loader: DataLoader[Batch]) -> StateDict:
    """Return the attributes of a copy of the loader whose thread pins batches of worker processes.

    The threads of a `ThreadDataLoader` pin, too. Without workers, the main thread would have to copy each batch once
    more, which takes as long as it saves.
    """
    if loader.pin_memory or not (loader.num_workers or getattr(loader, "num_threads", 0)):
        return {}
    keeps_tuples = type(pin_memory(("",))) is tuple  # before torch 2.13 a tuple becomes a list
    return {"pin_memory": True} if keeps_tuples or loader.collate_fn is default_collate else {}


class GatherDataset:
    """A `TensorDataset`, or a `Subset` of one, that returns complete batches.

    Args:
        dataset: The user's data set.
        subsets: It and the subsets below it, outermost first; empty if it is a TensorDataset.
        tensors: The TensorDataset below all of them.
        pins: Whether batches are in pinned memory.
    """

    def __init__(
        self, dataset: AnyDataset, subsets: list[Subset[Batch]], tensors: TensorDataset, *, pins: bool = False
    ) -> None:
        self._dataset = dataset
        self._subsets = subsets
        self._tensor_dataset = tensors
        self._pins = pins
        self._known: tuple[Tensor, ...] = ()
        self._can_gather = False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":  # a copy asks before there is anything to ask
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: Indices) -> AnyBatch:
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> AnyBatch:
        """Return the batch with these samples, as `default_collate` would make it."""
        rows = indices
        for subset in self._subsets:
            if type(subset.indices) not in _SIMPLE_INDICES:
                return self._collated(indices)
            rows = [subset.indices[row] for row in rows]
        tensors = self._tensor_dataset.tensors
        if tensors is not self._known:
            self._known, self._can_gather = tensors, type(tensors) is tuple and all(map(_can_gather, tensors))
        # Of other types, an index can mean something else: True, a slice, an object with __index__.
        if not self._can_gather or type(rows) is not list or set(map(type, rows)) != {int}:
            return self._collated(indices)
        index = torch.tensor(rows)
        try:
            if self._pins:
                return [_gather_pinned(tensor, index) for tensor in tensors]
            return [tensor.index_select(0, index) for tensor in tensors]
        except (IndexError, RuntimeError):  # a negative index, or one beyond the end, whose error is torch's own
            return self._collated(indices)

    def _collated(self, indices: list[int]) -> AnyBatch:
        samples = self._dataset.__getitems__(indices) if self._subsets else [self._dataset[index] for index in indices]
        return default_collate(samples)


def _can_gather(tensor: Tensor) -> bool:
    """Return whether `index_select` gives what `torch.stack` of the rows would, in bits and strides."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.ndim > 0
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _gather_pinned(tensor: Tensor, index: Tensor) -> Tensor:
    out = _empty_pinned((len(index), *tensor.shape[1:]), tensor.dtype)
    return torch.index_select(tensor, 0, index, out=out)


def _empty_pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _as_it_is(batch: Batch) -> Batch:
    return batch
