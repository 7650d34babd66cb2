"""The loggers whose default folder Lightning calls `lightning_logs`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ... import loggers
from ...errors import ConfigError
from ...loggers.folder import FolderLogger

if TYPE_CHECKING:
    import wandb
    from mlflow import MlflowClient
    from torch import nn

__all__ = ["CSVLogger", "CometLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger", "merge_dicts"]

DEFAULT_NAME = "lightning_logs"


class Logger(loggers.Logger):
    """`lw.Logger` for the Trainer's loggers: a subclass of the one for Fabric, as in Lightning."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return loggers.Logger in other.__mro__ if cls is Logger else NotImplemented


def _set_version(logger: FolderLogger, version: int | str | None) -> None:
    if version != logger.taken_version:
        logger.move_to(version)


def _filesystem(logger: FolderLogger) -> object:  # fsspec is not annotated
    from .utilities.files import get_filesystem  # importing fsspec takes time, and local runs do not need it

    return get_filesystem(logger.save_dir or ".")


def _get_version(logger: FolderLogger) -> int | str | None:
    return logger.taken_version


class FabricTensorBoardLogger(loggers.TensorBoardLogger):
    """`lw.TensorBoardLogger` with Lightning's default folder; Fabric calls its first argument `root_dir`."""

    _fs = property(_filesystem)
    _version = property(_get_version, _set_version)  # libraries assign it to start the next run of a logger

    def __init__(
        self, root_dir: str | os.PathLike[str], name: str | None = DEFAULT_NAME, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(root_dir, name, *args, **kwargs)

    @property
    def root_dir(self) -> str:
        """The folder that was given, above that of the name."""
        return self.save_dir

    def log_graph(self, model: nn.Module, input_array: object = None) -> None:
        """Write the model's graph; warn where there is no input that can be traced.

        Args:
            model: The module.
            input_array: See `lw.TensorBoardLogger.log_graph`.
        """
        try:
            super().log_graph(model, input_array)
        except ConfigError as error:
            warnings.warn(f"Could not log computational graph to TensorBoard: {error}", stacklevel=2)

    def save(self) -> None:
        """Flush to disk, with a file of hyperparameters even if there are none."""
        super().save()
        if not (self.is_silent or self._lw_owns_hparams_file or self._lw_is_resumed):
            self._lw_write_hparams()

    def finalize(self, status: str) -> None:
        """Close the event file, and write the hyperparameters even if there are none.

        Args:
            status: How the run ended.
        """
        super().finalize(status)
        self.save()


class TensorBoardLogger(FabricTensorBoardLogger):
    """The same, whose first argument the Trainer's loggers call `save_dir`."""

    root_dir = loggers.TensorBoardLogger.root_dir  # with the name

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None = DEFAULT_NAME, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(save_dir, name, *args, **kwargs)


class FabricCSVLogger(loggers.CSVLogger):
    """`lw.CSVLogger` with Lightning's default folder; Fabric calls its first argument `root_dir`."""

    _fs = property(_filesystem)
    _version = property(_get_version, _set_version)  # libraries assign it to start the next run of a logger

    def __init__(
        self, root_dir: str | os.PathLike[str], name: str | None = DEFAULT_NAME, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(root_dir, name, *args, **kwargs)

    @property
    def root_dir(self) -> str:
        """The folder that was given, above that of the name."""
        return self.save_dir

    @property
    def _flush_logs_every_n_steps(self) -> int:
        return self._lw_flush_every

    def _lw_is_flush_due(self, step: int) -> bool:
        return (step + 1) % self._lw_flush_every == 0


class CSVLogger(FabricCSVLogger):
    """The same, whose first argument the Trainer's loggers call `save_dir`."""

    root_dir = loggers.CSVLogger.root_dir  # with the name

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None = DEFAULT_NAME, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(save_dir, name, *args, **kwargs)


def merge_dicts(
    dicts: Sequence[Mapping[str, float]],
    agg_key_funcs: Mapping[str, Callable[[Sequence[float]], float]] | None = None,
    default_func: Callable[[Sequence[float]], float] | None = None,
) -> dict[str, float]:
    """Merge dicts into one; the values of a key are combined into one value.

    Args:
        dicts: What to merge.
        agg_key_funcs: Key -> function for its values.
        default_func: For the other keys; the mean by default.
    """
    functions = agg_key_funcs or {}
    other = default_func or (lambda values: sum(values) / len(values))
    keys = dict.fromkeys(key for one in dicts for key in one)
    return {key: functions.get(key, other)([one[key] for one in dicts if key in one]) for key in keys}


class WandbLogger(loggers.WandbLogger):
    """`lw.WandbLogger` with Lightning's default project.

    With `sync_tensorboard=True`, the x axis is TensorBoard's, and points have no step.
    """

    default_project = DEFAULT_NAME

    def _lw_begin(self) -> wandb.Run:
        run = super()._lw_begin()
        if self._lw_options.get("sync_tensorboard"):
            run.define_metric("*", step_metric="global_step")
        return run

    def _lw_send(self, points: Mapping[str, int | float], step: int, extra: Mapping[str, int]) -> None:
        if self._lw_options.get("sync_tensorboard"):
            self.experiment.log({**points, **extra})
        else:
            super()._lw_send(points, step, extra)


class MLFlowLogger(loggers.MLFlowLogger):
    """`lw.MLFlowLogger` with Lightning's default experiment.

    Args:
        experiment_name: Name of the experiment; created if necessary.
        args: See `lw.MLFlowLogger`.
        kwargs: See `lw.MLFlowLogger`.
    """

    def __init__(self, experiment_name: str = DEFAULT_NAME, *args: Any, **kwargs: Any) -> None:
        super().__init__(experiment_name, *args, **kwargs)

    @property
    def _tracking_uri(self) -> str:
        return self._lw_uri

    @property
    def _run_id(self) -> str | None:
        return self._lw_id

    @property
    def _mlflow_client(self) -> MlflowClient:
        return self._lw_store()


# Former name of an argument -> its present name.
_COMET = {"experiment_name": "name", "project_name": "project", "save_dir": "offline_directory", "offline": "online"}


class CometLogger(loggers.CometLogger):
    """`lw.CometLogger`, which also accepts Lightning's former argument names.

    Args:
        arguments: See `lw.CometLogger`; `experiment_name`, `project_name`, `save_dir` and `offline` are former names.
    """

    def __init__(self, **arguments: Any) -> None:
        for former, present in _COMET.items():
            if former not in arguments:
                continue
            value = arguments.pop(former)
            value = not value if former == "offline" else value
            if arguments.get(present) is None:
                arguments[present] = value
                text = f"CometLogger({former}=...) is the former name of {present}="
            else:
                text = f"CometLogger got both {former}= and {present}=: the former is not used"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        super().__init__(**arguments)
