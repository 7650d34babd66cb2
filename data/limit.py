"""`resolve_limit`: the number of batches that `limit_*_batches` selects from a loader."""

from __future__ import annotations

import math

from ..errors import ConfigError
from ..protocols import Loaders


def find_length(loader: Loaders) -> int | None:
    """Return `len(loader)`; None if the loader does not have a length."""
    try:
        return len(loader)  # type: ignore[arg-type]  # a TypeError is an answer
    except (TypeError, NotImplementedError):
        return None


def resolve_limit(limit: int | float | None, length: int | float | None, name: str = "limit") -> int | float:
    """Return the number of batches to use.

    Args:
        limit: None or 1.0 for all; an int for a maximum number; a float from 0.0 to 1.0 for a fraction of the length,
            rounded down. 1 is one batch, 1.0 is all. A whole-number float above 1 counts as an int.
        length: Number of batches of the loader; None or infinity if unknown.
        name: Name of the argument, for errors.

    Returns:
        The number of batches; `math.inf` if all batches of a loader without a length are used.

    Raises:
        ConfigError: The limit is negative, a non-integer above 1, a fraction of an unknown length, or a fraction that
            selects no batch.
    """
    known = length is not None and length != math.inf
    everything: int | float = int(length) if known and length is not None else math.inf
    if limit is None:
        return everything
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit < math.inf:
        raise ConfigError(
            f"Expected a number of batches, got {name}={limit!r}.",
            fix=f"pass {name} as an int >= 0 (that many batches) or a float from 0.0 to 1.0 (that fraction of them).",
        )
    if isinstance(limit, float):
        if limit == 1.0:
            return everything
        if limit < 1.0:
            return _fraction(limit, length if known else None, name)
        if not limit.is_integer():
            raise ConfigError(
                f"Expected a fraction or an integer number of batches, got {name}={limit!r}.",
                fix=f"pass a float from 0.0 to 1.0, or {name}={int(limit)}.",
            )
    return min(int(limit), everything)


def _fraction(limit: float, length: int | float | None, name: str) -> int:
    if limit == 0.0:
        return 0
    if length is None:
        raise ConfigError(
            f"{name}={limit!r} is a fraction, but the loader does not say how many batches it has (it has no __len__).",
            fix=f"pass {name} as an int, 0.0 or 1.0, or give the loader a __len__.",
        )
    count = int(length * limit)
    if count == 0 and length > 0:
        raise ConfigError(
            f"{name}={limit!r} of {length} batches is less than one batch.",
            fix=f"pass {name}={1 / length!r} or more, or an int for a number of batches.",
        )
    return count
