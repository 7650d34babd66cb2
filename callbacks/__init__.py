"""Callbacks: the base class, and one idea per file. Made by users and by the Trainer; called by its lifecycle.

Those that the Trainer itself knows are imported with the package, the others when their name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import Callback, Checkpoint
from .gradient_accumulation_scheduler import GradientAccumulationScheduler

if TYPE_CHECKING:
    from .batch_size_finder import BatchSizeFinder
    from .device_stats_monitor import DeviceStatsMonitor
    from .early_stopping import EarlyStopping, EarlyStoppingReason
    from .efficiency import TrainingEfficiency
    from .ema import EMA
    from .finetuning import BackboneFinetuning, BaseFinetuning
    from .lambda_callback import LambdaCallback
    from .learning_rate_monitor import LearningRateMonitor
    from .lr_finder import LearningRateFinder
    from .memory_snapshot import MemorySnapshot
    from .model_checkpoint import ModelCheckpoint
    from .model_summary import ModelSummary
    from .on_exception_checkpoint import OnExceptionCheckpoint
    from .prediction_writer import BasePredictionWriter
    from .preemption import Preemption
    from .progress import ProgressBar, RichProgressBar, RichProgressBarTheme, TQDMProgressBar
    from .pruning import ModelPruning
    from .rich_model_summary import RichModelSummary
    from .sample_logger import SampleLogger
    from .spike_detection import SpikeDetection, TrainingSpikeException
    from .stochastic_weight_averaging import StochasticWeightAveraging
    from .stop_file import StopFile
    from .throughput_monitor import ThroughputMonitor
    from .timer import Timer
    from .weight_averaging import EMAWeightAveraging, WeightAveraging
    from .weight_statistics import WeightStatistics
    from .xla_stats_monitor import XLAStatsMonitor

__all__ = [
    "EMA",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "Checkpoint",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "EarlyStoppingReason",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "MemorySnapshot",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "Preemption",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "RichProgressBarTheme",
    "SampleLogger",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "StopFile",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "TrainingEfficiency",
    "TrainingSpikeException",
    "WeightAveraging",
    "WeightStatistics",
    "XLAStatsMonitor",
]

_LATER = {
    "EMA": "ema",
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "DeviceStatsMonitor": "device_stats_monitor",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "EarlyStoppingReason": "early_stopping",
    "LambdaCallback": "lambda_callback",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "learning_rate_monitor",
    "MemorySnapshot": "memory_snapshot",
    "ModelCheckpoint": "model_checkpoint",
    "ModelPruning": "pruning",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "Preemption": "preemption",
    "ProgressBar": "progress",
    "RichModelSummary": "rich_model_summary",
    "RichProgressBar": "progress",
    "RichProgressBarTheme": "progress",
    "SampleLogger": "sample_logger",
    "SpikeDetection": "spike_detection",
    "StochasticWeightAveraging": "stochastic_weight_averaging",
    "StopFile": "stop_file",
    "TQDMProgressBar": "progress",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
    "TrainingEfficiency": "efficiency",
    "TrainingSpikeException": "spike_detection",
    "WeightAveraging": "weight_averaging",
    "WeightStatistics": "weight_statistics",
    "XLAStatsMonitor": "xla_stats_monitor",
}


def __getattr__(name: str) -> Any:  # Any: the type is that of the name asked for
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value
