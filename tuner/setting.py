"""A value that a search sets: `lr`, `batch_size`, wherever the module or its data keep it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, TypeAlias

from ..errors import ConfigError, nearest
from ..messages import warn
from ..protocols import Owner

Owners: TypeAlias = tuple[Owner, ...]
# Any in this file: values of settings.


def find_setting(owners: Owners, names: tuple[str, ...], *, requested_by: str) -> tuple[str, Any]:
    """Return the first of these names that module or data module have, as attribute or hyperparameter, and its value.

    Args:
        owners: Module and data module; None for a missing one.
        names: Names to look for, in order of preference.
        requested_by: Name of the search, for the error.

    Raises:
        ConfigError: None of them exists. It is an AttributeError, too.
    """
    for name in names:
        values = [value for _, value in _places(owners, name)]
        if values:
            if any(value != values[0] for value in values[1:]):
                warn(
                    f"{requested_by}: {name} has several values, {values}, as attribute and as hyperparameter; all of "
                    "them will be set"
                )
            return name, values[0]
    known = {name for owner in owners if owner is not None for name in _names(owner)}
    hints = "".join(nearest(name, known) for name in names[:1])
    what = " or ".join(repr(name) for name in names)
    described = " nor ".join(type(owner).__name__ for owner in owners if owner is not None)
    raise MissingSetting(
        f"{requested_by} needs an attribute or hyperparameter {what}, and {described} has none{hints}.",
        fix=f"set self.{names[0]} in __init__ (or call self.save_hyperparameters()) and use it where it counts.",
    )


class MissingSetting(ConfigError, AttributeError):
    """Neither module nor data module have the value that a search is to set."""


def write_setting(owners: Owners, name: str, value: Any) -> None:
    """Set the value in all places that have it."""
    for place, _ in list(_places(owners, name)):
        if isinstance(place, MutableMapping):
            place[name] = value
        else:
            setattr(place, name, value)


def _places(owners: Owners, name: str) -> Iterator[tuple[Owner, Any]]:
    """Yield what holds the name, and its value: each owner and its hyperparameters."""
    for owner in owners:
        if owner is None:
            continue
        if hasattr(owner, name):
            yield owner, getattr(owner, name)
        hparams = getattr(owner, "hparams", None)
        if isinstance(hparams, MutableMapping):
            if name in hparams:
                yield hparams, hparams[name]
        elif hparams is not None and hasattr(hparams, name):
            yield hparams, getattr(hparams, name)


def _names(owner: Owner) -> set[str]:
    hparams = getattr(owner, "hparams", None)
    own = {name for name in vars(owner) if not name.startswith("_")}
    return own | (set(map(str, hparams)) if isinstance(hparams, MutableMapping) else set())
