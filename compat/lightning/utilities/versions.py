"""Versions and packages of the environment, as programs query them: `_TORCH_GREATER_EQUAL_2_4`, `_RICH_AVAILABLE`.

Any such name has a value, whether Lightning has the name or not.
"""

from __future__ import annotations

import operator
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

__all__ = ["module_available", "package_available"]

_COMPARED = re.compile(r"_([A-Z]+?)_(GREATER_EQUAL|GREATER|LESS_EQUAL|LESS|EQUAL)_(\d+(?:_\d+)*)")
_AVAILABLE = re.compile(r"_([A-Z0-9_]+?)(?:_SIGNATURES)?_AVAILABLE")
_COMPARE = {
    "EQUAL": operator.eq, "GREATER": operator.gt, "GREATER_EQUAL": operator.ge, "LESS": operator.lt,
    "LESS_EQUAL": operator.le,
}  # fmt: skip
_MODULES = {"KINETO": "torch", "PYTORCH_XLA": "torch_xla", "XLA": "torch_xla"}


def package_available(package_name: str) -> bool:
    """Return whether a package can be imported."""
    try:
        return find_spec(package_name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def module_available(module_path: str) -> bool:
    """Return whether a module can be imported; its package is."""
    return package_available(module_path)


def __getattr__(name: str) -> bool:
    if found := _COMPARED.fullmatch(name):
        package, how, digits = found.groups()
        wanted = tuple(int(digit) for digit in digits.split("_"))
        installed = _version(package.lower())
        return installed is not None and bool(_COMPARE[how](installed[: len(wanted)], wanted))
    if name == "_KINETO_AVAILABLE":
        import torch

        return bool(torch.profiler.kineto_available())
    if found := _AVAILABLE.fullmatch(name):
        return package_available(_MODULES.get(found[1], found[1].lower()))
    if name == "_IS_WINDOWS":
        return sys.platform == "win32"
    if name == "_IS_INTERACTIVE":
        return hasattr(sys, "ps1") or bool(sys.flags.interactive)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version(package: str) -> tuple[int, ...] | None:
    if package == "python":
        return sys.version_info[:3]
    try:
        text = version(package)
    except PackageNotFoundError:
        return None
    return tuple(int(number) for number in re.findall(r"\d+", text.split("+")[0])[:3])
