"""Metadata of the packages that are replaced, for `importlib.metadata`, such as `version("lightning")`."""

from __future__ import annotations

from importlib.metadata import Distribution
from os import PathLike
from typing import Any

__all__ = ["find"]

# Name of the distribution -> name of its package.
_PACKAGES = {"lightning": "lightning", "pytorch-lightning": "pytorch_lightning", "lightning-fabric": "lightning_fabric"}


def find(name: str | None, version: str) -> list[Distribution]:
    """Return the distribution with this name if that package is replaced; an empty list for None.

    Args:
        name: Name of the distribution; None for all distributions.
        version: Version of these packages.
    """
    wanted = None if name is None else name.lower().replace("_", "-")
    return [_Served(known, version) for known in _PACKAGES if known == wanted]


class _Served(Distribution):
    """A distribution without files."""

    def __init__(self, name: str, version: str) -> None:
        self._name, self._version = name, version

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {self._version}\n"
        return f"{_PACKAGES[self._name]}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | PathLike[str]) -> Any:  # Any: a path-like of importlib.metadata
        raise FileNotFoundError(f"{self._name} is provided by loopwright.compat.lightning and has no files")
