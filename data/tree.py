"""Loaders: nested collections of them, which of these are loaders of batches themselves, and changed copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from ..protocols import AnyLoaders, AnySampler, Loaders, Tree

L = TypeVar("L")


def is_collection(loaders: Loaders) -> bool:
    """Return whether this is a list, tuple or dict *of loaders*.

    A dict always is. A list or tuple is one when at least one of its items, at any depth, is a loader beyond doubt (it
    can be iterated, and is not a container, tensor, array, string or other batch), and each of the others may be one.
    So `[loader, loader]` and `[loader, [batch, batch]]` are collections, and `[tensor, tensor]` or `[(x, y), (x, y)]`
    is one loader that yields two batches.
    """
    if isinstance(loaders, dict):
        return True
    if not isinstance(loaders, (list, tuple)):
        return False
    return all(isinstance(item, (list, tuple, dict)) or _is_loader(item) for item in loaders) and _holds_loader(loaders)


def _holds_loader(item: Loaders) -> bool:
    if type(item) is Tensor:  # what a long list of batches mostly holds
        return False
    if isinstance(item, dict):
        item = list(item.values())
    if isinstance(item, (list, tuple)):
        for value in item:  # noqa: SIM110  # `any` makes a generator for each batch
            if _holds_loader(value):
                return True
        return False
    return _is_loader(item)


def _is_loader(item: Loaders) -> bool:
    if isinstance(item, (str, bytes, Tensor, Mapping)) or hasattr(item, "__array__") or hasattr(item, "to"):
        return False
    return isinstance(item, Iterable) or hasattr(item, "__getitem__")


def map_loaders(function: Callable[[AnyLoaders], Tree], loaders: Loaders, *, is_root: bool = True) -> AnyLoaders:
    """Return the same collection with `function` applied to each loader in it."""
    if isinstance(loaders, dict):
        pairs = {key: map_loaders(function, value, is_root=False) for key, value in loaders.items()}
        if type(loaders) is dict:
            return pairs
        return type(loaders)(pairs)
    if isinstance(loaders, (list, tuple)) and (is_root or is_collection(loaders)):
        items = [map_loaders(function, item, is_root=False) for item in loaders]
        return type(loaders)(*items) if hasattr(loaders, "_fields") else type(loaders)(items)
    return function(loaders)


def are_same_loaders(first: Loaders, second: Loaders) -> bool:
    """Return whether two collections have the same loaders: the same objects, or DataLoaders over the same data set.

    Of the latter, samplers and batches must be of the same kind.
    """
    if first is second:
        return True
    firsts, seconds = flatten_loaders(first), flatten_loaders(second)
    return len(firsts) == len(seconds) and all(map(_is_same, firsts, seconds))


def _is_same(first: Loaders, second: Loaders) -> bool:
    if first is second:
        return True
    if not (isinstance(first, DataLoader) and isinstance(second, DataLoader) and first.dataset is second.dataset):
        return False
    settings = [
        (one.batch_size, one.drop_last, _kind(one.sampler), _kind(one.batch_sampler)) for one in (first, second)
    ]
    return settings[0] == settings[1]


def _kind(sampler: AnySampler) -> type | int:
    """Return the class of a sampler that knows nothing but the data set; of any other sampler, which one it is."""
    kind = type(sampler)
    return kind if kind in (RandomSampler, SequentialSampler, BatchSampler) else id(sampler)


def flatten_loaders(loaders: Loaders) -> list[Loaders]:
    """Return the loaders of a collection, in order."""
    found: list[Loaders] = []
    map_loaders(found.append, loaders)
    return found


def unflatten(loaders: Loaders, values: Iterable[Tree]) -> AnyLoaders:
    """Return the collection's shape with the values in the loaders' places, in the order of `flatten_loaders`."""
    remaining = iter(values)
    return map_loaders(lambda _: next(remaining), loaders)


def changed_loader(loader: L, **changes: Any) -> L:  # Any: values of attributes
    """Return a copy of a DataLoader with these attributes, and without the iterator of persistent workers."""
    return change_loader(copy.copy(loader), **{"_iterator": None, **changes})


def change_loader(loader: L, **changes: Any) -> L:  # Any: as above
    """Set attributes of a DataLoader, which torch does not let be assigned, and return it."""
    for name, value in changes.items():
        object.__setattr__(loader, name, value)
    return loader
