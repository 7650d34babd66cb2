"""`patch` and `extend`: the two ways in which this layer changes classes and objects of the core by name.

Both check the name. A rename in the core would otherwise switch the change off, and nothing would say so.
"""

from __future__ import annotations

from types import ModuleType

__all__ = ["extend", "patch"]


def patch(owner: object, name: str, value: object) -> None:
    """Replace an attribute of the core.

    Args:
        owner: An object, a class or a module.
        name: An attribute that it or its class has.
        value: The replacement. An object gets it for itself: `delattr` brings back what its class has.

    Raises:
        AttributeError: There is no such attribute.
    """
    if not _defines(owner, name):
        raise AttributeError(f"{_name_of(owner)} has no attribute {name!r} that could be replaced.")
    setattr(owner, name, value)


def extend(owner: type, name: str, value: object) -> None:
    """Add a member of Lightning's to a class of the core, which does not have it.

    Raises:
        AttributeError: The class has such a member: `patch` replaces it.
    """
    if _defines(owner, name):
        raise AttributeError(f"{_name_of(owner)} has an attribute {name!r} already, which an addition would hide.")
    setattr(owner, name, value)


def _defines(owner: object, name: str) -> bool:
    # Not hasattr: `__getattr__` may answer any name, and a property may raise AttributeError before a run.
    if name in getattr(owner, "__dict__", ()):
        return True
    classes = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    return not isinstance(owner, ModuleType) and any(name in vars(cls) for cls in classes)


def _name_of(owner: object) -> str:
    return getattr(owner, "__name__", type(owner).__name__)
