"""Lightning's exceptions and warnings as Loopwright's own, so that `except` finds what Loopwright raises."""

from __future__ import annotations

import os
import warnings

from ... import errors

__all__ = [
    "LightningDeprecationWarning",
    "MisconfigurationException",
    "PossibleUserWarning",
    "SIGTERMException",
    "disable_possible_user_warnings",
]

# Lightning raises the one class for wrong arguments and for modules that break the contract, and programs raise it with
# one argument. `except` looks at the bases of what was raised, so that this has to be the root of the tree.
MisconfigurationException = errors.PlainError
SIGTERMException = errors.StopBySignal


class _TunerExitException(Exception):
    """Ends a search of the tuner; raised by nothing here."""


class NotAttached(errors.ModuleError, AttributeError):
    """A Trainer has no module yet, for which Lightning raises an AttributeError."""


class PossibleUserWarning(UserWarning):
    """A warning that may be a false positive."""


class LightningDeprecationWarning(DeprecationWarning):
    """A feature will be removed."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Show no `PossibleUserWarning`.

    Args:
        module: Beginning of the modules' names that may not warn; all by default.
    """
    warnings.filterwarnings("ignore", category=PossibleUserWarning, module=module)


if os.environ.get("POSSIBLE_USER_WARNINGS", "").lower() in ("0", "off"):
    disable_possible_user_warnings()
