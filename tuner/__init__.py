"""The tuner: searches for the batch size and the learning rate by trial runs, and plots of schedules.

Each trial is a separate run with a copy of the module, and leaves no trace.
"""

from __future__ import annotations

from .batch_size import BatchSize
from .lr_curve import LearningRateCurve
from .schedule_preview import SchedulePreview, preview_schedule
from .tuner import Tuner

__all__ = ["BatchSize", "LearningRateCurve", "SchedulePreview", "Tuner", "preview_schedule"]
