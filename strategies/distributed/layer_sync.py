"""Layers that compute their statistics over the batches of all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm

from ...errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DEVICES = ("cuda", "xpu", "hpu")


class LayerSync(ABC):
    """Plugin of Trainer and Fabric that replaces layers by layers that communicate, and restores the user's layers."""

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Return the model with layers that communicate; called before it is moved and wrapped."""

    @abstractmethod
    def revert(self, model: nn.Module) -> nn.Module:
        """Return the model with layers that do not communicate; called after training."""


class TorchSyncBatchNorm(LayerSync):
    """Normalize with mean and variance over the batches of all ranks, by torch's SyncBatchNorm.

    torch supports it only on GPUs; strategies reject a module with such layers on another device.

    Args:
        process_group: The ranks whose batches count; None for all.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self._lw_process_group = process_group
        # The user's layers by their replacements, so that subclasses and hooks are restored.
        self._lw_originals: dict[nn.SyncBatchNorm, AnyBatchNorm] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Replace every batch norm, in place; parameters and statistics are shared with the user's layers."""
        return _replaced(model, self._lw_synchronized)

    def revert(self, model: nn.Module) -> nn.Module:
        """Restore the user's layers in place, with the current parameters and statistics."""
        return _replaced(model, self._lw_reverted)

    def _lw_synchronized(self, module: nn.Module) -> nn.Module:
        if not isinstance(module, AnyBatchNorm) or isinstance(module, nn.SyncBatchNorm):
            return module
        layer: nn.SyncBatchNorm = nn.SyncBatchNorm.convert_sync_batchnorm(module, self._lw_process_group)
        self._lw_originals[layer] = module
        return layer

    def _lw_reverted(self, module: nn.Module) -> nn.Module:
        original = self._lw_originals.pop(module, None) if isinstance(module, nn.SyncBatchNorm) else None
        if original is None:
            return module
        # The tensors may have been moved or replaced since.
        original._parameters.update(module._parameters)
        original._buffers.update(module._buffers)
        original.train(module.training)
        return original


def _replaced(module: nn.Module, exchange: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return the replacement of a module; its submodules are replaced in place."""
    new = exchange(module)
    if new is not module:
        return new
    for name, child in list(module._modules.items()):
        if child is not None:
            replaced = _replaced(child, exchange)
            if replaced is not child:
                module._modules[name] = replaced
    return module


def check_sync_batchnorm(module: nn.Module, device: torch.device) -> None:
    """Check that a module with SyncBatchNorm is on a device for which torch supports it.

    Raises:
        ConfigError: It is not on such a device; the message lists the layers.
    """
    if device.type in _DEVICES:
        return
    layers = [name for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    if layers:
        raise ConfigError(
            "Expected a GPU for SyncBatchNorm, the only device that torch supports it on, got "
            f"{', '.join(layers[:5])}{' ...' if len(layers) > 5 else ''} on {device.type!r}.",
            fix="remove sync_batchnorm=True (each rank then normalizes over its local batch), pass accelerator='gpu', "
            "or use a norm that does not depend on the batch, such as GroupNorm.",
        )
