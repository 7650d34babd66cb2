"""The tuner: searches for batch size, learning rate and faster settings by trial runs, and plots of schedules.

Each trial is a separate run with a copy of the module, and leaves no trace.
"""

from __future__ import annotations

from .batch_size import BatchSize
from .lr_curve import LearningRateCurve
from .schedule_preview import SchedulePreview, preview_schedule
from .speed_table import SpeedRow, SpeedTable
from .tuner import Tuner

__all__ = ["BatchSize", "LearningRateCurve", "SchedulePreview", "SpeedRow", "SpeedTable", "Tuner", "preview_schedule"]
