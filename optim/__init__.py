"""`lw.optim`: torch's optimizers, fused where the device has a fused implementation, and parameter groups by rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach

if TYPE_CHECKING:
    from .by_name import optimizer_class as optimizer_class
    from .fused import adam as adam
    from .fused import adamw as adamw
    from .fused import can_fuse as can_fuse
    from .fused import sgd as sgd
    from .groups import group_parameters as group_parameters

__all__ = ["adam", "adamw", "can_fuse", "group_parameters", "optimizer_class", "sgd"]

_HOME = {
    "adam": "fused",
    "adamw": "fused",
    "can_fuse": "fused",
    "group_parameters": "groups",
    "optimizer_class": "by_name",
    "sgd": "fused",
}

__getattr__, __dir__ = attach(__name__, _HOME)
