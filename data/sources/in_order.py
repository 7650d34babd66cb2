"""`in_order`: a DataLoader with `in_order=False` is read in order, so that what comes depends on no worker's speed."""

from __future__ import annotations

from typing import TypeVar

from torch.utils.data import DataLoader

from ...messages import warn
from ...protocols import Loaders
from ..tree import changed_loader


def gives_any_order(loader: Loaders) -> bool:
    """Whether this is a DataLoader whose batches come as its workers finish them."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and not getattr(loader, "in_order", True)


L = TypeVar("L")


def in_order(loader: L) -> L:
    """Return the loader; of one that yields batches in any order, a copy that yields them in order, with a warning."""
    if not gives_any_order(loader):
        return loader
    warn(
        "DataLoader(in_order=False) is read in order: as its workers finish them, batches would come in another order "
        "each time, and a resumed run would lose samples and repeat others. Leave the argument out; if samples take "
        "unequally long, more workers or a larger prefetch_factor keep them busy."
    )
    return changed_loader(loader, in_order=True)
