"""How a model is spread over devices and processes. Trainer and Fabric share these strategies."""

from __future__ import annotations

from .base import Launcher, Strategy, Topology
from .parallel import ParallelStrategy
from .registry import STRATEGY_REGISTRY, StrategyRegistry
from .single_device import SingleDeviceStrategy

__all__ = [
    "STRATEGY_REGISTRY",
    "Launcher",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "StrategyRegistry",
    "Topology",
]
