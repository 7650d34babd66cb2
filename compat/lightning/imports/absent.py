"""Unsupported names of Lightning: they can be imported, and raise an error with the reason when they are used."""

from __future__ import annotations

from typing import Any, NoReturn

from ....errors import ConfigError

__all__ = ["NotServed", "make_absent", "refuse"]


class NotServed(ConfigError, NotImplementedError):
    """An unsupported name of Lightning was used."""


def refuse(what: str, why: str) -> NoReturn:
    """Raise the error for the use of an unsupported name.

    Args:
        what: The name in the user's code.
        why: The alternative, as a sentence that begins in lower case.
    """
    raise NotServed(f"{what} is not supported by loopwright.compat.lightning.", fix=f"{why}; see docs/migrating.md.")


class _Absent(type):
    """The metaclass of placeholders, which can be imported, subclassed and passed to `isinstance`, but not called."""

    _why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:  # Any: nothing is done with them
        refuse(f"{cls.__module__}.{cls.__qualname__}", cls._why)


def make_absent(name: str, place: str, why: str) -> type:
    """Return a placeholder class for a name; calling it raises `NotServed`."""
    return _Absent(name, (), {"__module__": f"lightning.{place}", "_why": why, "__doc__": f"Not served: {why}."})
