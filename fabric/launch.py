"""How processes start. Called by `Fabric.launch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..strategies import Launcher

__all__ = ["InProcessLauncher", "Launcher"]

R = TypeVar("R")


class InProcessLauncher:
    """Run in the process that is there: for strategies with one process."""

    @property
    def is_interactive_compatible(self) -> bool:
        """True: nothing is started."""
        return True

    def launch(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call the function and return what it returns."""
        return function(*args, **kwargs)
