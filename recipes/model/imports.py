"""`import_peft`: an optional package, imported without a download."""

from __future__ import annotations

import importlib
from typing import Any

from ...errors import MissingDependency
from ...precision.quantized import import_bitsandbytes

# Any in this file: modules without types.


def import_peft(needed_for: str) -> Any:
    """Return the module peft.

    Args:
        needed_for: What it is needed for, for the error.

    Raises:
        MissingDependency: It is not installed.
    """
    import_bitsandbytes()  # peft imports it where it is installed
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise MissingDependency("peft", needed_for=needed_for, extra="recipes") from error
