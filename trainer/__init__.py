"""The Trainer: its arguments, the run, the loops, the step, and the module that users subclass.

Modules that not every run needs (several ranks, resuming, compiling, requeueing) are imported by the functions that use
them, so that `lw.Trainer` loads at most 100 modules of the package (tests/architecture/test_cost.py).
"""

from __future__ import annotations

from .loop.loss import Loss
from .module import Module
from .trainer import Trainer

__all__ = ["Loss", "Module", "Trainer"]
