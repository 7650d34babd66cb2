"""`Logger`, the base class of loggers; the rule for ranks; and the conversion of logged values to numbers."""

from __future__ import annotations

import functools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from ..errors import ChecksKeywords, ConfigError
from ..messages import current_rank, warn
from ..protocols import AnyBatch, Tree

if TYPE_CHECKING:
    from torch import nn

    from ..protocols import StateDict
    from .hyperparameters import Plain
    from .write_behind import WriteBehind

__all__ = [
    "DummyExperiment",
    "Lock",
    "Logger",
    "Metrics",
    "RunLogger",
    "current_rank",
    "rank_zero_experiment",
    "scalars",
]

L = TypeVar("L")
E = TypeVar("E")

# Name -> number, tensor or array of one element, or a mapping of these.
Metrics: TypeAlias = Mapping[str, Any]
# Hyperparameters: a mapping, an `argparse.Namespace`, a dataclass, or None; Any, so that a subclass may narrow it.
Params: TypeAlias = Any
Pictures: TypeAlias = object  # one or several, in a form that `Logger.log_image` lists
EachOption: TypeAlias = "Sequence[Any] | str"  # a list with one entry per picture, such as its caption


class Logger(ChecksKeywords, ABC):
    """Record of the metrics and hyperparameters of a run.

    A subclass defines `name`, `version`, `log_metrics` and `log_hyperparams`; all other methods do nothing by default.
    Metrics arrive as host numbers, at log boundaries only. An exception from a logger does not end training: the
    Trainer reports it and writes the row again later.
    """

    LOGGER_JOIN_CHAR = "-"

    # Whether the Trainer calls log_metrics and save on another thread, so that a slow disk or service does not delay a
    # step. Everything else is called on the Trainer's own thread, after deferred writes.
    writes_behind: bool = False

    # The Trainer's queue for this logger, while there is one.
    queue: WriteBehind | None = None

    # Unit of the x axis: "step", "samples", "time" (seconds of training, an integer) or the name of a logged metric.
    x_axis: str = "step"

    # Seconds of training up to the last row, earlier runs included. The Trainer updates it.
    wall_s: float = 0.0

    # Set by the Trainer when the processes are connected; before that, the environment determines the rank.
    known_rank: int | None = None

    @property
    def is_silent(self) -> bool:
        """Whether this process has a rank above zero, on which nothing is recorded."""
        return (current_rank() if self.known_rank is None else self.known_rank) > 0

    def set_rank(self, rank: int) -> None:
        """Set the rank of this process. On ranks above zero, nothing is recorded."""
        self.known_rank = rank

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the experiment, the folder or project that groups runs; None if the logger has no such level."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Name, number or id of this run in the experiment; None before it has one."""

    @property
    def save_dir(self) -> str | None:
        """Directory that was passed; None if the logger writes no local files."""
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
    def experiment(self) -> Any:  # Any: each logger returns an object of its library
        """The object of the underlying library, for features that this interface does not provide."""
        return DummyExperiment()

    @abstractmethod
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # Any: dict[str, float] for subclasses
        """Record numbers for one step.

        Args:
            metrics: Name -> number (or a tensor of one element, which is copied to the host).
            step: The x value: number of training steps. None is the last recorded step plus one.
        """

    @abstractmethod
    def log_hyperparams(self, params: Params, *args: Any, **kwargs: Any) -> None:  # Any: options of the logger
        """Record the hyperparameters of the run.

        Args:
            params: A mapping, an `argparse.Namespace`, a dataclass, or None.
            args: Options of the logger.
            kwargs: Options of the logger.
        """

    def log_row(self, metrics: Metrics, step: int, axes: Mapping[str, float]) -> None:
        """Record one row of the Trainer; by default by `log_metrics`, at the x value of `x_axis`.

        Args:
            metrics: Name -> host number.
            step: Number of training steps.
            axes: Other x values: "samples", and the latest value of every metric.
        """
        self.log_metrics(metrics, step=self._lw_place(step, axes))

    def log_image(self, key: str, images: Pictures, step: int | None = None, **kwargs: EachOption) -> None:
        """Record images; does nothing by default.

        Args:
            key: Name of the images.
            images: One image or a list of images: a tensor of shape (C, H, W) or (H, W), or an array of shape (H, W, C)
                or (H, W), with floats from 0 to 1 or bytes; or a PIL image.
            step: Number of training steps; None is the last recorded step.
            kwargs: Options of the logger; `caption` is a list with one text per image.
        """
        return

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Record text; does nothing by default.

        Args:
            key: Name of the text.
            text: The text, in Markdown if the logger can show it.
            step: Number of training steps; None is the last recorded step.
        """
        return

    def log_graph(self, model: nn.Module, input_array: AnyBatch = None) -> None:
        """Record the model's graph; does nothing by default.

        Args:
            model: The module.
            input_array: One input of the model; None is the module's `example_input_array`.
        """
        return

    def save(self) -> None:
        """Write logged values to disk; does nothing by default."""
        return

    def finalize(self, status: str) -> None:
        """End the run after writing deferred values.

        Args:
            status: "success", "failed" or "finished".
        """
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:  # Any: the callback's class, for subclasses
        """React to a saved checkpoint; does nothing by default.

        Args:
            checkpoint_callback: The callback that saved the checkpoint.
        """
        return

    def state_dict(self) -> StateDict:
        """Return the state that a resumed run continues from; plain values only."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from the state that `state_dict` returned.

        Called only when a fit is resumed, before its first log call. Nothing is removed from disk before the resumed
        run writes.
        """
        return

    def _lw_catch_up(self) -> None:
        """Write the Trainer's deferred rows before a direct call of the user; raise nothing."""
        if self.queue is not None:
            self.queue.wait()

    def _lw_place(self, step: int, axes: Mapping[str, float]) -> int:
        """Return the x of a row."""
        if self.x_axis == "step":
            return step
        if self.x_axis == "time":
            return int(self.wall_s)
        if self.x_axis not in axes:
            if step and not self.__dict__.get("_lw_has_warned_of_axis"):
                self._lw_has_warned_of_axis = True
                warn(
                    f"{type(self).__name__}: x_axis={self.x_axis!r} was not logged up to step {step}; points "
                    "have x = 0 until then."
                )
            return 0
        return int(axes[self.x_axis])


