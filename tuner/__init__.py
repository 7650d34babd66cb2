"""The tuner: values that are found by trying, before or within a training, and plots that help to choose them.

Every trial is a run of its own, with a copy of the module, that leaves nothing behind.
"""

from __future__ import annotations

from .batch_size import BatchSize
from .lr_curve import LearningRateCurve
from .schedule_preview import SchedulePreview, preview_schedule
from .tuner import Tuner

__all__ = ["BatchSize", "LearningRateCurve", "SchedulePreview", "Tuner", "preview_schedule"]
