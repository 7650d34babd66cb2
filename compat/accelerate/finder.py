"""Makes modules with Accelerate's paths; their names are looked up when they are first used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ...errors import nearest
from .. import absent
from .names import HOMES, MODULES, REFUSED, VERSION

if TYPE_CHECKING:
    from importlib.abc import Loader

__all__ = ["AccelerateFinder", "refuse"]


def refuse(what: str, why: str) -> NoReturn:
    """Raise the error for the use of an unsupported name of Accelerate; see `absent.refuse`."""
    absent.refuse(what, why, layer="accelerate")


class _Refused(absent.Absent):
    """Placeholders whose attributes are refused as well: programs use members of Accelerate's enumerations."""

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):  # what isinstance() and inspect look for
            raise AttributeError(name)
        refuse(f"accelerate's {cls.__name__}.{name}", cls._why)


class AccelerateFinder:
    """Finds and makes the modules; with the methods of importlib's finders and loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Accelerate; None for others."""
        if fullname not in MODULES:
            return None
        is_package = any(other.startswith(f"{fullname}.") for other in MODULES)
        return spec_from_loader(
            fullname, cast("Loader", self), origin="loopwright.compat.accelerate", is_package=is_package
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to Python."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Let the module look its names up."""

        def lookup(name: str) -> object:  # whatever the name means
            path = f"{module.__name__}.{name}"
            is_module = path in MODULES and name not in HOMES  # accelerate.utils.tqdm is both
            value = import_module(path) if is_module else resolve(module.__name__, name)
            setattr(module, name, value)
            return value

        known = sorted({*HOMES, *REFUSED})
        module.__dict__.update(__getattr__=lookup, __dir__=lambda: known, __all__=sorted(HOMES), __version__=VERSION)


def resolve(place: str, name: str) -> Any:  # Any: whatever the name means
    """Return what a name of Accelerate means here; a placeholder if it is not supported.

    Args:
        place: The module that it is imported from.
        name: The name.

    Raises:
        AttributeError: Accelerate has no such name.
    """
    if name in HOMES:
        return getattr(import_module(f"{__package__}.{HOMES[name]}"), name)
    if name in REFUSED:
        return absent.make_absent(name, place, REFUSED[name], kind=_Refused)
    if name.startswith("is_") and name.endswith("_available"):
        from .utilities import availability

        return availability(name.removeprefix("is_").removesuffix("_available"))
    raise AttributeError(f"module {place!r} has no attribute {name!r}{nearest(name, HOMES)}", name=name, obj=None)