class RunLogger(Logger):
    """A logger of one run: the base of loggers that write files, and of loggers that send to a service.

    Args:
        prefix: Text before each metric's name, joined by "-".
    """

    _experiment: Any = None  # Any: the library's own object, known to the subclass; None until it is opened

    def __init__(self, prefix: str) -> None:
        self.hparams: dict[str, Plain] = {}
        self._prefix = prefix
        self._lw_lock = Lock()  # the Trainer's writing thread and the user's own may meet here
        self._lw_step = -1
        self._lw_is_resumed = False
        self._lw_at_end: Finalize | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave the end of this process out."""
        return {**self.__dict__, "_lw_at_end": None}

    def check_target(self) -> None:
        """Raise an error if nothing can be recorded, on rank zero before fit trains; by default nothing is checked.

        Raises:
            ConfigError: A folder cannot be written to, or a port is in use, say.
        """
        return

    def _lw_opened(self, open_experiment: Callable[[], E]) -> E:
        """Return the experiment, opened at the first call; above rank zero, one whose every call does nothing."""
        if self.is_silent:
            return cast("E", DummyExperiment())
        self._lw_catch_up()
        with self._lw_lock:
            if self._experiment is None:
                self._experiment = open_experiment()
            self._lw_begin_session()
            return cast("E", self._experiment)

    def _lw_begin_session(self) -> None:
        """Let this process end with `finalize`, unless that is called before."""
        if self._lw_at_end is None:
            # Processes that multiprocessing starts do not run atexit at their end, but these; others run both.
            self._lw_at_end = Finalize(None, self._lw_end_with_process, exitpriority=20)

    def _lw_end_session(self) -> None:
        """Called by `finalize`."""
        if self._lw_at_end is not None:
            self._lw_at_end.cancel()
            self._lw_at_end = None

    def _lw_end_with_process(self) -> None:
        self._lw_at_end = None
        # In a process of multiprocessing the exception is still on its way; a main program's has been printed.
        error = sys.exc_info()[1] or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
        is_failure = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
        try:
            self.finalize("failed" if is_failure else "finished")
        except Exception as failure:  # of a service, or a disk: the other loggers are to be ended, too
            kind = type(failure).__name__
            warn(f"{type(self).__name__} could not be finalized when the process ended: {kind}: {failure}")

    def _lw_at(self, step: int | None) -> int:
        self._lw_catch_up()
        return max(self._lw_step, 0) if step is None else int(step)


class Lock:
    """A lock that one thread can take several times; a copy, or what was pickled, has a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return (Lock, ())


class DummyExperiment:
    """The `experiment` of a logger that records nothing: every attribute is a function that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):  # copy and pickle look these up and must not find them
            raise AttributeError(name)
        return _nothing

    def __getitem__(self, index: int | str) -> DummyExperiment:
        return self

    def __setitem__(self, index: int | str, value: Tree) -> None:
        return


def rank_zero_experiment(function: Callable[[L], E]) -> Callable[[L], E]:
    """Wrap the getter of `experiment` so that ranks above zero get an object whose every call does nothing."""

    @functools.wraps(function)
    def experiment(self: L) -> E:
        is_silent: bool = getattr(self, "is_silent", current_rank() > 0)
        return cast("E", DummyExperiment()) if is_silent else function(self)

    return experiment


def scalars(metrics: Metrics, *, prefix: str = "", group_separator: str = "/") -> dict[str, int | float]:
    """Return metrics as host numbers, with flattened nested mappings, and the prefix before each name.

    Args:
        metrics: Name -> number, tensor or array of one element, or mapping of these.
        prefix: Joined to each name by "-"; empty for none.
        group_separator: Joins the names of nested mappings.

    Raises:
        ConfigError: A value is not a number; the message names its key. Nothing is recorded.
    """
    found: dict[str, int | float] = {}
    start = f"{prefix}{Logger.LOGGER_JOIN_CHAR}" if prefix else ""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            inner = scalars(value, group_separator=group_separator)
            named = {f"{start}{key}{group_separator}{name}": number for name, number in inner.items()}
        else:
            named = {f"{start}{key}": _number(f"{key}", value)}
        twice = found.keys() & named.keys()
        if twice:
            raise ConfigError(
                f"the metric {min(twice)!r} has two values in one row: {key!r} and another entry have this name.",
                fix="rename one of the two.",
            )
        found.update(named)
    return found


def _number(key: str, value: Tree) -> int | float:
    if hasattr(value, "item"):  # torch tensors, NumPy arrays and scalars
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            raise ConfigError(
                f"metric {key!r} has shape {tuple(getattr(value, 'shape', ()))}; a logger takes one number per name.",
                fix=f"log {key!r} as a mean or another scalar, or write it with logger.experiment.",
            ) from None
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return value
    raise ConfigError(
        f"metric {key!r} is {value!r} of type {type(value).__name__}; a logger takes numbers.",
        fix=f"log a number under {key!r}; log text with log_text, log_hyperparams or logger.experiment.",
    )


def _nothing(*args: object, **kwargs: object) -> None:
    """Take anything, do nothing."""
