"""The loggers whose default folder Lightning calls `lightning_logs`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ... import loggers

__all__ = ["CSVLogger", "TensorBoardLogger", "merge_dicts"]

DEFAULT_NAME = "lightning_logs"


class TensorBoardLogger(loggers.TensorBoardLogger):
    """`lw.TensorBoardLogger` with Lightning's default folder."""

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None = DEFAULT_NAME, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(save_dir, name, *args, **kwargs)


class CSVLogger(loggers.CSVLogger):
    """`lw.CSVLogger` with Lightning's default folder."""

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None = DEFAULT_NAME, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(save_dir, name, *args, **kwargs)


class FabricTensorBoardLogger(TensorBoardLogger):
    """The same, whose first argument Fabric calls `root_dir`."""

    def __init__(
        self, root_dir: str | os.PathLike[str], name: str | None = DEFAULT_NAME, *args: object, **kwargs: object
    ) -> None:
        super().__init__(root_dir, name, *args, **kwargs)

    @property
    def root_dir(self) -> str:
        """The folder that was given, above that of the name."""
        return self.save_dir


class FabricCSVLogger(CSVLogger):
    """The same, whose first argument Fabric calls `root_dir`."""

    def __init__(
        self, root_dir: str | os.PathLike[str], name: str | None = DEFAULT_NAME, *args: object, **kwargs: object
    ) -> None:
        super().__init__(root_dir, name, *args, **kwargs)

    @property
    def root_dir(self) -> str:
        """The folder that was given, above that of the name."""
        return self.save_dir


def merge_dicts(
    dicts: Sequence[Mapping[str, float]],
    agg_key_funcs: Mapping[str, Callable[[Sequence[float]], float]] | None = None,
    default_func: Callable[[Sequence[float]], float] | None = None,
) -> dict[str, float]:
    """Return one dict of several, with one value made of each key's values.

    Args:
        dicts: What to merge.
        agg_key_funcs: Key -> function for its values.
        default_func: For the other keys; the mean by default.
    """
    functions = agg_key_funcs or {}
    other = default_func or (lambda values: sum(values) / len(values))
    keys = dict.fromkeys(key for one in dicts for key in one)
    return {key: functions.get(key, other)([one[key] for one in dicts if key in one]) for key in keys}
