"""Strategies: how a model is distributed over devices and processes. Trainer and Fabric share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach
from .base import Given, Launcher, NoLoss, Strategy, Topology, TrainerConfig
from .registry import STRATEGY_REGISTRY, StrategyRegistry
from .single_device import SingleDeviceStrategy

if TYPE_CHECKING:
    from .data_parallel import DataParallelStrategy
    from .ddp.strategy import DDPStrategy
    from .deepspeed.strategy import DeepSpeedStrategy
    from .distributed.layer_sync import LayerSync, TorchSyncBatchNorm
    from .fsdp.strategy import FSDPStrategy
    from .mesh.experts.layer import Experts
    from .mesh.model_parallel import ModelParallelStrategy
    from .mesh.pipeline.options import Pipeline
    from .mesh.strategy import MeshStrategy
    from .parallel import ParallelStrategy, ProcessGroupStrategy
    from .xla.fsdp import XLAFSDPStrategy
    from .xla.replicas import XLAReplicasStrategy
    from .xla.single_device import SingleDeviceXLAStrategy
    from .xla.strategy import XLAStrategy

__all__ = [
    "STRATEGY_REGISTRY",
    "DDPStrategy",
    "DataParallelStrategy",
    "DeepSpeedStrategy",
    "Experts",
    "FSDPStrategy",
    "Given",
    "Launcher",
    "LayerSync",
    "MeshStrategy",
    "ModelParallelStrategy",
    "NoLoss",
    "ParallelStrategy",
    "Pipeline",
    "ProcessGroupStrategy",
    "SingleDeviceStrategy",
    "SingleDeviceXLAStrategy",
    "Strategy",
    "StrategyRegistry",
    "Topology",
    "TorchSyncBatchNorm",
    "TrainerConfig",
    "XLAFSDPStrategy",
    "XLAReplicasStrategy",
    "XLAStrategy",
]

# A run on one device needs none of these, and does not import them.
__getattr__, __dir__ = attach(
    __name__,
    {
        "DDPStrategy": "ddp.strategy",
        "DataParallelStrategy": "data_parallel",
        "DeepSpeedStrategy": "deepspeed.strategy",
        "Experts": "mesh.experts.layer",
        "FSDPStrategy": "fsdp.strategy",
        "LayerSync": "distributed.layer_sync",
        "MeshStrategy": "mesh.strategy",
        "ModelParallelStrategy": "mesh.model_parallel",
        "ParallelStrategy": "parallel",
        "Pipeline": "mesh.pipeline.options",
        "ProcessGroupStrategy": "parallel",
        "SingleDeviceXLAStrategy": "xla.single_device",
        "TorchSyncBatchNorm": "distributed.layer_sync",
        "XLAFSDPStrategy": "xla.fsdp",
        "XLAReplicasStrategy": "xla.replicas",
        "XLAStrategy": "xla.strategy",
    },
)
