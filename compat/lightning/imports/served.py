"""`Served`: the metaclass of classes that replace one of the core and also have Lightning's names."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import TypeVar

from ....lazy import is_core
from .finder import LightningFinder

__all__ = ["Served", "serve", "served"]

C = TypeVar("C", bound=type)
P = TypeVar("P")
_SERVED: dict[type, type] = {}


class Served(ABCMeta):
    """A class whose instances are also the objects of the class of the core that it is derived from.

    It is an ABCMeta, since programs derive classes from one of these and from an abstract one.

    A program also receives objects of the core, from a library written for Loopwright or from a Trainer. `isinstance`
    is true for them, too, but they lack the members that only Lightning's class has. Subclasses of a program are
    ordinary classes.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        """Whether it is an object of this class, or of the one in the core."""
        return super().__instancecheck__(instance) or isinstance(instance, _core_of(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Whether it is a subclass of this class, or of the one in the core."""
        return super().__subclasscheck__(subclass) or issubclass(subclass, _core_of(cls))


def _core_of(cls: type) -> type | tuple[()]:
    """Return the core's class that this one replaces, no class for one of a program."""
    base = cls.__base__
    return () if base is None or isinstance(base, Served) else base


def served(core: C, members: Mapping[str, object], module: str) -> C:
    """Return a class that replaces one of the core, with these additional members.

    Args:
        core: The class.
        members: Name -> method or attribute.
        module: The module that has the result under the class's name.
    """
    made = _SERVED.get(core)
    if made is not None:
        return made  # type: ignore[return-value]
    own = {"__module__": module, "__qualname__": core.__name__, "__doc__": core.__doc__, **members}
    made = _SERVED[core] = Served(core.__name__, (core,), own)
    vars(sys.modules[module])[core.__name__] = made
    for finder in sys.meta_path:
        if isinstance(finder, LightningFinder):
            finder.show_path(made)
    return made  # type: ignore[return-value]  # a subclass of it


def serve(part: P, class_for: Callable[[type[P]], type[P]]) -> None:
    """Change the class of an object of the core to its replacement; leave objects of a program unchanged.

    Args:
        part: A strategy or precision that the core made from a name, and that one Trainer or Fabric has.
        class_for: Returns the replacement of a class of the core.
    """
    if is_core(type(part)) and not isinstance(type(part), Served):
        part.__class__ = class_for(type(part))
