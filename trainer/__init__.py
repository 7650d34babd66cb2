"""The Trainer: its plan, the run, the loops, the step, and the module that users subclass."""

from __future__ import annotations

from .loop.loss import Loss
from .module import Module
from .trainer import Trainer

__all__ = ["Loss", "Module", "Trainer"]
