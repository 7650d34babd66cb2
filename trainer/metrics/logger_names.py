"""Loggers by their names, for `Trainer(logger="csv")`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ... import loggers
from ...errors import ConfigError, nearest
from ...loggers import Logger

LOGGER_NAMES = {
    "comet": "CometLogger",
    "csv": "CSVLogger",
    "json_lines": "JSONLinesLogger",
    "mlflow": "MLFlowLogger",
    "prometheus": "PrometheusLogger",
    "tensorboard": "TensorBoardLogger",
    "trackio": "TrackioLogger",
    "wandb": "WandbLogger",
}
_IN_FOLDERS = ("csv", "json_lines", "tensorboard", "trackio", "wandb")  # they write below the Trainer's folder


def logger_named(name: str) -> Callable[[str], Logger]:
    """Return a function that makes the logger of this name, from the Trainer's folder.

    Args:
        name: A key of `LOGGER_NAMES`, or the name of the class; upper and lower case do not matter.

    Raises:
        ConfigError: There is no such logger.
    """
    folded = name.lower().replace("-", "_")
    key = next((key for key, value in LOGGER_NAMES.items() if folded in (key, value.lower())), None)
    if key is None:
        raise ConfigError(
            f"Expected the name of a logger, got logger={name!r}{nearest(folded, LOGGER_NAMES)}.",
            fix=f"use one of {', '.join(LOGGER_NAMES)}, or pass True, False, a Logger, or a list of them.",
        )
    cls: Callable[..., Logger] = getattr(loggers, LOGGER_NAMES[key])
    return partial(_make, cls, has_folder=key in _IN_FOLDERS)


def _make(cls: Callable[..., Logger], root: str, *, has_folder: bool) -> Logger:
    return cls(save_dir=root) if has_folder else cls()
