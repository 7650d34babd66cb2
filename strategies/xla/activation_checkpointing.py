"""Activation checkpointing on an XLA device.

torch's own checkpoint does not restore XLA's random numbers, and XLA's compiler would merge the two equal computations
and keep the first result. torch_xla's checkpoint puts a barrier between them.
"""

from __future__ import annotations

from typing import Any

import torch

from ...accelerators.xla import import_xla
from ...protocols import AnyFunction, AnyOutput


def checkpoint_on_xla(function: AnyFunction, *args: Any) -> AnyOutput:  # Any: arguments and result of a forward
    """Return `function(*args)`, whose activations the backward pass computes again.

    Gradients flow to tensors that are arguments themselves, and from results that are tensors or tuples of them.
    """
    checkpoint = import_xla("torch_xla.utils.checkpoint").checkpoint
    device = next((one.device for one in args if isinstance(one, torch.Tensor)), torch.device("xla", 0))
    # It connects the result with arguments that need gradients. Parameters are not arguments: without the anchor, a
    # first layer, whose input needs no gradient, would get none.
    anchor = torch.ones((), device=device, requires_grad=True)
    return checkpoint(lambda _, *values: function(*values), anchor, *args, use_reentrant=True)
