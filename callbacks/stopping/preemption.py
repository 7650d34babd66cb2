"""`Preemption`: saves a checkpoint and exits with code 143 when the machine is about to be reclaimed."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CheckpointError, ConfigError, ModuleError, StopBySignal, nearest
from ..base import AnyModule, Callback, from_rank_zero
from ..model_checkpoint import files as files
from ..model_checkpoint.callback import ModelCheckpoint

if TYPE_CHECKING:
    from ...trainer import Trainer
    from ...trainer.loop.run_signals import RunSignals

_log = logging.getLogger(__name__)


class Preemption(Callback):
    """Save a checkpoint and stop all ranks at the same step when a preemption notice arrives.

    A notice is a signal at any rank (SIGTERM and those in `signals`), a file that appears, or a function that returns
    True, such as a query of the cloud's metadata service. All ranks finish the same step, rank 0 saves
    `dirpath/filename.ckpt`, and `fit` raises `StopBySignal`, a SystemExit with code 143. It has no cost per step: a
    signal handler sets a flag, and a thread polls file and function.

    `trainer.fit(..., ckpt_path="last")` resumes from the file if `dirpath` is ModelCheckpoint's. If SLURM can requeue
    the job, a notice requeues it with SLURM's own checkpoint.

    Args:
        dirpath: Directory of the checkpoint; None is the directory of the first ModelCheckpoint, or its default.
        filename: Name of the checkpoint, without extension; an existing one is overwritten.
        signals: Further signals that count as a notice. A signal that the program handles itself is not changed.
        notice_file: File that appears when the machine is about to be reclaimed; checked on each machine.
        is_noticed: Function called in a thread on each machine every `poll_s`; an exception counts as False.
        poll_s: Seconds between two checks of file and function.
        grace_s: Seconds from the notice until the machine is reclaimed; the log reports whether they sufficed.

    Raises:
        ConfigError: A signal is unknown or cannot be handled, a time is not above 0, or the file name is empty.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str = "preempted",
        *,
        signals: Iterable[str | int] = ("SIGUSR1",),
        notice_file: str | os.PathLike[str] | None = None,
        is_noticed: Callable[[], bool] | None = None,
        poll_s: float = 5.0,
        grace_s: float | None = None,
    ) -> None:
        if poll_s <= 0 or (grace_s is not None and grace_s <= 0) or not filename:
            raise ConfigError(
                f"Preemption: poll_s={poll_s}, grace_s={grace_s}, filename={filename!r}: expected times above 0 and a "
                "name.",
                fix="correct these arguments, or leave them out.",
            )
        if is_noticed is not None and not callable(is_noticed):
            raise ConfigError(
                f"Preemption: is_noticed is {type(is_noticed).__name__}, expected a function.",
                fix="pass a function without arguments that returns whether the machine is about to be reclaimed.",
            )
        self.dirpath = None if dirpath is None else files.normalized(dirpath)
        self.filename = filename
        self.signals = [_signal(one) for one in signals]
        self.notice_file = None if notice_file is None else Path(notice_file).expanduser()
        self.is_noticed = is_noticed
        self.poll_s = poll_s
        self.grace_s = grace_s
        self._lw_poll: _Poll | None = None

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Start listening."""
        if stage != "fit":
            return
        run_signals = trainer.run_signals
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                if not run_signals.listen_to(number):
                    _log.warning("Preemption: the program has a handler for %s, which is kept.", number.name)
        if trainer.local_rank == 0 and (self.notice_file is not None or self.is_noticed is not None):
            self._lw_poll = _Poll(self, run_signals)
            self._lw_poll.start()

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Save, if the run ends because of a notice."""
        self._lw_end_poll()
        run_signals = trainer.run_signals
        if not isinstance(exception, StopBySignal) or trainer.state.fn != "fit" or trainer.fast_dev_run:
            return
        if run_signals.is_to_requeue:
            return  # saved already, where the requeued job looks for it
        if trainer.world_size > 1 and not trainer.ranks_answer:
            return
        try:
            folder = self.dirpath or from_rank_zero(trainer, lambda: _beside_checkpoints(trainer))
            path = os.path.join(folder, f"{self.filename}.ckpt")
            trainer.save_checkpoint(path)
            trainer.wait_for_save()
        except (CheckpointError, ModuleError, OSError, RuntimeError):
            _log.exception("Preemption: nothing could be saved.")
            return
        if trainer.is_global_zero:
            self._lw_report(path, trainer.global_step, run_signals.requested_at_s)

    def _lw_report(self, path: str, step: int, noticed_s: float | None) -> None:
        if noticed_s is None:  # the notice arrived at another rank
            _log.warning("Preemption: saved %s at step %d.", path, step)
            return
        took_s = time.monotonic() - noticed_s
        grace = "" if self.grace_s is None else f" of {self.grace_s:.0f} s"
        late = " That was too long: take shorter steps, or a faster disk." if took_s > (self.grace_s or took_s) else ""
        _log.warning("Preemption: saved %s at step %d, %.1f s%s after the notice.%s", path, step, took_s, grace, late)

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Stop listening."""
        self._lw_end_poll()

    def _lw_end_poll(self) -> None:
        if self._lw_poll is not None:
            self._lw_poll.end()
            self._lw_poll = None


class _Poll(threading.Thread):
    """Poll for the notice until it arrives or the run ends."""

    def __init__(self, owner: Preemption, run_signals: RunSignals) -> None:
        super().__init__(name="loopwright-preemption", daemon=True)
        self._file, self._is_noticed, self._poll_s = owner.notice_file, owner.is_noticed, owner.poll_s
        self._run_signals = run_signals
        self._ended = threading.Event()
        self._has_failed = False

    def run(self) -> None:
        """Poll repeatedly."""
        while not self._ended.is_set():
            if self._has_come():
                _log.warning("Preemption: a notice has arrived; the run saves a checkpoint and ends.")
                self._run_signals.request()
                return
            self._ended.wait(self._poll_s)

    def _has_come(self) -> bool:
        if self._file is not None and self._file.exists():
            return True
        if self._is_noticed is None:
            return False
        try:
            return bool(self._is_noticed())
        # The user's function may query a service that is temporarily unavailable; training continues.
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                _log.warning("Preemption: is_noticed failed and is called again: %s: %s", type(error).__name__, error)
            return False

    def end(self) -> None:
        """Stop polling. A call in progress is not waited for."""
        self._ended.set()


def _beside_checkpoints(trainer: Trainer) -> str:
    """Return the folder in which `ckpt_path="last"` looks."""
    own = [one.dirpath for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint) and one.dirpath]
    return str(own[0]) if own else files.normalized(files.default_dirpath(trainer))


def _signal(one: str | int) -> signal.Signals:
    names = signal.Signals.__members__
    try:
        number = names[one] if isinstance(one, str) else signal.Signals(one)
    except (KeyError, ValueError):
        hint = nearest(one, names) if isinstance(one, str) else ""
        raise ConfigError(
            f"Preemption: {one!r} is not a signal of this system{hint}.", fix="pass names such as 'SIGUSR1'."
        ) from None
    if number.name in ("SIGKILL", "SIGSTOP", "SIGINT"):
        raise ConfigError(
            f"Preemption: {number.name} cannot be a notice.", fix="pass another signal, such as 'SIGUSR1'."
        )
    return number
