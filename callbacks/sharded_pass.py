"""Calls of a sharded module's functions outside of the trainer's steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


def root_around(module: nn.Module) -> nn.Module | None:
    """Return FSDPStrategy's wrapper of the module; None if its parameters are not sharded. Imports nothing."""
    known = sys.modules.get(f"{__package__.rpartition('.')[0]}.strategies.fsdp.root")
    root_of = getattr(known, "root_of", None)  # without it, another thread is importing the module
    return None if root_of is None else root_of(module)


def gathered(module: nn.Module, function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls another one of the module, without gradients, while parameters are gathered.

    In a direct call, the first FSDP unit that runs would become the root, and parameters outside of all units would
    stay sharded. The returned function communicates: call it on every rank.
    """
    root = root_around(module)
    if root is None:
        return function
    from ..strategies.ddp.replica import ReplicaCall
    from ..strategies.fsdp.root import ShardedRoot, reshard

    assert isinstance(root, ShardedRoot)
    call = ReplicaCall(function, is_training=False)

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return cast(R, root(call, *args, **kwargs))
        finally:
            reshard(root)

    return run
