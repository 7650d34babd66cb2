"""`count_tokens`: the number of tokens in a batch of a usual shape. Modules with other batches override it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..errors import ModuleError
from ..protocols import Batch


def count_tokens(batch: Batch) -> int:
    """Return the number of tokens in a batch, padding included; reads shapes only.

    It is the number of elements of the first of these: the batch itself, if it is a tensor of integers with at least
    two dimensions; its `input_ids`, if it is a mapping; its first item, if that is such a tensor.

    Raises:
        ModuleError: The batch has none of these forms.
    """
    found = batch
    if isinstance(batch, Mapping):
        found = batch.get("input_ids")
    elif isinstance(batch, list | tuple) and batch:
        found = batch[0]
    if isinstance(found, Tensor) and found.ndim >= 2 and not (found.is_floating_point() or found.is_complex()):
        return found.numel()
    shown = f"a tensor of shape {tuple(batch.shape)} and {batch.dtype}" if isinstance(batch, Tensor) else None
    raise ModuleError(
        f"max_tokens needs the number of tokens of each batch, and this batch, {shown or f'a {type(batch).__name__}'}, "
        "has neither 'input_ids' nor a tensor of integers with at least two dimensions.",
        fix="define count_tokens(self, batch) in the module: it returns an int, from the batch on the host.",
    )
