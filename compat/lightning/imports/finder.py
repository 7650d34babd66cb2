"""Makes modules with Lightning's paths from the tables; their names are looked up when they are first used.

`install` puts one `LightningFinder` at the front of `sys.meta_path`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, cast

from .absent import make_absent
from .homes import find_home, has_home
from .metadata import find
from .paths import PATHS
from .rank import UTILITIES, find_utilities

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.metadata import Distribution, DistributionFinder

__all__ = ["ROOTS", "VERSION", "LightningFinder"]

# The version whose names and signatures the tables follow.
VERSION = "2.6.6"

# Module that is run with `python -m` -> the module here whose `main` does it.
RUN = {
    "pytorch.utilities.upgrade_checkpoint": "utilities.upgrade",
    "pytorch.utilities.consolidate_checkpoint": "utilities.consolidate",
    "fabric.utilities.consolidate_checkpoint": "utilities.consolidate",
}

# Package that a program imports -> its place in the tables.
ROOTS = {"lightning": "", "pytorch_lightning": "pytorch", "lightning_fabric": "fabric"}


class LightningFinder:
    """Finds and makes the modules, and answers `importlib.metadata.version("lightning")`.

    It has the methods of importlib's finders and loaders, without their base classes, whose import takes 5 ms.

    Attributes:
        serves_classes_of: The package of the classes that stand for Lightning's: a command line finds them by name.
        parity: Names of the switches that make the program's numbers those of Lightning; see parity/switches.py.
        replacement_of: Returns what a name means by one of these switches, None where it means what it always does.
    """

    serves_classes_of = "loopwright.compat."

    def __init__(self, parity: frozenset[str] = frozenset()) -> None:
        self.parity = parity
        self.replacement_of: Callable[[str], object] = lambda name: None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module of the tables, or the one where libraries read the rank; None for any other."""
        if fullname.split(".", 1)[0] not in ROOTS:
            return find_utilities(path) if fullname == UTILITIES else None
        place = _place(fullname)
        if place not in PATHS:
            return None
        is_package = any(other.startswith(f"{place}." if place else "") for other in PATHS if other != place)
        return spec_from_loader(
            fullname, cast("Loader", self), origin="loopwright.compat.lightning", is_package=is_package
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to Python."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names; none of them is looked up yet."""
        place = _place(module.__name__)
        names = PATHS[place].split()
        more = next((name[1:] for name in names if name.startswith("*")), None)
        served = [name for name in names if not name.startswith("*")]

        def lookup(name: str) -> object:  # whatever the name means
            if name in served:
                value = _resolve(place, name)
            elif f"{place}.{name}".lstrip(".") in PATHS:
                return import_module(f"{module.__name__}.{name}")
            elif not name.startswith("__") and has_home(name):
                # Lightning's modules import from each other, and programs take a name from where they saw it.
                value = _resolve(place, name)
            elif more is not None and not name.startswith("__"):
                value = getattr(import_module(f"{__package__.rpartition('.')[0]}.{more}"), name)
            else:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            setattr(module, name, value)
            return value

        children = {other.rpartition(".")[2] for other in PATHS if other.rpartition(".")[0] == place and other}
        module.__dict__.update(
            __getattr__=lookup,
            __dir__=lambda: sorted({*module.__dict__, *served, *children}),
            __all__=[name for name in served if not name.startswith("_")],
            __version__=VERSION,
        )

    def get_code(self, fullname: str) -> CodeType:
        """Return what `python -m` runs."""
        run = RUN.get(_place(fullname))
        text = "" if run is None else f"from {__package__.rpartition('.')[0]}.{run} import main\nmain()\n"
        return compile(text, fullname, "exec")

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Give the metadata of the packages, to programs that ask for one of them by name."""
        return find(getattr(context, "name", None), VERSION)


def _place(fullname: str) -> str:
    """Return the key of a module in the tables."""
    root, _, rest = fullname.partition(".")
    return ".".join(part for part in (ROOTS[root], rest) if part)


def _resolve(place: str, name: str) -> object:  # whatever the name means
    """Return what a name of a module means here."""
    finder = next((one for one in sys.meta_path if isinstance(one, LightningFinder)), None)
    replacement = None if finder is None else finder.replacement_of(name)
    if replacement is not None:
        return replacement
    home = find_home(place, name)
    if home.startswith("!"):
        return make_absent(name, place, home[1:])
    module, _, attribute = home.partition(":")
    package = "loopwright" if module == "" else f".{module}"
    root = sys.modules[__name__].__name__.rsplit(".", 4)[0]
    found = getattr(import_module(package if package == root else f"{root}{package}"), attribute or name)
    if isinstance(found, type):
        _evaluate_annotations(found)
    return found


def _evaluate_annotations(found: type) -> None:
    """Replace annotations of a constructor that are texts by what they mean, as libraries read them."""
    for owner in found.__mro__[:-1]:
        constructor = vars(owner).get("__init__")
        annotations = getattr(constructor, "__annotations__", None)
        if annotations and any(isinstance(one, str) for one in annotations.values()):
            from ....cli.parameters import evaluate_annotations

            evaluate_annotations(constructor)  # type: ignore[arg-type]  # it has annotations
