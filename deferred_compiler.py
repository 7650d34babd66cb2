"""torch's compiler, `torch._dynamo`: imported where something is compiled, and not because training begins.

torch (2.13) imports it for the first optimizer, for its first step and for the first DistributedDataParallel: about a
second of CPU time in every process, for functions that do nothing while nothing is compiled. Until it is imported, the
functions here take its place; once it is, torch's own way is taken. They do nothing where torch has other names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_COMPILER = "torch._dynamo"
# Where torch's decorator, `torch._disable_dynamo`, keeps what it makes at the first call, which is when it imports.
_KEPT_AS = "__dynamo_disable"


def _code_within(decorator: Callable[..., Any] | None) -> object:
    """Return the code of the function that a decorator puts around another; None without the decorator."""
    return None if decorator is None else getattr(decorator(lambda: None), "__code__", None)


_DISABLES = _code_within(getattr(torch, "_disable_dynamo", None))
_SETS_GRAD = _code_within(getattr(torch_optimizer, "_use_grad_for_differentiable", None))


def is_compiler_imported() -> bool:
    """Return whether torch's compiler is imported or is being imported: code may run that it compiled."""
    return _COMPILER in sys.modules


def defer_compiler(function: Any) -> None:  # Any: a function with attributes
    """Let a function that torch excludes from compilation run as it is while there is no compilation.

    Args:
        function: A function under `torch._disable_dynamo`, perhaps under further decorators. Others stay as they are.
    """
    while function is not None and getattr(function, "__code__", None) is not _DISABLES:
        function = getattr(function, "__wrapped__", None)
    original = getattr(function, "__wrapped__", None)
    if original is None or hasattr(original, _KEPT_AS):
        return

    def run(*args: Any, **kwargs: Any) -> Any:  # Any: the function's own
        if not is_compiler_imported():
            return original(*args, **kwargs)
        if getattr(original, _KEPT_AS, None) is run:
            delattr(original, _KEPT_AS)
        return function(*args, **kwargs)  # torch excludes it now

    setattr(original, _KEPT_AS, run)


def defer_compiler_of_optimizers() -> None:
    """Let optimizers be created, saved and loaded without importing the compiler. Further calls do nothing."""
    for method in vars(Optimizer).values():
        defer_compiler(method)


def step_uncompiled(step: Any, optimizer: Optimizer, *args: object) -> None:  # Any: a function with attributes
    """Call an optimizer class's `step` without importing the compiler.

    Where torch's function that sets the mode of gradients is all that is around it, this sets it instead. Once the
    compiler is imported, `step` is called as it is, because torch's function breaks the compiler's graphs.

    Args:
        step: `step` of a class, without the wrapper for profilers and hooks.
        optimizer: The optimizer.
        args: Passed on.
    """
    if getattr(step, "__code__", None) is not _SETS_GRAD or _SETS_GRAD is None or _COMPILER in sys.modules:
        step(optimizer, *args)
        return
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(optimizer.defaults["differentiable"])
    try:
        step.__wrapped__(optimizer, *args)
    finally:
        torch.set_grad_enabled(before)


class _Unimported(ModuleType):
    """Stands for the compiler while DistributedDataParallel reads one of its settings; imports it for all others."""

    @property
    def utils(self) -> ModuleType:
        return _Utils(f"{_COMPILER}.utils")

    def __getattr__(self, name: str) -> Any:  # Any: whatever the compiler has
        return getattr(importlib.import_module(_COMPILER), name)


class _Utils(ModuleType):
    @staticmethod
    def get_optimize_ddp_mode() -> str:
        return "ddp_optimizer"  # the default; it cannot be changed without importing the compiler

    def __getattr__(self, name: str) -> Any:  # Any: whatever the compiler has
        return getattr(importlib.import_module(f"{_COMPILER}.utils"), name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let DistributedDataParallel be constructed without importing the compiler, where it is not imported."""
    if is_compiler_imported() or "_dynamo" in vars(torch):
        yield
        return
    unimported = _Unimported(_COMPILER)
    vars(torch)["_dynamo"] = unimported
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is unimported:  # an import puts the real one there
            del vars(torch)["_dynamo"]
