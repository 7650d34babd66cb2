"""The global batch: how many samples one optimizer step takes, and the accumulation that a wanted number needs."""

from __future__ import annotations

import math

from ..data.combined import CombinedLoader
from ..data.move import find_batch_size
from ..data.tree import flatten_loaders, is_collection
from ..errors import ConfigError

__all__ = ["accumulation_steps", "describe_global_batch", "micro_batch_size"]


def micro_batch_size(loader: object) -> int | None:
    """Return how many samples one process gets per micro-batch; None where that is not known before reading.

    It is the `batch_size` of the loader, or of its batch sampler. Loaders that are read side by side or one after the
    other must have the same one, which then is that of their micro-batch. Of a list of batches it is the size of each
    batch but the last, which may be smaller.

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
    """Return how many micro-batches make a global batch.

    Args:
        global_batch_size: Samples per optimizer step, over all ranks.
        micro_batch: Samples per micro-batch of one rank; None if unknown.
        ranks: How many ranks read different data.
        loader: Named in errors.

    Raises:
        ConfigError: The micro-batch is not known, or it does not divide; names all numbers and the nearest that do.
    """
    if micro_batch is None:
        raise ConfigError(
            f"global_batch_size={global_batch_size} needs the number of samples in a micro-batch, and "
            f"{_describe(loader)} does not say it.",
            fix="pass a DataLoader with batch_size=, give the loader or its batch sampler an attribute batch_size, let "
            "all loaders of a collection have the same one; or pass accumulate_grad_batches in the place of "
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
        f"global_batch_size={global_batch_size} is not a multiple of {micro_batch} samples per micro-batch x {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'} = {unit} samples.",
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
    """Return the nearest batch sizes, below and above, with which this number of ranks can make the global batch."""
    if global_batch_size % ranks:
        return []
    share = global_batch_size // ranks
    divisors = {d for low in range(1, math.isqrt(share) + 1) if not share % low for d in (low, share // low)}
    below = [d for d in divisors if d < micro_batch]
    above = [d for d in divisors if d > micro_batch]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def describe_global_batch(micro_batch: int | None, accumulate: int, ranks: int) -> str:
    """Return one line: micro-batch x accumulation x ranks = global batch, as far as it is known."""
    micro = "micro-batches of a size that the loader does not say" if micro_batch is None else _count(micro_batch)
    total = accumulate * ranks
    whole = f"{total} micro-batch{'es' if total > 1 else ''}" if micro_batch is None else _count(micro_batch * total)
    accumulated = f"{accumulate} micro-batch{'es' if accumulate > 1 else ''}"
    return f"global batch: {micro} x {accumulated} x {ranks} rank{'s' if ranks > 1 else ''} = {whole} per step"


def _count(samples: int) -> str:
    return f"{samples} sample{'s' if samples > 1 else ''}"
