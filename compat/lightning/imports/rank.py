"""The rank that Lightning sets on `rank_zero_only` of the package lightning-utilities, where libraries read it."""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader

__all__ = ["UTILITIES", "RankedLoader", "find_utilities"]

UTILITIES = "lightning_utilities.core.rank_zero"


class RankedLoader:
    """Loads the module with its loader, and sets the rank of this process on its `rank_zero_only`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the loader makes."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and assign the rank, as the import of Lightning does."""
        self._loader.exec_module(module)
        if not hasattr(module.rank_zero_only, "rank"):
            own = import_module(f"{__package__.rpartition('.')[0]}.utilities.rank_zero")
            module.rank_zero_only.rank = own.rank_zero_only.rank


def find_utilities(path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec of the module with its rank; None if the package is not installed."""
    spec = PathFinder.find_spec(UTILITIES, path)
    if spec is not None and spec.loader is not None:
        spec.loader = cast("Loader", RankedLoader(spec.loader))
    return spec
