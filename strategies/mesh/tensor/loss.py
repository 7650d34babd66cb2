"""The cross entropy of logits in parts: no rank holds the logits of the full vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.overrides import TorchFunctionMode

from ....protocols import AnyFunction, Args, Kwargs
from .layouts import convert

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Any in this file: functions of torch, their arguments and results.


class _Entered:
    """Whether torch's context is entered; its functions are replaced for the process."""

    is_on = False


@contextmanager
def losses_in_parts() -> Iterator[None]:
    """Return torch's `loss_parallel` as a context that may be entered within itself, and is left after an error, too.

    In it, `cross_entropy` takes logits in parts, as a DTensor. It is for steps and for their backward passes.

    Torch's own ends with the inner one, and stays when an exception leaves it. A pipeline enters it around a window, in
    which forward and backward passes alternate, and each step enters it once more.
    """
    if _Entered.is_on:
        yield
        return
    context = loss_parallel()
    context.__enter__()
    _Entered.is_on = True
    try:
        yield
    finally:
        _Entered.is_on = False
        context.__exit__(None, None, None)


class PlainLoss(TorchFunctionMode):
    """Returns losses of DTensors as plain tensors, which the user's code adds to others and logs."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(
        self, func: AnyFunction, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is F.cross_entropy and isinstance(result, DTensor):
            return convert(result, self.mesh, Replicate(), Replicate()).clone()  # a step may return it, and no view
        return result
