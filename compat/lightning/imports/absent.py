"""Names of Lightning that have no meaning here: they import, and say why they are not there when they are used."""

from __future__ import annotations

from typing import Any, NoReturn

from ....errors import ConfigError

__all__ = ["NotServed", "make_absent", "refuse"]


class NotServed(ConfigError, NotImplementedError):
    """A name of Lightning was used that has no meaning in Loopwright."""


def refuse(what: str, why: str) -> NoReturn:
    """Raise the error of a use that has no meaning here.

    Args:
        what: The name in the user's code.
        why: What there is instead, as a sentence without a capital.
    """
    raise NotServed(f"{what} is not served by loopwright.compat.lightning.", fix=f"{why}; see docs/migrating.md.")


class _Absent(type):
    """So that a class is importable, a base class and good for `isinstance`, and no more."""

    _why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:  # Any: nothing is done with them
        refuse(f"{cls.__module__}.{cls.__qualname__}", cls._why)


def make_absent(name: str, place: str, why: str) -> type:
    """Return a placeholder class for a name; making an instance, or calling it, raises `NotServed`."""
    return _Absent(name, (), {"__module__": f"lightning.{place}", "_why": why, "__doc__": f"Not served: {why}."})
