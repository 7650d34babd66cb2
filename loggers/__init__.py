"""Loggers: records of a run's metrics. Each is imported when its name is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach
from .base import Logger, rank_zero_experiment
from .folder import share_version

if TYPE_CHECKING:
    from .comet_logger import CometLogger
    from .csv_logger import CSVLogger
    from .dummy import DummyLogger
    from .json_lines import JSONLinesLogger, read_json_lines
    from .mlflow_logger import MLFlowLogger
    from .prometheus_logger import PrometheusLogger
    from .tensorboard import TensorBoardLogger
    from .trackio_logger import TrackioLogger
    from .wandb_logger import WandbLogger
    from .write_behind import WriteBehind

__all__ = [
    "CSVLogger",
    "CometLogger",
    "DummyLogger",
    "JSONLinesLogger",
    "Logger",
    "MLFlowLogger",
    "PrometheusLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "WriteBehind",
    "rank_zero_experiment",
    "read_json_lines",
    "share_version",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "CSVLogger": "csv_logger",
        "CometLogger": "comet_logger",
        "DummyLogger": "dummy",
        "JSONLinesLogger": "json_lines",
        "MLFlowLogger": "mlflow_logger",
        "PrometheusLogger": "prometheus_logger",
        "TensorBoardLogger": "tensorboard",
        "TrackioLogger": "trackio_logger",
        "WandbLogger": "wandb_logger",
        "WriteBehind": "write_behind",
        "read_json_lines": "json_lines",
    },
)
