"""Callbacks: the base class, and one idea per file.

The callbacks that the Trainer itself uses are imported with the package, the others when their name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach
from .base import Callback, Checkpoint
from .gradient_accumulation_scheduler import GradientAccumulationScheduler

if TYPE_CHECKING:
    from .averaging.ema import EMA
    from .averaging.stochastic_weight_averaging import StochasticWeightAveraging
    from .averaging.weight_averaging import EMAWeightAveraging, WeightAveraging
    from .batch_size_finder import BatchSizeFinder
    from .finetuning import BackboneFinetuning, BaseFinetuning
    from .lambda_callback import LambdaCallback
    from .lr_finder import LearningRateFinder
    from .model_checkpoint.callback import ModelCheckpoint
    from .monitors.device_stats_monitor import DeviceStatsMonitor
    from .monitors.learning_rate_monitor import LearningRateMonitor
    from .monitors.memory_snapshot import MemorySnapshot
    from .monitors.sample_logger import SampleLogger
    from .monitors.spike_detection import SpikeDetection, TrainingSpikeException
    from .monitors.throughput_monitor import ThroughputMonitor
    from .monitors.training_efficiency import TrainingEfficiency
    from .monitors.weight_statistics import WeightStatistics
    from .monitors.xla_stats_monitor import XLAStatsMonitor
    from .on_exception_checkpoint import OnExceptionCheckpoint
    from .prediction_writer import BasePredictionWriter
    from .progress.base import ProgressBar
    from .progress.rich_bar import RichProgressBar, RichProgressBarTheme
    from .progress.tqdm_bar import TQDMProgressBar
    from .pruning import ModelPruning
    from .sentinel.callback import Sentinel
    from .sentinel.error import SentinelError
    from .snapshot import Snapshot
    from .stopping.early_stopping import EarlyStopping, EarlyStoppingReason
    from .stopping.preemption import Preemption
    from .stopping.stop_file import StopFile
    from .stopping.timer import Timer
    from .summary.model_summary import ModelSummary
    from .summary.rich_model_summary import RichModelSummary

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
    "Sentinel",
    "SentinelError",
    "Snapshot",
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

__getattr__, __dir__ = attach(
    __name__,
    {
        "EMA": "averaging.ema",
        "BackboneFinetuning": "finetuning",
        "BaseFinetuning": "finetuning",
        "BasePredictionWriter": "prediction_writer",
        "BatchSizeFinder": "batch_size_finder",
        "DeviceStatsMonitor": "monitors.device_stats_monitor",
        "EMAWeightAveraging": "averaging.weight_averaging",
        "EarlyStopping": "stopping.early_stopping",
        "EarlyStoppingReason": "stopping.early_stopping",
        "LambdaCallback": "lambda_callback",
        "LearningRateFinder": "lr_finder",
        "LearningRateMonitor": "monitors.learning_rate_monitor",
        "MemorySnapshot": "monitors.memory_snapshot",
        "ModelCheckpoint": "model_checkpoint.callback",
        "ModelPruning": "pruning",
        "ModelSummary": "summary.model_summary",
        "OnExceptionCheckpoint": "on_exception_checkpoint",
        "Preemption": "stopping.preemption",
        "ProgressBar": "progress.base",
        "RichModelSummary": "summary.rich_model_summary",
        "RichProgressBar": "progress.rich_bar",
        "RichProgressBarTheme": "progress.rich_bar",
        "SampleLogger": "monitors.sample_logger",
        "Sentinel": "sentinel.callback",
        "SentinelError": "sentinel.error",
        "Snapshot": "snapshot",
        "SpikeDetection": "monitors.spike_detection",
        "StochasticWeightAveraging": "averaging.stochastic_weight_averaging",
        "StopFile": "stopping.stop_file",
        "TQDMProgressBar": "progress.tqdm_bar",
        "ThroughputMonitor": "monitors.throughput_monitor",
        "Timer": "stopping.timer",
        "TrainingEfficiency": "monitors.training_efficiency",
        "TrainingSpikeException": "monitors.spike_detection",
        "WeightAveraging": "averaging.weight_averaging",
        "WeightStatistics": "monitors.weight_statistics",
        "XLAStatsMonitor": "monitors.xla_stats_monitor",
    },
)
