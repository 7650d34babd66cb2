"""Unsupported names of a framework: they can be imported; their use is an error that names the alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import ConfigError

__all__ = ["Absent", "NotServed", "make_absent", "refuse"]

# Layer -> the page that lists what differs.
_PAGES = {"lightning": "docs/migrating.md", "accelerate": "docs/from-accelerate.md"}


class NotServed(ConfigError, NotImplementedError):
    """An unsupported name of Lightning or Accelerate was used."""


def refuse(what: str, why: str, *, layer: str = "lightning") -> NoReturn:
    """Raise the error for the use of an unsupported name.

    Args:
        what: The name in the user's code.
        why: The alternative, as a sentence that begins in lower case.
        layer: Name of the framework in this folder.
    """
    raise NotServed(f"{what} is not supported by loopwright.compat.{layer}.", fix=f"{why}; see {_PAGES[layer]}.")


class Absent(type):
    """The metaclass of placeholders, which can be imported, subclassed and passed to `isinstance`, but not called."""

    _why: str
    _layer: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:  # Any: nothing is done with them
        """Refuse."""
        refuse(f"{cls.__module__}.{cls.__qualname__}", cls._why, layer=cls._layer)


def make_absent(name: str, module: str, why: str, *, kind: type[Absent] = Absent) -> type:
    """Return a placeholder class for a name; calling it raises `NotServed`.

    Args:
        name: The name.
        module: The module that it is imported from; its first part is the layer.
        why: See `refuse`.
        kind: Its metaclass.
    """
    layer = module.partition(".")[0]
    return kind(name, (), {"__module__": module, "_why": why, "_layer": layer, "__doc__": f"Not served: {why}."})
