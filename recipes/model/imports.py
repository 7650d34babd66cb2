"""`import_peft` and `import_bitsandbytes`: optional packages, imported without a download."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import MissingDependency

# Any in this file: modules without types.

_BITSANDBYTES = "bitsandbytes"
_KERNELS = "kernels"


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


def import_bitsandbytes() -> None:
    """Import bitsandbytes if it is installed, without its kernel from the hub.

    Version 0.50 downloads that kernel, which is code, on processors with AVX512-BF16 when it is imported beside the
    package kernels; without that package, it warns that it could not.
    """
    if _BITSANDBYTES not in sys.modules and importlib.util.find_spec(_BITSANDBYTES) is not None:
        with _without_kernels():
            importlib.import_module(_BITSANDBYTES)


@contextmanager
def _without_kernels() -> Iterator[None]:
    logger = logging.getLogger(f"{_BITSANDBYTES}.backends.cpu.ops")
    level = logger.level
    had_it, before = _KERNELS in sys.modules, sys.modules.get(_KERNELS)
    sys.modules[_KERNELS] = None  # type: ignore[assignment]  # an import of it is refused
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        del sys.modules[_KERNELS]
        if had_it:
            sys.modules[_KERNELS] = before  # type: ignore[assignment]
