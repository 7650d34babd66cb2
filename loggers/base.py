"""What every logger is: base class, rank rule, and how a logged value becomes a number. Trainer and Fabric call it."""

from __future__ import annotations

import functools
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError

__all__ = ["DummyExperiment", "Logger", "current_rank", "rank_zero_experiment", "scalars"]


class Logger(ABC):
    """Where the numbers and hyperparameters of a run are kept.

    A subclass says `name`, `version`, `log_metrics` and `log_hyperparams`; everything else has a default that does
    nothing. Metrics arrive as host numbers, at log boundaries only. An exception from a logger never ends a
    training: the Trainer reports it once and goes on.
    """

    LOGGER_JOIN_CHAR = "-"

    # Set by the Trainer when the processes are connected; before that, the environment is asked.
    known_rank: int | None = None

    @property
    def is_silent(self) -> bool:
        """Whether this process has a rank above zero, where nothing is recorded."""
        return (current_rank() if self.known_rank is None else self.known_rank) > 0

    def set_rank(self, rank: int) -> None:
        """Note which rank this process has: above zero, nothing is recorded. Called by the Trainer once it is known."""
        self.known_rank = rank

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the experiment: the folder, or the project, that groups runs. None if there is no such level."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """What tells this run from the others of the experiment. None before the run has an identity."""

    @property
    def save_dir(self) -> str | None:
        """Directory that the user gave; None if the logger writes no local files."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Directory that holds all versions of this experiment; None if the logger writes no local files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Directory of this run; None if the logger writes no local files."""
        return None

    @property
    def group_separator(self) -> str:
        """Character that puts metrics into groups: `val/loss`."""
        return "/"

    @property
    def experiment(self) -> Any:  # Any: each logger hands out its own library's object
        """The underlying library's own object, for what this interface does not cover."""
        return DummyExperiment()

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers for one step.

        Args:
            metrics: Name to number (or a tensor of one element, which is copied to the host).
            step: Training steps done, the x-axis. None takes the last recorded step plus one.
        """

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:  # Any: mapping, Namespace, dataclass
        """Record what the run was configured with.

        Args:
            params: A mapping, an `argparse.Namespace`, a dataclass, or None.
            args: For loggers that take more.
            kwargs: For loggers that take more.
        """

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the model's graph; by default nothing is done.

        Args:
            model: The module.
            input_array: One input of the model; None takes the module's `example_input_array`.
        """
        return

    def save(self) -> None:
        """Put on disk what was logged so far; by default nothing is done."""
        return

    def finalize(self, status: str) -> None:
        """End the run; what is still pending is written.

        Args:
            status: "success", "failed" or "finished".
        """
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Hear that a checkpoint was saved; by default nothing is done.

        Args:
            checkpoint_callback: The callback that saved it.
        """
        return

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on in the same place; plain values only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Called only when a fit is resumed, before its first log call. Nothing is dropped from disk until the resumed
        run writes something.
        """
        return


class DummyExperiment:
    """What `experiment` is where nothing is recorded: every attribute is a function that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):  # copy and pickle ask for these, and must hear that they are absent
            raise AttributeError(name)
        return _nothing

    def __getitem__(self, index: Any) -> DummyExperiment:
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        return


def current_rank() -> int:
    """Return this process's rank: torch.distributed's, else what launchers say in the environment; 0 without any.

    Asked at each call: a logger is often made before the launcher has set the environment.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank: int = distributed.get_rank()
        return rank
    said = {name: int(value) for name in _RANKS if (value := os.environ.get(name, "")).isdecimal()}
    if "RANK" not in said and "LOCAL_RANK" in said:
        # They tell apart the processes of one machine and the machines: rank 0 has 0 in both.
        return max(said["LOCAL_RANK"], said.get("NODE_RANK", 0), said.get("GROUP_RANK", 0))
    return next((said[name] for name in _RANKS if name in said and not name.endswith(("NODE_RANK", "GROUP_RANK"))), 0)


_RANKS = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK", "PMI_RANK",
)  # fmt: skip


def rank_zero_experiment(function: Callable[[Any], Any]) -> Callable[[Any], Any]:  # Any: self, and a library's object
    """Wrap the getter of `experiment` so that ranks above zero get an object whose every call does nothing."""

    @functools.wraps(function)
    def experiment(self: Any) -> Any:
        return DummyExperiment() if getattr(self, "is_silent", current_rank() > 0) else function(self)

    return experiment


def scalars(metrics: Mapping[str, Any], *, prefix: str = "", group_separator: str = "/") -> dict[str, int | float]:
    """Return metrics as host numbers, nested mappings flattened and the prefix put before each name.

    Args:
        metrics: Name to number, to a tensor or array of one element, or to a mapping of these.
        prefix: Joined to each name by "-"; empty for none.
        group_separator: Joins the names of nested mappings.

    Raises:
        ConfigError: A value is not a number; the message names its key. Nothing was recorded then.
    """
    found: dict[str, int | float] = {}
    start = f"{prefix}{Logger.LOGGER_JOIN_CHAR}" if prefix else ""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            for inner, number in scalars(value, group_separator=group_separator).items():
                found[f"{start}{key}{group_separator}{inner}"] = number
        else:
            found[f"{start}{key}"] = _number(f"{key}", value)
    return found


def _number(key: str, value: Any) -> int | float:  # Any: whatever the user logged
    if hasattr(value, "item"):  # torch tensors, NumPy arrays and scalars
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            raise ConfigError(
                f"metric {key!r} has shape {tuple(value.shape)}; a logger takes one number per name.",
                fix=f"log {key!r} as a mean or another scalar, or write it with logger.experiment.",
            ) from None
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return value
    raise ConfigError(
        f"metric {key!r} is {value!r} of type {type(value).__name__}; a logger takes numbers.",
        fix=f"log a number under {key!r}; text belongs into log_hyperparams or logger.experiment.",
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Take anything, do nothing."""
