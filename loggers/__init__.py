"""Loggers: where the numbers of a run are kept. Nothing here imports TensorBoard before a metric is written."""

from .base import Logger, rank_zero_experiment
from .csv_logger import CSVLogger
from .dummy import DummyLogger
from .folder import share_version
from .tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "DummyLogger", "Logger", "TensorBoardLogger", "rank_zero_experiment", "share_version"]
