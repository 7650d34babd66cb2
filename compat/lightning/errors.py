"""Lightning's exceptions and warnings as Loopwright's own, so that `except` finds what Loopwright raises."""

from __future__ import annotations

import os
import sys
import warnings

from ... import errors
from .imports.finder import LightningFinder
from .patch import patch

__all__ = [
    "LightningDeprecationWarning",
    "MisconfigurationException",
    "PossibleUserWarning",
    "SIGTERMException",
    "disable_possible_user_warnings",
]

# Lightning raises the one class for wrong arguments and for modules that break the contract: here that is the root of
# the tree. `except` looks at the bases of what was raised, so that this has to be the class itself.
MisconfigurationException = errors.LoopwrightError
SIGTERMException = errors.StopBySignal


class _TunerExitException(Exception):
    """Ends a search of the tuner; raised by nothing here."""


class NotAttached(errors.ModuleError, AttributeError):
    """A Trainer has no module yet, for which Lightning raises an AttributeError."""


class PossibleUserWarning(UserWarning):
    """A warning that may be none."""


class LightningDeprecationWarning(DeprecationWarning):
    """Something will be taken away."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Show no `PossibleUserWarning`.

    Args:
        module: Beginning of the modules' names that may not warn; all by default.
    """
    warnings.filterwarnings("ignore", category=PossibleUserWarning, module=module)


if os.environ.get("POSSIBLE_USER_WARNINGS", "").lower() in ("0", "off"):
    disable_possible_user_warnings()


def _accept_one_argument() -> None:
    """Let `raise MisconfigurationException("what")` of programs work: Loopwright's own errors always have a fix.

    It is done to the class in place, since a subclass would not be found by `except`; errors of Loopwright are as
    before, and without `install` a fix is required. Done once, when a program asks for one of these names.
    """
    with_fix, shown = errors.LoopwrightError.__init__, errors.LoopwrightError.__str__

    def __init__(self: errors.LoopwrightError, what: str = "", *more: object, fix: str | None = None) -> None:
        if fix is None and not any(isinstance(finder, LightningFinder) for finder in sys.meta_path):
            raise TypeError(f"{type(self).__name__} needs fix=")
        with_fix(self, what, fix=fix or "")
        self.args = (what, *more)

    def __str__(self: errors.LoopwrightError) -> str:
        return shown(self) if self.fix else str(self.what)

    patch(errors.LoopwrightError, "__init__", __init__)
    patch(errors.LoopwrightError, "__str__", __str__)


_accept_one_argument()
