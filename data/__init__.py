"""Training data: streams that resume exactly, combined loaders, data modules, and moving batches to devices."""

from __future__ import annotations

from .combined import CombinedLoader
from .hparams import AttributeDict, HyperParameters, save_hyperparameters
from .limit import find_length, resolve_limit
from .module import DataModule
from .move import apply_to_collection, find_batch_size, move_to_device
from .rng import capture_rng, restore_rng
from .stream import BatchStream
from .tree import is_collection

__all__ = [
    "AttributeDict",
    "BatchStream",
    "CombinedLoader",
    "DataModule",
    "HyperParameters",
    "apply_to_collection",
    "capture_rng",
    "find_batch_size",
    "find_length",
    "is_collection",
    "move_to_device",
    "resolve_limit",
    "restore_rng",
    "save_hyperparameters",
]
