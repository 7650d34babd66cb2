"""Small functions of `accelerate.utils`: versions, packages and devices that are there, environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version, parse
from torch import nn
from tqdm import auto

from .operations import extract_model_from_parallel
from .state import PartialState

# Any in this file: arguments that are passed on.

# Names in is_..._available() that are not those of their packages.
_PACKAGES = {
    "4bit_bnb": "bitsandbytes", "8bit_bnb": "bitsandbytes", "bnb": "bitsandbytes", "lomo": "lomo_optim",
    "pippy": "torch", "torch_distributed": "torch", "torchdata_stateful_dataloader": "torchdata",
}  # fmt: skip
_DEVICES = ("cuda", "hpu", "mlu", "mps", "musa", "npu", "sdaa", "xpu")


def availability(name: str) -> Callable[..., bool]:
    """Return the function `is_..._available` for a device, a dtype or a package."""
    if name in _DEVICES:
        device = getattr(torch.backends if name == "mps" else torch, name, None)
        return lambda *args, **kwargs: device is not None and bool(device.is_available())
    if name in ("bf16", "fp16"):
        return lambda *args, **kwargs: name == "fp16" or not torch.cuda.is_available() or torch.cuda.is_bf16_supported()
    return lambda *args, **kwargs: find_spec(_PACKAGES.get(name, name)) is not None


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return whether the version of an installed package, or a version, compares as requested.

    Args:
        library_or_version: Name of a package, or a version.
        operation: "<", "<=", "==", "!=", ">=" or ">".
        requirement_version: The other version.
    """
    known = library_or_version if isinstance(library_or_version, Version) else parse(version(library_or_version))
    asked = parse(requirement_version)
    order = {"==": known == asked, "!=": known != asked, "<": known < asked, ">": known > asked}
    order |= {"<=": known <= asked, ">=": known >= asked}
    if operation not in order:
        raise ValueError(f"Expected an operation of {', '.join(order)}, got {operation!r}.")
    return order[operation]


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version compares as requested."""
    return compare_versions(parse(parse(torch.__version__).base_version), operation, version)


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether `torch.compile` made the module."""
    return type(module).__name__ == "OptimizedModule"


def is_peft_model(model: nn.Module) -> bool:
    """Return whether the model, prepared or not, is one of peft."""
    if find_spec("peft") is None:
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model), PeftModel)


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set environment variables, whose names become upper case, for the block."""
    before = dict(os.environ)
    names = {name.upper(): str(value) for name, value in kwargs.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a bar of tqdm, on local rank 0 only by default."""
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = PartialState().local_process_index != 0
    return auto.tqdm(*args, **kwargs)
