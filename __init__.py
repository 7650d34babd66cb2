"""Loopwright: a trainer framework for PyTorch.

Names are looked up when they are first used (PEP 562), so that `import loopwright` imports no torch and takes a few
milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import attach

if TYPE_CHECKING:
    import loopwright.optim
    import loopwright.schedules  # noqa: F401  # so that type checkers know `lw.optim` and `lw.schedules`

    # For type checkers and editors; a test compares these with `_HOME`.
    from .accelerators import ACCELERATOR_REGISTRY as ACCELERATOR_REGISTRY
    from .accelerators import Accelerator as Accelerator
    from .accelerators import AcceleratorRegistry as AcceleratorRegistry
    from .accelerators import CPUAccelerator as CPUAccelerator
    from .accelerators import CUDAAccelerator as CUDAAccelerator
    from .accelerators import MPSAccelerator as MPSAccelerator
    from .accelerators import XLAAccelerator as XLAAccelerator
    from .accelerators import find_usable_cuda_devices as find_usable_cuda_devices
    from .callbacks import EMA as EMA
    from .callbacks import BackboneFinetuning as BackboneFinetuning
    from .callbacks import BaseFinetuning as BaseFinetuning
    from .callbacks import BasePredictionWriter as BasePredictionWriter
    from .callbacks import BatchSizeFinder as BatchSizeFinder
    from .callbacks import Callback as Callback
    from .callbacks import Checkpoint as Checkpoint
    from .callbacks import DeviceStatsMonitor as DeviceStatsMonitor
    from .callbacks import EarlyStopping as EarlyStopping
    from .callbacks import EarlyStoppingReason as EarlyStoppingReason
    from .callbacks import EMAWeightAveraging as EMAWeightAveraging
    from .callbacks import GradientAccumulationScheduler as GradientAccumulationScheduler
    from .callbacks import LambdaCallback as LambdaCallback
    from .callbacks import LearningRateFinder as LearningRateFinder
    from .callbacks import LearningRateMonitor as LearningRateMonitor
    from .callbacks import MemorySnapshot as MemorySnapshot
    from .callbacks import ModelCheckpoint as ModelCheckpoint
    from .callbacks import ModelPruning as ModelPruning
    from .callbacks import ModelSummary as ModelSummary
    from .callbacks import OnExceptionCheckpoint as OnExceptionCheckpoint
    from .callbacks import Preemption as Preemption
    from .callbacks import ProgressBar as ProgressBar
    from .callbacks import RichModelSummary as RichModelSummary
    from .callbacks import RichProgressBar as RichProgressBar
    from .callbacks import RichProgressBarTheme as RichProgressBarTheme
    from .callbacks import SampleLogger as SampleLogger
    from .callbacks import Sentinel as Sentinel
    from .callbacks import SentinelError as SentinelError
    from .callbacks import Snapshot as Snapshot
    from .callbacks import SpikeDetection as SpikeDetection
    from .callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from .callbacks import StopFile as StopFile
    from .callbacks import ThroughputMonitor as ThroughputMonitor
    from .callbacks import Timer as Timer
    from .callbacks import TQDMProgressBar as TQDMProgressBar
    from .callbacks import TrainingEfficiency as TrainingEfficiency
    from .callbacks import TrainingSpikeException as TrainingSpikeException
    from .callbacks import WeightAveraging as WeightAveraging
    from .callbacks import WeightStatistics as WeightStatistics
    from .callbacks import XLAStatsMonitor as XLAStatsMonitor
    from .checkpoint import AsyncCheckpointIO as AsyncCheckpointIO
    from .checkpoint import CheckpointIO as CheckpointIO
    from .checkpoint import TorchCheckpointIO as TorchCheckpointIO
    from .checkpoint import Trusted as Trusted
    from .data import CombinedLoader as CombinedLoader
    from .data import DataModule as DataModule
    from .data import ShardedIterable as ShardedIterable
    from .data import ThreadDataLoader as ThreadDataLoader
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import DataError as DataError
    from .errors import LaunchError as LaunchError
    from .errors import LoopwrightError as LoopwrightError
    from .errors import MissingDependency as MissingDependency
    from .errors import ModuleError as ModuleError
    from .errors import NonFiniteError as NonFiniteError
    from .errors import RankFailure as RankFailure
    from .errors import StopBySignal as StopBySignal
    from .fabric import ClusterEnvironment as ClusterEnvironment
    from .fabric import Fabric as Fabric
    from .fabric import KubeflowEnvironment as KubeflowEnvironment
    from .fabric import LightningEnvironment as LightningEnvironment
    from .fabric import LocalEnvironment as LocalEnvironment
    from .fabric import LSFEnvironment as LSFEnvironment
    from .fabric import MPIEnvironment as MPIEnvironment
    from .fabric import SLURMEnvironment as SLURMEnvironment
    from .fabric import TorchElasticEnvironment as TorchElasticEnvironment
    from .fabric import is_wrapped as is_wrapped
    from .fabric import isolate_rng as isolate_rng
    from .fabric import seed_everything as seed_everything
    from .fabric.throughput import Throughput as Throughput
    from .fabric.throughput import measure_flops as measure_flops
    from .loggers import CometLogger as CometLogger
    from .loggers import CSVLogger as CSVLogger
    from .loggers import DummyLogger as DummyLogger
    from .loggers import JSONLinesLogger as JSONLinesLogger
    from .loggers import Logger as Logger
    from .loggers import MLFlowLogger as MLFlowLogger
    from .loggers import PrometheusLogger as PrometheusLogger
    from .loggers import TensorBoardLogger as TensorBoardLogger
    from .loggers import TrackioLogger as TrackioLogger
    from .loggers import WandbLogger as WandbLogger
    from .loggers import rank_zero_experiment as rank_zero_experiment
    from .planning.planner import plan as plan
    from .precision import BitsandbytesPrecision as BitsandbytesPrecision
    from .precision import DoublePrecision as DoublePrecision
    from .precision import Float8Precision as Float8Precision
    from .precision import HalfPrecision as HalfPrecision
    from .precision import MixedPrecision as MixedPrecision
    from .precision import Precision as Precision
    from .precision import PrecisionPolicy as PrecisionPolicy
    from .precision import XLAPrecision as XLAPrecision
    from .profilers import AdvancedProfiler as AdvancedProfiler
    from .profilers import PassThroughProfiler as PassThroughProfiler
    from .profilers import Profiler as Profiler
    from .profilers import PyTorchProfiler as PyTorchProfiler
    from .profilers import SimpleProfiler as SimpleProfiler
    from .profilers import XLAProfiler as XLAProfiler
    from .strategies import STRATEGY_REGISTRY as STRATEGY_REGISTRY
    from .strategies import DataParallelStrategy as DataParallelStrategy
    from .strategies import DDPStrategy as DDPStrategy
    from .strategies import Experts as Experts
    from .strategies import FSDPStrategy as FSDPStrategy
    from .strategies import Launcher as Launcher
    from .strategies import LayerSync as LayerSync
    from .strategies import ParallelStrategy as ParallelStrategy
    from .strategies import SingleDeviceStrategy as SingleDeviceStrategy
    from .strategies import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy
    from .strategies import Strategy as Strategy
    from .strategies import StrategyRegistry as StrategyRegistry
    from .strategies import Topology as Topology
    from .strategies import TorchSyncBatchNorm as TorchSyncBatchNorm
    from .strategies import XLAFSDPStrategy as XLAFSDPStrategy
    from .strategies import XLAStrategy as XLAStrategy
    from .trainer.chunked_cross_entropy import chunked_cross_entropy as chunked_cross_entropy
    from .trainer.loop.loss import Loss as Loss
    from .trainer.module import Module as Module
    from .trainer.replica_groups import TorchFT as TorchFT
    from .trainer.trainer import Trainer as Trainer
    from .tuner import LearningRateCurve as LearningRateCurve
    from .tuner import SchedulePreview as SchedulePreview
    from .tuner import SpeedTable as SpeedTable
    from .tuner import Tuner as Tuner
    from .tuner import preview_schedule as preview_schedule

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOME = {
    "ACCELERATOR_REGISTRY": "accelerators",
    "Accelerator": "accelerators",
    "AcceleratorRegistry": "accelerators",
    "AdvancedProfiler": "profilers",
    "AsyncCheckpointIO": "checkpoint",
    "BackboneFinetuning": "callbacks",
    "BaseFinetuning": "callbacks",
    "BasePredictionWriter": "callbacks",
    "BatchSizeFinder": "callbacks",
    "BitsandbytesPrecision": "precision",
    "CPUAccelerator": "accelerators",
    "CSVLogger": "loggers",
    "CUDAAccelerator": "accelerators",
    "Callback": "callbacks",
    "Checkpoint": "callbacks",
    "CheckpointError": "errors",
    "CheckpointIO": "checkpoint",
    "ClusterEnvironment": "fabric",
    "CombinedLoader": "data",
    "CometLogger": "loggers",
    "ConfigError": "errors",
    "DDPStrategy": "strategies",
    "Experts": "strategies",
    "FSDPStrategy": "strategies",
    "DataError": "errors",
    "DataModule": "data",
    "DataParallelStrategy": "strategies",
    "DeviceStatsMonitor": "callbacks",
    "DoublePrecision": "precision",
    "DummyLogger": "loggers",
    "EMA": "callbacks",
    "EMAWeightAveraging": "callbacks",
    "EarlyStopping": "callbacks",
    "EarlyStoppingReason": "callbacks",
    "Fabric": "fabric",
    "GradientAccumulationScheduler": "callbacks",
    "Float8Precision": "precision",
    "HalfPrecision": "precision",
    "JSONLinesLogger": "loggers",
    "KubeflowEnvironment": "fabric",
    "LSFEnvironment": "fabric",
    "LambdaCallback": "callbacks",
    "LaunchError": "errors",
    "Launcher": "strategies",
    "LayerSync": "strategies",
    "LearningRateCurve": "tuner",
    "LearningRateFinder": "callbacks",
    "LearningRateMonitor": "callbacks",
    "LightningEnvironment": "fabric",
    "LocalEnvironment": "fabric",
    "Logger": "loggers",
    "LoopwrightError": "errors",
    "Loss": "trainer.loop.loss",
    "MLFlowLogger": "loggers",
    "MPIEnvironment": "fabric",
    "MPSAccelerator": "accelerators",
    "MemorySnapshot": "callbacks",
    "MissingDependency": "errors",
    "MixedPrecision": "precision",
    "ModelCheckpoint": "callbacks",
    "ModelPruning": "callbacks",
    "ModelSummary": "callbacks",
    "Module": "trainer.module",
    "ModuleError": "errors",
    "NonFiniteError": "errors",
    "OnExceptionCheckpoint": "callbacks",
    "ParallelStrategy": "strategies",
    "PassThroughProfiler": "profilers",
    "Precision": "precision",
    "PrecisionPolicy": "precision",
    "Preemption": "callbacks",
    "Profiler": "profilers",
    "ProgressBar": "callbacks",
    "PrometheusLogger": "loggers",
    "PyTorchProfiler": "profilers",
    "RankFailure": "errors",
    "RichModelSummary": "callbacks",
    "RichProgressBar": "callbacks",
    "RichProgressBarTheme": "callbacks",
    "SLURMEnvironment": "fabric",
    "STRATEGY_REGISTRY": "strategies",
    "SampleLogger": "callbacks",
    "SchedulePreview": "tuner",
    "Sentinel": "callbacks",
    "SentinelError": "callbacks",
    "ShardedIterable": "data",
    "SimpleProfiler": "profilers",
    "SingleDeviceStrategy": "strategies",
    "SingleDeviceXLAStrategy": "strategies",
    "Snapshot": "callbacks",
    "SpeedTable": "tuner",
    "SpikeDetection": "callbacks",
    "StochasticWeightAveraging": "callbacks",
    "StopBySignal": "errors",
    "StopFile": "callbacks",
    "Strategy": "strategies",
    "StrategyRegistry": "strategies",
    "TQDMProgressBar": "callbacks",
    "TensorBoardLogger": "loggers",
    "ThreadDataLoader": "data",
    "Throughput": "fabric.throughput",
    "ThroughputMonitor": "callbacks",
    "Timer": "callbacks",
    "Topology": "strategies",
    "TorchCheckpointIO": "checkpoint",
    "TorchElasticEnvironment": "fabric",
    "TorchFT": "trainer.replica_groups",
    "TorchSyncBatchNorm": "strategies",
    "TrackioLogger": "loggers",
    "Trainer": "trainer.trainer",
    "TrainingEfficiency": "callbacks",
    "TrainingSpikeException": "callbacks",
    "Trusted": "checkpoint",
    "Tuner": "tuner",
    "WandbLogger": "loggers",
    "WeightAveraging": "callbacks",
    "WeightStatistics": "callbacks",
    "XLAAccelerator": "accelerators",
    "XLAFSDPStrategy": "strategies",
    "XLAPrecision": "precision",
    "XLAProfiler": "profilers",
    "XLAStatsMonitor": "callbacks",
    "XLAStrategy": "strategies",
    "chunked_cross_entropy": "trainer.chunked_cross_entropy",
    "find_usable_cuda_devices": "accelerators",
    "is_wrapped": "fabric",
    "isolate_rng": "fabric",
    "measure_flops": "fabric.throughput",
    "plan": "planning.planner",
    "preview_schedule": "tuner",
    "rank_zero_experiment": "loggers",
    "seed_everything": "fabric",
}

__all__ = [*sorted(_HOME), "__version__"]

__getattr__, __dir__ = attach(__name__, _HOME)
