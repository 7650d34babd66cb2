"""Callbacks: the base class, and one idea per file. Made by users and by the Trainer; called by its lifecycle.

Those that the Trainer itself knows are imported with the package, the others when their name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import Callback
from .checkpoint import Checkpoint
from .early_stopping import EarlyStopping, EarlyStoppingReason
from .gradient_accumulation_scheduler import GradientAccumulationScheduler
from .model_checkpoint import ModelCheckpoint
from .timer import Timer

if TYPE_CHECKING:
    from .ema import EMA
    from .lambda_callback import LambdaCallback
    from .learning_rate_monitor import LearningRateMonitor
    from .model_summary import ModelSummary
    from .progress import ProgressBar, RichProgressBar, RichProgressBarTheme, TQDMProgressBar
    from .rich_model_summary import RichModelSummary

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

_LATER = {
    "EMA": "ema",
    "LambdaCallback": "lambda_callback",
    "LearningRateMonitor": "learning_rate_monitor",
    "ModelSummary": "model_summary",
    "ProgressBar": "progress",
    "RichModelSummary": "rich_model_summary",
    "RichProgressBar": "progress",
    "RichProgressBarTheme": "progress",
    "TQDMProgressBar": "progress",
}


def __getattr__(name: str) -> Any:  # Any: the type is that of the name asked for
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value
