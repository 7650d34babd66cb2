"""Choice of the source that reads a loader on one process."""

from __future__ import annotations

from typing import cast

from ...errors import ModuleError
from ...protocols import Loader, Loaders, Stateful
from ..combined import CombinedLoader
from ..distributed.iterable import ShardedIterableSource, is_sharded_iterable, of_rank
from ..distributed.shard import Shard
from ..sharded_iterable import ShardedIterable
from ..tree import is_collection
from .base import Source
from .combined import CombinedSource
from .indexed import IndexedSource, is_indexed
from .reread import RereadSource
from .stateful import StatefulSource, has_stateful_data, is_stateful


def make_source(loader: Loaders, *, is_placed: bool = False) -> Source:
    """Return the source that reads this loader.

    Args:
        loader: Anything that can be iterated.
        is_placed: Whether a `ShardedIterable` in it knows its share already; else it reads everything.

    Raises:
        ModuleError: The loader cannot be iterated.
    """
    if isinstance(loader, CombinedLoader):
        limits = loader.limits
        all_limits = limits if isinstance(limits, list) else [limits] * len(loader.flattened)
        sources = [make_source(one) for one in loader.flattened]
        return CombinedSource(loader.iterables, sources, mode=loader.mode, limits=all_limits)
    if is_collection(loader):
        return make_source(CombinedLoader(loader, mode="max_size_cycle"))
    if not is_placed and isinstance(getattr(loader, "dataset", None), ShardedIterable):
        if is_sharded_iterable(loader):
            return ShardedIterableSource(loader, Shard())
        loader = of_rank(loader, Shard())
    if is_stateful(loader):
        return StatefulSource(loader)
    if is_indexed(loader):
        return IndexedSource(loader)
    if has_stateful_data(loader):
        return StatefulSource(loader, cast(Stateful, loader.dataset))
    if isinstance(loader, (str, bytes, type)) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ModuleError(
            f"The training data is {_named(loader)}, which cannot be iterated.",
            fix="pass a DataLoader, another iterable of batches, or a list, tuple or dict of these.",
        )
    return RereadSource(cast(Loader, loader))


def _named(loader: Loaders) -> str:
    return f"the class {loader.__name__}" if isinstance(loader, type) else f"a {type(loader).__name__}"
