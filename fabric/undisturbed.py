"""Passes through a module that leave no trace: contexts in evaluation mode, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .seed import isolate_rng


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation for a block, without gradients; afterwards each submodule has its mode again."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for one, mode in modes:
            one.training = mode


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """As `evaluating`; the generators of random numbers are restored, too."""
    with isolate_rng(), evaluating(module):
        yield
