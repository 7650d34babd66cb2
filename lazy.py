"""Where names are: public ones that are imported when they are first used (PEP 562), and the homes of classes."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, ForwardRef

from .errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

try:
    START_FOLDER: str | None = os.getcwd()
    """Folder in which the program was started, unless it changed it before it imported Loopwright; None if unknown."""
except OSError:  # it has been removed
    START_FOLDER = None

_OTHER_NAMES = {
    "LightningDataModule": "DataModule",
    "LightningModule": "Module",
    **{name: f"strategies.{name}" for name in ("DeepSpeedStrategy", "MeshStrategy", "ModelParallelStrategy")},
}
_ROOT = f"{__name__.partition('.')[0]}."
# Class that is shown under another library's path -> its `__module__`, `__name__` and `__qualname__` before.
_SHOWN: dict[type, tuple[str, str, str]] = {}


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
            # With an `obj`, Python would add its own guess to the traceback.
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=None)
        value = getattr(import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return __getattr__, __dir__


def origin(target: Callable[..., object]) -> tuple[str, str]:
    """Return the module that defines a class or function, and its name there, whatever path it shows."""
    shown = _SHOWN.get(target) if isinstance(target, type) else None
    return (target.__module__, target.__qualname__) if shown is None else (shown[0], shown[2])


def home_of(target: Callable[..., object]) -> str:
    """Return the module that defines a class or function, whatever path it shows."""
    return origin(target)[0]


def is_core(target: Callable[..., object]) -> bool:
    """Return whether Loopwright defines a class or function; others are the user's, or another library's."""
    return home_of(target).startswith(_ROOT)


def show_path(cls: type, module: str, name: str) -> None:
    """Let `__module__` and the names of a class be another library's, so that pickles and lists of names have them.

    Args:
        cls: The class.
        module: The module in which importing programs find it.
        name: Its name there.
    """
    _SHOWN.setdefault(cls, (cls.__module__, cls.__name__, cls.__qualname__))
    for attribute, text in cls.__annotations__.items():
        if isinstance(text, str):  # it means what it means in the module that defines the class
            cls.__annotations__[attribute] = ForwardRef(text, is_argument=False, module=cls.__module__, is_class=True)
    cls.__module__, cls.__name__, cls.__qualname__ = module, name, name


def restore_paths() -> None:
    """Undo `show_path` for all classes."""
    for cls, names in _SHOWN.items():
        cls.__module__, cls.__name__, cls.__qualname__ = names
    _SHOWN.clear()
