"""Callbacks that installed packages add to each Trainer or Fabric: their entry points name functions that make them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any  # Any: a Fabric takes any object as a callback

__all__ = ["with_external"]

_log = logging.getLogger(__name__)


def with_external(given: Any, kind: str) -> list[Any] | None:
    """Return the callbacks of a program and those of installed packages; None where there are none.

    Args:
        given: The argument `callbacks`: a callback, several, or None.
        kind: "pytorch" for those of a Trainer, "fabric" for those of a Fabric.
    """
    groups = [f"lightning.{kind}.callbacks_factory"]
    groups.append("pytorch_lightning.callbacks_factory" if kind == "pytorch" else "lightning_fabric.callbacks_factory")
    found: list[Any] = []
    for group in groups:
        for entry in entry_points(group=group):
            made = entry.load()()
            made = made if isinstance(made, list) else [made]
            if made:
                names = ", ".join(type(one).__name__ for one in made)
                _log.info("callbacks that the package of %r adds: %s", entry.name, names)
            found.extend(made)
    if not found:
        return given  # type: ignore[no-any-return]  # as it is: the Trainer checks it
    own = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    return [*own, *found]
