"""The global batch: the number of samples per optimizer step, and the accumulation that a given number requires."""

from __future__ import annotations

import math

from ..data.combined import CombinedLoader
from ..data.move import find_batch_size
from ..data.tree import flatten_loaders, is_collection
from ..errors import ConfigError
from ..messages import counted


def micro_batch_size(loader: object) -> int | None:
    """Return the number of samples per micro-batch on one process; None if it is unknown before reading.

    This is the `batch_size` of the loader or of its batch sampler. Loaders in a collection must all have the same one.
    For a list of batches, it is the size of each batch except the last, which may be smaller.

    Args:
        loader: A DataLoader, a collection of loaders, a list of batches, or another iterable.
    """
    if isinstance(loader, CombinedLoader) or is_collection(loader):
        members = loader.flattened if isinstance(loader, CombinedLoader) else flatten_loaders(loader)
        sizes = {micro_batch_size(member) for member in members}
        return sizes.pop() if len(sizes) == 1 else None
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    if isinstance(loader, list | tuple) and loader:
        found = {find_batch_size(batch) for batch in loader[:-1]} or {find_batch_size(loader[-1])}
        return found.pop() if len(found) == 1 else None
    return None


def accumulation_steps(global_batch_size: int, micro_batch: int | None, ranks: int, *, loader: object) -> int:
    """Return the number of micro-batches in a global batch.

    Args:
        global_batch_size: Samples per optimizer step, over all ranks.
        micro_batch: Samples per micro-batch of one rank; None if unknown.
        ranks: Number of ranks that read different data.
        loader: Named in errors.

    Raises:
        ConfigError: The micro-batch size is unknown, or does not divide the global batch; the message suggests the
            nearest sizes that do.
    """
    if micro_batch is None:
        raise ConfigError(
            f"Expected a loader with a known batch size for global_batch_size={global_batch_size}, got "
            f"{_describe(loader)}.",
            fix="pass a DataLoader with batch_size=, give the loader or its batch sampler an attribute batch_size, "
            "use the same batch size for all loaders of a collection, or pass accumulate_grad_batches instead of "
            "global_batch_size.",
        )
    unit = micro_batch * ranks
    steps, rest = divmod(global_batch_size, unit)
    if not rest:
        return steps
    nearest = [str(size) for size in (steps * unit, (steps + 1) * unit) if size]
    advice = f"pass global_batch_size={' or '.join(nearest)}"
    sizes = _nearest_divisors(global_batch_size, ranks, micro_batch)
    if sizes:
        advice += f"; or keep it and use batch_size={' or '.join(map(str, sizes))} in the loader"
    raise ConfigError(
        f"Expected global_batch_size to be a multiple of {unit} ({micro_batch} samples per micro-batch x {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'}), got global_batch_size={global_batch_size}.",
        fix=f"{advice}.",
    )


def _describe(loader: object) -> str:
    if isinstance(loader, CombinedLoader) or is_collection(loader):
        members = loader.flattened if isinstance(loader, CombinedLoader) else flatten_loaders(loader)
        sizes = [micro_batch_size(member) for member in members]
        return f"a collection of loaders with the batch sizes {', '.join(str(size) for size in sizes)}"
    sampler = getattr(loader, "batch_sampler", None)
    within = f" with the batch sampler {type(sampler).__name__}" if sampler is not None else ""
    return f"{type(loader).__name__}{within}"


def _nearest_divisors(global_batch_size: int, ranks: int, micro_batch: int) -> list[int]:
    """Return the nearest smaller and larger batch sizes that divide the global batch on this number of ranks."""
    if global_batch_size % ranks:
        return []
    share = global_batch_size // ranks
    divisors = {d for low in range(1, math.isqrt(share) + 1) if not share % low for d in (low, share // low)}
    below = [d for d in divisors if d < micro_batch]
    above = [d for d in divisors if d > micro_batch]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def describe_global_batch(micro_batch: int | None, accumulate: int, ranks: int) -> str:
    """Return one line: micro-batch x accumulation x ranks = global batch, as far as known."""
    micro = "micro-batches of unknown size" if micro_batch is None else counted(micro_batch, "sample")
    total = accumulate * ranks
    whole = counted(total, "micro-batch") if micro_batch is None else counted(micro_batch * total, "sample")
    accumulated = counted(accumulate, "micro-batch")
    return f"global batch: {micro} x {accumulated} x {counted(ranks, 'rank')} = {whole} per step"
