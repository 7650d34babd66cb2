"""Trackers: what `log_with` names, on Loopwright's loggers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ...errors import ConfigError, nearest
from .configuration import LoggerType
from .finder import refuse
from .state import PartialState

# Any in this file: values and options that a tracker's library takes.


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs on rank 0 only, if its object has `main_process_only`."""

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "main_process_only", False) or PartialState().is_main_process:
            return function(self, *args, **kwargs)
        return None

    return run


class GeneralTracker:
    """The base class of trackers; those of a program define `name`, `requires_logging_directory` and `tracker`."""

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(f"{type(self).__name__} must define: {', '.join(missing)}.")

    def start(self) -> None:
        """Begin the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values."""

    def finish(self) -> None:
        """End the run."""


class TensorBoardTracker(GeneralTracker):
    """Writes TensorBoard's files to `logging_dir/run_name`.

    Args:
        run_name: Name of the project.
        logging_dir: The folder.
        kwargs: Those of `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.logging_dir = os.path.join(logging_dir, run_name)
        self.tracker = self.writer = SummaryWriter(self.logging_dir, **kwargs)
        super().__init__()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write hyperparameters, also as `hparams.yml`."""
        self.writer.add_hparams(values, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir, str(time.time()))
        folder.mkdir()
        (folder / "hparams.yml").write_text(yaml.dump(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers, texts, and dicts of numbers under one title."""
        for name, value in values.items():
            value = value.tolist() if hasattr(value, "tolist") else value
            if isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            elif isinstance(value, int | float):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    def finish(self) -> None:
        """Close the files."""
        self.writer.close()


class WandBTracker(GeneralTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: Name of the project.
        kwargs: Those of `wandb.init`.
    """

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        import wandb

        self.tracker: Any = wandb.init(project=run_name, **kwargs)
        self.run = self.tracker
        super().__init__()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.tracker.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values."""
        self.tracker.log(values, step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        self.tracker.finish()


_NAMES = [str(one) for one in LoggerType]
_TRACKERS: dict[str, type[Any]] = {"tensorboard": TensorBoardTracker, "wandb": WandBTracker}


def find_trackers(log_with: Any, logging_dir: object) -> list[Any]:
    """Return the trackers to make: names that are known and installed, and objects of the program.

    Args:
        log_with: Name, tracker, or a list of them; "all" are those that are installed.
        logging_dir: Folder of logs, which some need.

    Raises:
        ConfigError: A name is unknown or not supported, or the folder is missing.
    """
    wanted = log_with if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    found: list[Any] = []
    for one in wanted:
        if isinstance(one, GeneralTracker):
            found.append(one)
            continue
        if str(one) not in _NAMES:
            raise ConfigError(
                f"Expected a tracker for log_with, got {one!r}{nearest(str(one), _NAMES)}.",
                fix=f"pass one of {', '.join(_TRACKERS)}, 'all', or a GeneralTracker.",
            )
        names = [name for name in _TRACKERS if find_spec(name)] if str(one) == "all" else [str(one)]
        if not _TRACKERS.keys() >= set(names):
            refuse(f"log_with={str(one)!r}", "pass an object of a GeneralTracker class, or use a logger with lw.Fabric")
        found += [name for name in names if name not in found]
    needs = [one for one in found if isinstance(one, str) and _TRACKERS[one].requires_logging_directory]
    if logging_dir is None and needs:
        raise ConfigError(
            f"log_with={needs[0]!r} needs a folder, got neither project_dir nor logging_dir.",
            fix="pass Accelerator(project_dir=...).",
        )
    return found


def make_trackers(chosen: list[Any], project: str, logging_dir: Any, init_kwargs: Mapping[str, Any]) -> list[Any]:
    """Return started trackers: on rank 0, on others those without `main_process_only`. Called on all ranks.

    Args:
        chosen: Result of `find_trackers`.
        project: Name of the project.
        logging_dir: Folder of logs.
        init_kwargs: Name of a tracker -> its arguments.
    """
    trackers = []
    for one in chosen:
        is_here = PartialState().is_main_process or not (isinstance(one, str) or one.main_process_only)
        if not is_here:
            continue
        if isinstance(one, str):
            kind, options = _TRACKERS[one], init_kwargs.get(one, {})
            one = kind(project, logging_dir, **options) if kind.requires_logging_directory else kind(project, **options)
        one.start()
        trackers.append(one)
    return trackers
