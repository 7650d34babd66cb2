"""`ServiceLogger`, the base of loggers of tracking services: a run whose id checkpoints keep, and no duplicate points.

Points that were sent to a service cannot be removed. A resumed run therefore does not send again what the earlier
process sent after the checkpoint: a metric is sent only beyond the last step that the earlier process sent.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MissingDependency
from ..files import replace_file
from ..messages import warn
from ..protocols import Owner
from ..remote import leads_out
from .base import Metrics, RunLogger, scalars
from .hyperparameters import Plain, flatten, plain_hyperparameters

if TYPE_CHECKING:
    from torch import Tensor

    from ..protocols import StateDict
    from .base import Params

_log = logging.getLogger(__name__)


class ServiceLogger(RunLogger):
    """A run at a tracking service, which begins when something is first recorded, on rank zero only.

    Args:
        save_dir: Directory of local files, on this machine.
        run_id: Id of the run; None creates a new run.
        prefix: Text before each metric's name, joined by "-".
        x_axis: Unit of the x axis: "step", "samples", "time" (seconds of training) or the name of a logged metric.
        log_model: Whether the kept checkpoints are uploaded when fit ends; "all" uploads each when it is saved.

    Raises:
        ConfigError: `log_model` or `x_axis` is invalid, or `save_dir` is a URL.
    """

    writes_behind = True
    id_bytes = 0
    """Length of the ids that a logger of this class chooses, in bytes; 0: the service chooses them."""

    def __init__(
        self,
        *,
        save_dir: str | os.PathLike[str],
        run_id: str | None,
        prefix: str | None,
        x_axis: str,
        log_model: bool | str = False,
    ) -> None:
        directory = os.path.expandvars(os.path.expanduser(os.fspath(save_dir))).removeprefix("file://")
        wrong = []
        if "://" in directory:
            wrong.append(f"save_dir={directory!r} is a URL; expected a local directory")
        if not isinstance(x_axis, str) or not x_axis:
            wrong.append(f"x_axis={x_axis!r}; expected 'step', 'samples', 'time' or the name of a metric")
        if log_model not in (True, False, "all"):
            wrong.append(f"log_model={log_model!r}; expected True, False or 'all'")
        if wrong:
            raise ConfigError(
                f"{type(self).__name__} got {'; '.join(wrong)}.", fix="change these arguments, or leave them out."
            )
        super().__init__(prefix or "")
        self.x_axis = x_axis
        self._save_dir = directory
        self._lw_requested_id = self._lw_id = run_id
        self._lw_may_have_earlier = run_id is not None
        self._lw_names: dict[str, str] = {}  # name -> as the service knows it
        self._log_model = log_model
        self._lw_sent: dict[str, int] = {}  # name -> last step
        self._lw_sent_before: dict[str, int] = {}  # by the process that a resumed run continues
        self._lw_uploaded: dict[str, float] = {}  # path -> time of change
        self._checkpoint_callback: Owner = None

    @property
    def save_dir(self) -> str | None:
        """Directory for local files."""
        return self._save_dir

    @property
    def version(self) -> str | None:
        """The run's id; None before it has one.

        If the service accepts ids from clients (`id_bytes`), the first call on rank zero chooses one.
        """
        if self._lw_id is None and self.id_bytes and not self.is_silent:
            self._lw_id = secrets.token_hex(self.id_bytes)  # not from the generators that a training uses
        return self._lw_id

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Record one point per metric.

        Args:
            metrics: Name -> number (or a tensor of one element, which is copied to the host).
            step: The x value of the points. None is the last one plus one.

        Raises:
            ConfigError: A value is not a number; the message names its key. Nothing is recorded.
        """
        if not self.is_silent:
            self._lw_record(metrics, self._lw_step + 1 if step is None else int(step), {})

    def log_row(self, metrics: Metrics, step: int, axes: Mapping[str, float]) -> None:
        """Record one row of the Trainer."""
        if not self.is_silent:
            self._lw_record(metrics, self._lw_place(step, axes), {"trainer/global_step": step})

    def log_hyperparams(self, params: Params, *args: Any, **kwargs: Any) -> None:
        """Record hyperparameters, nested names joined by "/"; known ones are not sent again.

        Args:
            params: A mapping, an `argparse.Namespace`, a dataclass, or None.
            args: Ignored; accepted for compatibility with other loggers.
            kwargs: Ignored.
        """
        if self.is_silent:
            return
        self._lw_catch_up()
        before = flatten(self.hparams)
        self.hparams.update(plain_hyperparameters(params))
        changed = {key: value for key, value in flatten(self.hparams).items() if before.get(key) != value}
        if changed:
            self._lw_send_hyperparameters(changed)

    def after_save_checkpoint(self, checkpoint_callback: Owner) -> None:
        """Upload checkpoints, now or at the end, according to `log_model`.

        Args:
            checkpoint_callback: The callback that saved a checkpoint.
        """
        if self._log_model and not self.is_silent:
            self._checkpoint_callback = checkpoint_callback
            if self._log_model == "all" or getattr(checkpoint_callback, "save_top_k", 1) == -1:
                self._lw_upload_checkpoints()

    def finalize(self, status: str) -> None:
        """Upload checkpoints according to `log_model`, and end the run; a later record reopens it.

        Args:
            status: "success", "finished" or "failed".
        """
        if self.is_silent:
            return
        with self._lw_lock:
            if self._checkpoint_callback is not None and status != "failed":
                self._lw_upload_checkpoints()
            self._checkpoint_callback = None
            self._lw_end(is_success=status != "failed")
            self._lw_end_session()

    def state_dict(self) -> StateDict:
        """Return the run's id and the last step of each name."""
        if self.is_silent or self._lw_id is None:
            return {}
        return {
            "id": self._lw_id,
            "step": self._lw_step,
            "wall_s": self.wall_s,
            "sent": dict(self._lw_sent),
            "names": {name: known for name, known in self._lw_names.items() if known != self._lw_accepted(name)},
            **self._lw_location_of_run(),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue the run of `state_dict`, unless this logger has another id or location."""
        if not state_dict or self.is_silent:
            return
        run_id: str = state_dict["id"]
        place = {key: state_dict.get(key) for key in self._lw_location_of_run()}
        requested = self._lw_requested_id
        # Files are called like the id, and a checkpoint may come from others.
        if (leads_out(run_id) if requested is None else requested != run_id) or place != self._lw_location_of_run():
            _log.info(
                "%s begins a new run: its id or location differs from that of the checkpoint's run %r",
                type(self).__name__, run_id,
            )  # fmt: skip
            return
        with self._lw_lock:
            if self._lw_id != run_id:
                self._lw_end(is_success=True)
            earlier = self._lw_sent if self._lw_id == run_id else {}
            self._lw_id = run_id
            self._lw_is_resumed = True
            self._lw_may_have_earlier = False
            self._lw_names.update(state_dict.get("names", {}))
            self._lw_step = state_dict["step"]
            self.wall_s = state_dict["wall_s"]
            self._lw_sent = dict(state_dict["sent"])
            for sent in (earlier, self._lw_sent_by_others()):
                for name, step in sent.items():
                    self._lw_sent[name] = max(step, self._lw_sent.get(name, step))
            self._lw_sent_before = dict(self._lw_sent)

    def _lw_record(self, metrics: Metrics, step: int, extra: Mapping[str, int]) -> None:
        with self._lw_lock:
            numbers = scalars(metrics, prefix=self._prefix, group_separator=self.group_separator)
            points = {self._lw_known_as(name): value for name, value in numbers.items()}
            if self._lw_may_have_earlier:
                self._lw_pass_over_earlier(points, step)
            before = self._lw_sent_before
            if before:
                points = {name: value for name, value in points.items() if step > before.get(name, step - 1)}
            self._lw_step = max(self._lw_step, step)
            if points:
                self._lw_sent.update(dict.fromkeys(points, step))
                self._lw_note_sent()
                self._lw_send(points, step, extra)

    def _lw_pass_over_earlier(self, names: Iterable[str], step: int) -> None:
        """Send none of the steps that an earlier process has sent to the run of an id that was passed."""
        self._lw_may_have_earlier = False
        self._lw_sent = self._lw_sent_by_others()
        self._lw_sent_before = dict(self._lw_sent)
        if any(step <= self._lw_sent.get(name, step - 1) for name in names):
            warn(
                f"{type(self).__name__}: the run {self._lw_id!r} has points up to step {max(self._lw_sent.values())} "
                "from an earlier process. Points of these steps are not sent again; pass another id for a new run."
            )

    @property
    def _lw_sent_file(self) -> str | None:
        """File with the last step of each name, for the process after a crash; None if the service keeps them."""
        return None if self._lw_id is None else os.path.join(self._save_dir, f"{self._lw_id}.sent.json")

    def _lw_note_sent(self) -> None:
        # Before the points go out: after a crash in between they are missing, where otherwise they would come twice.
        path = self._lw_sent_file
        if path is not None:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            replace_file(path, json.dumps(self._lw_sent))

    def _lw_sent_by_others(self) -> dict[str, int]:
        """Return the last step of each name in this run, whichever process sent it."""
        path = self._lw_sent_file
        if path is None or not os.path.exists(path):
            return {}
        with open(path, encoding="utf-8") as file:
            sent: dict[str, int] = json.load(file)
        return sent

    def _lw_known_as(self, name: str) -> str:
        """Return the name that a metric or hyperparameter has at the service: one that no other name has."""
        known = self._lw_names.get(name)
        if known is None:
            known = self._lw_accepted(name)
            other = next((one for one, taken in self._lw_names.items() if taken == known), None)
            if other is not None:
                known = f"{known}_{zlib.crc32(name.encode()):08x}"
                warn(
                    f"{type(self).__name__}: {name!r} is recorded as {known!r}; {other!r} has its name at the service."
                )
            self._lw_names[name] = known
        return known

    def _lw_accepted(self, name: str) -> str:
        """Return the name with what the service accepts."""
        return name

    def _lw_upload_checkpoints(self) -> None:
        for path, facts in checkpoints_of(self._checkpoint_callback).items():
            changed = os.path.getmtime(path)
            if self._lw_uploaded.get(path) != changed:
                self._lw_upload(path, facts)
                self._lw_uploaded[path] = changed

    @abstractmethod
    def _lw_location_of_run(self) -> dict[str, Plain]:
        """Return what identifies the run beside its id, such as the project."""

    @abstractmethod
    def _lw_send(self, points: Mapping[str, int | float], step: int, extra: Mapping[str, int]) -> None:
        """Send points of one x."""

    @abstractmethod
    def _lw_send_hyperparameters(self, flat: Mapping[str, bool | int | float | str]) -> None:
        """Send hyperparameters that the run does not have yet."""

    @abstractmethod
    def _lw_upload(self, path: str, facts: Mapping[str, Plain]) -> None:
        """Upload a checkpoint: a file or a folder."""

    @abstractmethod
    def _lw_end(self, *, is_success: bool) -> None:
        """End the run at the service, if it was begun here."""


def checkpoints_of(callback: Owner) -> dict[str, dict[str, Plain]]:
    """Return the checkpoints that a ModelCheckpoint keeps: path to facts about each.

    Args:
        callback: The callback; missing attributes are treated as absent.
    """
    scores: dict[str, Tensor | float | None] = dict(getattr(callback, "best_k_models", None) or {})
    best = str(getattr(callback, "best_model_path", "") or "")
    last = str(getattr(callback, "last_model_path", "") or "")
    scores.setdefault(best, getattr(callback, "best_model_score", None))
    scores.setdefault(last, getattr(callback, "current_score", None))
    found: dict[str, dict[str, Plain]] = {}
    for path, score in scores.items():
        if path and os.path.exists(path):
            found[path] = {
                "score": None if score is None else float(score),
                "monitor": getattr(callback, "monitor", None),
                "mode": getattr(callback, "mode", None),
                "is_best": path == best,
                "is_last": path == last,
                "original_filename": os.path.basename(path),
            }
    return found


def require_package(module: str, *, package: str, needed_for: str, extra: str) -> None:
    """Raise unless a module can be imported; nothing is imported.

    Raises:
        MissingDependency: It is not installed.
    """
    if find_spec(module) is None:
        raise MissingDependency(package, needed_for=needed_for, extra=extra)
