"""Callbacks: the base class, and one idea per file. Made by users and by the Trainer; called by its lifecycle."""

from __future__ import annotations

from .base import Callback
from .checkpoint import Checkpoint
from .early_stopping import EarlyStopping, EarlyStoppingReason
from .ema import EMA
from .gradient_accumulation_scheduler import GradientAccumulationScheduler
from .lambda_callback import LambdaCallback
from .learning_rate_monitor import LearningRateMonitor
from .model_checkpoint import ModelCheckpoint
from .model_summary import ModelSummary
from .progress import ProgressBar, RichProgressBar, RichProgressBarTheme, TQDMProgressBar
from .rich_model_summary import RichModelSummary
from .timer import Timer

__all__ = [
    "EMA",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "EarlyStoppingReason",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "RichProgressBarTheme",
    "TQDMProgressBar",
    "Timer",
]
