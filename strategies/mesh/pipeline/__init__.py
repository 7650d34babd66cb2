"""Pipeline stages: consecutive blocks of a model on different ranks, with an unmodified `training_step`."""

from __future__ import annotations

from .options import Pipeline

__all__ = ["Pipeline"]
