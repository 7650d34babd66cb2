"""`Served`: the metaclass of classes that stand for one of the core and have Lightning's names besides."""

from __future__ import annotations

__all__ = ["Served"]


class Served(type):
    """A class whose instances are also the objects of the class of the core that it is derived from.

    A program gets objects of the core, too: from a library that is written for Loopwright, or from a Trainer. Its
    `isinstance` is then true for them; what only Lightning's class has, they do not have. Subclasses of a program are
    ordinary classes.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        """Whether it is an object of this class, or of the one in the core."""
        return super().__instancecheck__(instance) or isinstance(instance, _core_of(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Whether it is a subclass of this class, or of the one in the core."""
        return super().__subclasscheck__(subclass) or issubclass(subclass, _core_of(cls))


def _core_of(cls: type) -> type | tuple[()]:
    """Return the class that this one stands for, no class for one of a program."""
    base = cls.__base__
    return () if base is None or isinstance(base, Served) else base
