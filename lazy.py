"""Public names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["attach"]

_OTHER_NAMES = {"LightningDataModule": "DataModule", "LightningModule": "Module"}


def attach(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:  # Any: the type is that of the requested name
    """Return `__getattr__` and `__dir__` of a package whose names are imported on first use.

    Submodules of the package are imported in the same way. Static analysis reads the imports under `TYPE_CHECKING`; a
    test compares them with `homes`.

    Args:
        package: The package's `__name__`.
        homes: Public name -> the module that defines it, relative to the package.
    """

    def __getattr__(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            try:
                return import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
            hint = f" (did you mean {_OTHER_NAMES[name]!r}?)" if name in _OTHER_NAMES else nearest(name, homes)
            # With an `obj`, Python would add a guess of its own to the traceback.
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=None)
        value = getattr(import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return __getattr__, __dir__
