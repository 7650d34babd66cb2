"""The number of samples in a batch, where its tensors alone do not show it: the sampler's indices count them, or their
first dimension is compared with the batch size of the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import NoneType

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, default_collate

from ..lazy import home_of
from ..messages import warn
from ..protocols import Batch, Loaders
from .limit import find_length
from .move import find_batch_size, find_opaque, find_tensors
from .sources.indexed import is_indexed

_PACKAGE = __name__.rpartition(".")[0]


class BatchSizes:
    """The sizes of one loader's batches.

    If torch's own collation made a batch, the first dimension of its tensors is the batch size. A user's `collate_fn`
    may put time first, or return a list of samples; then the first dimension is something else.

    Args:
        loader: The user's loader, or the package's wrapper of it; None where nothing is known.
        count: Returns how many indices the sampler returned for the latest batch; None where that is not known.

    Attributes:
        expected: What `find_batch_size` finds in batches that need no second look; `resolve` is for others.
        count: As given.
        needs_indices: Whether the collation hides the size, and the sampler may know it.
        is_batched: Whether the sampler yields batches of indices.
    """

    def __init__(self, loader: Loaders = None, count: Callable[[], int | None] | None = None) -> None:
        while home_of(type(loader)).startswith(_PACKAGE) and hasattr(loader, "loader"):
            loader = loader.loader
        self.expected: int | None = -1  # which no batch has
        self._full: int | None = None  # samples of a full batch, if the loader has a batch size
        self._rest: int | None = None  # samples of the last batch; 0: as many, None: unknown
        self._is_certain = False
        self._are_lists = False
        self._dim = 0  # the dimension of the samples, if it is not the first
        self._has_warned = False
        self.needs_indices = False
        self.is_batched = True
        self.count: Callable[[], int | None] = NoneType  # which returns None
        if isinstance(loader, DataLoader):
            self._read(loader)
            self.needs_indices = not self._is_certain and is_indexed(loader)
            # Without automatic batching an index is a batch of unknown size, unless a sampler of batches returned it.
            self.is_batched = loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
            if self.needs_indices and count is not None:
                self.follow(count)

    def follow(self, count: Callable[[], int | None]) -> None:
        """Use the numbers of the sampler's indices from now on."""
        self.count = count
        if self._rest != 0:  # else each batch is a full one
            self.expected = -1  # each batch gets a second look

    def _read(self, loader: DataLoader[Batch]) -> None:
        sampler = loader.batch_sampler
        size = loader.batch_size if sampler is None else getattr(sampler, "batch_size", None)
        if loader.batch_size is None and sampler is None:
            return  # the data set makes full batches
        self._is_certain = loader.collate_fn is default_collate
        if self._is_certain or type(size) is not int:
            return
        self.expected = self._full = size
        if type(sampler) is BatchSampler:
            length = find_length(sampler.sampler)
            self._rest = None if length is None else 0 if sampler.drop_last else length % size

    def of(self, batch: Batch) -> int | None:
        """Return the number of samples in a batch, None if unknown."""
        found = find_batch_size(batch)
        return found if found == self.expected else self.resolve(batch, found)

    def resolve(self, batch: Batch, found: int | None) -> int | None:
        """Return the number of samples in a batch in which `find_batch_size` has found another number than expected.

        Args:
            batch: A batch of the loader.
            found: The number that was found in it.
        """
        exact = self.count()
        full = self._full if exact is None else exact
        if full is None:
            return self._without_loader(batch, found)
        if exact is not None and (found is None or found == exact):
            return exact
        if self._are_lists and isinstance(batch, list | tuple):
            return len(batch)
        if self._dim and exact is None:
            return _common_size(batch, self._dim)
        is_rest = exact is None and found is not None and found < full and self._rest in (None, found)
        if isinstance(batch, list | tuple) and len(batch) == full and (not is_rest or _are_alike(batch)):
            # Each entry is a sample, not a field: the length counts, in the last batch, too.
            self._are_lists = True
            self.expected = self.expected if exact is not None else None
            return full
        if is_rest:
            return found
        dim = next((dim for dim in (1, 2) if _common_size(batch, dim) == full), 0)
        if dim and exact is not None:
            return exact
        if dim:
            self._dim, self.expected = dim, None
        self._warn(
            f"expected batches of {full} samples, as the loader says, got {found} in the first dimension; "
            + (f"dimension {dim} counts" if dim else f"{full} count")
        )
        return full

    def warn_unknown(self, batch: Batch) -> None:
        """Warn once that a batch of objects weighs 1 in a mean, whatever it contains."""
        if find_opaque(batch):
            self._warn("the size of a batch of objects is unknown, and it weighs 1")

    def _without_loader(self, batch: Batch, found: int | None) -> int | None:
        if found is None:
            # As graphs of PyG and DGL, and TensorDict, name it.
            told = getattr(batch, "num_graphs", getattr(batch, "batch_size", None))
            if isinstance(told, tuple) and told:
                told = told[0]
            if type(told) is int:
                return told
        samples = None if found is None or self._is_certain else _list_of_samples(batch, found)
        if samples is not None:
            self._warn(
                f"a batch has a list of {len(samples)} tensors of one shape, whose first dimension says {found}; "
                f"{found} count"
            )
        self.expected = found
        return found

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"the size of batches is not certain: {what}. Means over an epoch weigh by it: pass batch_size= to "
                "self.log, or log lw.Loss(sum, weight)"
            )


def _common_size(batch: Batch, dim: int) -> int | None:
    """Return the size of a dimension on which all tensors of a batch agree; None where they do not."""
    sizes = {tensor.size(dim) if tensor.ndim > dim else None for tensor in find_tensors(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def _list_of_samples(batch: Batch, found: int) -> list[Batch] | None:
    """Return a list in the batch that may have an entry for each sample, where nothing outside of lists has a size."""
    fields = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else [batch]
    sized = [field for field in fields if next(find_tensors(field), None) is not None]
    lists = [field for field in sized if isinstance(field, list)]
    if len(lists) < len(sized):
        return None
    return next((one for one in lists if len(one) not in (0, 1, found) and _are_alike(one)), None)


def _are_alike(batch: Iterable[Batch]) -> bool:
    """Whether the entries are tensors of one shape, or trees of such: samples, rather than the fields of one batch."""
    shapes = [_shape(item) for item in batch]
    return all(shape == shapes[0] for shape in shapes)


def _shape(item: Batch) -> object:
    if isinstance(item, Tensor):
        return torch.Size(item.shape)
    if isinstance(item, dict):
        return {key: _shape(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_shape(value) for value in item]
    return type(item)
