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

from ....lazy import is_core, restore_paths, show_path
from ....settings.parameters import evaluate_annotations
from ...absent import make_absent
from .homes import find_home, has_home, shown_paths
from .metadata import find
from .paths import PATHS
from .rank import UTILITIES, find_utilities

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.metadata import Distribution, DistributionFinder

__all__ = ["ROOTS", "VERSION", "LightningFinder", "resolve", "show_paths"]

# The version whose names and signatures the tables follow.
VERSION = "2.6.6"

_PACKAGE = __name__.rsplit(".", 4)[0]

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
        serves_classes_of: The package with the classes under Lightning's names: a command line finds them by name.
        parity: Names of the switches that make the program's numbers those of Lightning; see parity/switches.py.
        replacement_of: Returns what a name means by one of these switches, None where it means what it always does.
    """

    serves_classes_of = "loopwright.compat."

    def __init__(self, parity: frozenset[str] = frozenset()) -> None:
        self.parity = parity
        self.replacement_of: Callable[[str], object] = lambda name: None
        self._root = ""  # the package that the program imported first
        self._shown: dict[str, list[tuple[str, str, str]]] = {}
        self._seen: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the tables, or of the one with the rank; None for others."""
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
        """Set the names of the module, without looking them up."""
        self._root = self._root or module.__name__.partition(".")[0]
        place = _place(module.__name__)
        names = PATHS[place].split()
        more = next((name[1:] for name in names if name.startswith("*")), None)
        served = [name for name in names if not name.startswith("*")]

        def lookup(name: str) -> object:  # whatever the name means
            if name in served:
                value = resolve(place, name)
            elif f"{place}.{name}".lstrip(".") in PATHS:
                return import_module(f"{module.__name__}.{name}")
            elif place not in ROOTS.values() and not name.startswith("__") and has_home(name):
                # Lightning's modules import from each other, and programs import a name from any of them.
                value = resolve(place, name)
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

    def replace_by(self, replacement_of: Callable[[str], object]) -> None:
        """Change the meaning of names from now on; the classes that they meant lose their paths."""
        self.replacement_of = replacement_of
        restore_paths()
        self._seen.clear()

    def show_paths(self) -> None:
        """Let classes of loaded modules have Lightning's paths, by which other libraries pickle and name them."""
        loaded = tuple(sys.modules) if self._root else ()
        for name in [name for name in loaded if name.startswith(f"{_PACKAGE}.") and name not in self._seen]:
            module = sys.modules[name]
            if getattr(module.__spec__, "_initializing", False):
                continue
            self._seen.add(name)
            for found in list(vars(module).values()):
                if isinstance(found, type) and found.__module__ == name:
                    self.show_path(found)

    def show_path(self, cls: type) -> None:
        """Let a class have Lightning's path, if Lightning's name means it here."""
        self._shown = self._shown or shown_paths()
        own = cls.__name__
        for home, served, place in self._shown.get(own, ()):
            meant = self.replacement_of(served) or getattr(sys.modules.get(f"{_PACKAGE}.{home}"), own, None)
            # In a traceback, an exception has its name, which the documentation uses.
            if meant is cls and (own == served or not issubclass(cls, BaseException)):
                shown = import_module(self._path(place))
                # For inspect.getsource.
                vars(shown).setdefault("__file__", sys.modules[cls.__module__].__file__)
                show_path(cls, shown.__name__, served)
                return

    def _path(self, place: str) -> str:
        """Return the path of a module, as the program imports Lightning: as one package, or as two."""
        if self._root == "lightning":
            return f"lightning.{place}"
        tree, _, rest = place.partition(".")
        return f"{'lightning_fabric' if tree == 'fabric' else 'pytorch_lightning'}.{rest}"

    def get_code(self, fullname: str) -> CodeType:
        """Return what `python -m` runs."""
        run = RUN.get(_place(fullname))
        text = "" if run is None else f"from {__package__.rpartition('.')[0]}.{run} import main\nmain()\n"
        return compile(text, fullname, "exec")

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Yield the metadata of the packages, for programs that request one of them by name."""
        return find(getattr(context, "name", None), VERSION)


def show_paths() -> None:
    """Let classes of modules that were loaded since the last time have Lightning's paths."""
    for finder in sys.meta_path:
        if isinstance(finder, LightningFinder):
            finder.show_paths()


def _place(fullname: str) -> str:
    """Return the key of a module in the tables."""
    root, _, rest = fullname.partition(".")
    return ".".join(part for part in (ROOTS[root], rest) if part)


def resolve(place: str, name: str) -> object:  # whatever the name means
    """Return what a name of a module means here."""
    finder = next((one for one in sys.meta_path if isinstance(one, LightningFinder)), None)
    replacement = None if finder is None else finder.replacement_of(name)
    found = _find(place, name) if replacement is None else replacement
    if finder is not None:
        finder.show_paths()
        if isinstance(found, type) and is_core(found):
            finder.show_path(found)  # the module of its home may be newer than its own
    return found


def _find(place: str, name: str) -> object:  # whatever the name means
    home = find_home(place, name)
    if home.startswith("!"):
        return make_absent(name, f"lightning.{place}", home[1:])
    module, _, attribute = home.partition(":")
    package = "loopwright" if module == "" else f".{module}"
    found = getattr(import_module(package if package == _PACKAGE else f"{_PACKAGE}{package}"), attribute or name)
    if isinstance(found, type):
        _evaluate_annotations(found)
    return found


def _evaluate_annotations(found: type) -> None:
    """Replace string annotations of a constructor by the objects that they name, for libraries that read them."""
    for owner in found.__mro__[:-1]:
        constructor = vars(owner).get("__init__")
        annotations = getattr(constructor, "__annotations__", None)
        if annotations and any(isinstance(one, str) for one in annotations.values()):
            evaluate_annotations(constructor)  # type: ignore[arg-type]  # it has annotations
