"""Lines that a run logs: what a fit runs on, why it ended, and where checkpoints and logs are."""

from __future__ import annotations

import logging
import math
import os
import shlex
import shutil
import socket
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..callbacks import ModelCheckpoint
from ..console import LINES, is_configured
from ..errors import RankFailure, StopBySignal
from ..fabric.seed import known_seed
from ..messages import counted
from ..remote import is_url
from ..tracebacks import end_in_silence, end_with_line

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)

_COLUMNS = 80  # a longer line would be broken within a path by most terminals
_PYTHON_TRACEBACK = "\nTraceback (most recent call last)"  # of an exception, which its rank prints


def tell_beginning(trainer: Trainer) -> None:
    """Log devices, strategy, precision and seed; once per fit, when all processes have started."""
    if not trainer._lw_reports_runs:
        return
    ranks = counted(trainer.world_size, "rank")
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    seed = known_seed()
    logger.info(
        "Training on %s, %s%s, %s, precision %s, %s.",
        _device(trainer),
        ranks,
        nodes,
        type(trainer.strategy).__name__,
        trainer.precision,
        "no seed" if seed is None else f"seed {seed}",
    )
    loop = trainer.fit_loop
    if loop.max_epochs is None and loop.epoch_limit != -1:
        logger.info("No limit was set: training ends after max_epochs=%d, the default.", loop.epoch_limit)


def _device(trainer: Trainer) -> str:
    device = trainer.strategy.device
    if device.type != "cuda":
        return device.type
    return f"cuda ({torch.cuda.get_device_name(device)})"


def tell_end(trainer: Trainer, seconds: float) -> None:
    """Log why a fit ended, its best and last checkpoint, and how to view its logs.

    Args:
        trainer: Its trainer.
        seconds: How long it took.
    """
    if not trainer._lw_reports_runs:
        return
    progress, took = trainer.progress, timedelta(seconds=round(seconds))
    steps = counted(trainer.global_step, "step")
    epochs = counted(progress.epochs, "epoch")
    where = f"in epoch {progress.epochs}, after" if progress.epoch_open else f"after {epochs},"
    line, why = f"Training ended {where} {steps}, {took}:", f"{reason(trainer)}."
    logger.info("%s", f"{line} {why}" if len(line) + len(why) < _COLUMNS else f"{line}\n  {why}")
    for straggler in trainer.timeline.stragglers():
        logger.info("Slow: %s.", straggler)
    _warn_of_no_step(trainer)
    _warn_of_nan(trainer)
    if trainer.fast_dev_run:
        return
    logger.info("%s", _listed("Checkpoints", checkpoints(trainer)))
    trainer._lw_told_logs = place_of_logs(trainer)
    logger.info("%s", logs(trainer))


def tell_logs(trainer: Trainer) -> None:
    """Log where an evaluation has logged its metrics, unless the line of a verb before it says the same."""
    if trainer._lw_reports_runs and trainer.logged_metrics and trainer.loggers and not trainer.fast_dev_run:
        place = place_of_logs(trainer)
        if place != trainer._lw_told_logs:
            trainer._lw_told_logs = place
            logger.info("%s", place)


def _warn_of_no_step(trainer: Trainer) -> None:
    """Warn of data without batches, and of manual optimization in which no optimizer was stepped."""
    if trainer.progress.epochs and not trainer.progress.total_batches and trainer.limit_train_batches != 0:
        logger.warning("Nothing was trained: the training data has no batches.")
    module = trainer.lightning_module
    is_manual = module is not None and not getattr(module, "automatic_optimization", True)
    if is_manual and trainer.optimizers and trainer.progress.total_batches and not trainer.global_step:
        logger.warning(
            "No optimizer was stepped: automatic_optimization is False, and training_step did not call step() of "
            "any of self.optimizers(). If it updates parameters itself, call self.count_step() before."
        )


def _warn_of_nan(trainer: Trainer) -> None:
    """Warn of metrics that end NaN or infinite, and name the first batch whose loss was. Reads the metrics' device."""
    last = {name: float(value.detach()) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    bad = [f"{name} = {value}" for name, value in last.items() if not math.isfinite(value)]
    run = trainer.present_run()
    first = None if run is None else run.watch.first_bad
    if not bad and first is None:
        return
    parts = [f"the last values are {', '.join(bad)}"] if bad else []
    if first is not None:
        parts.append(f"the training loss was {first[1]} first at batch {first[0]} (0 is the first batch of training)")
    logger.warning("Not finite: %s.", "; ".join(parts))


def reason(trainer: Trainer) -> str:
    """Return why training ended: the limit that was reached, or what requested it."""
    loop = trainer.fit_loop
    if loop.stops_here and not loop.is_at_limit:
        return _request(trainer)
    if trainer.fast_dev_run:
        return "fast_dev_run, a trial that saves nothing"
    if trainer.limit_train_batches == 0:
        return "limit_train_batches=0"
    if loop.is_used_up and loop.data_limits:
        return f"{' or '.join(f'{name}={value}' for name, value in loop.data_limits.items())} is reached"
    if loop.max_steps != -1 and trainer.global_step >= loop.max_steps:
        return f"max_steps={loop.max_steps} is reached"
    if loop.epoch_limit != -1 and trainer.progress.epochs >= loop.epoch_limit:
        return f"max_epochs={loop.epoch_limit}{'' if loop.max_epochs is not None else ', the default,'} is reached"
    return _request(trainer)


def _request(trainer: Trainer) -> str:
    """Return what requested the end."""
    for callback in trainer.callbacks:
        asked = callback.stop_reason
        if isinstance(asked, str) and asked:  # a subclass may use the name for something else
            return f"{type(callback).__name__}, {asked.rstrip('.')}"
    return "trainer.should_stop was set"


def _listed(heading: str, parts: list[str]) -> str:
    """Return parts as a line; if that is longer than a usual terminal is wide, as a line for each."""
    line = f"{heading}: {', '.join(parts)}."
    return line if len(line) <= _COLUMNS else "\n  ".join((f"{heading}:", *parts))


def checkpoints(trainer: Trainer) -> list[str]:
    """Return the best and the last checkpoint of a fit, in words."""
    callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    if not callbacks:
        return ["none (no ModelCheckpoint)"]
    found = []
    for callback in callbacks:
        best, last = callback.best_model_path, callback.last_model_path
        if best:
            score = callback.best_model_score
            value = "" if score is None else f" ({callback.monitor} = {float(score):.4g})"
            found.append(f"{'best' if callback.monitor else 'newest'} {shown(best)}{value}")
        if last and last != best:
            found.append(f"last {shown(last)}")
    return found or ["none was due"]


def logs(trainer: Trainer) -> str:
    """Return where the logs are, and the command that makes a report of them, unless there is nothing to report."""
    place, folders = place_of_logs(trainer), _folders(trainer)
    if not folders:
        return place
    reported = next((one for one in folders if is_url(one) or _holds_metrics(one)), None)
    if reported is None:
        why = (
            f"log_every_n_steps={trainer.log_every_n_steps}" if trainer.callback_metrics else "nothing called self.log"
        )
        return place + ("" if trainer.logged_metrics else f" (no metrics: {why})")
    command = "loopwright" if shutil.which("loopwright") else f"{shown(sys.executable)} -m loopwright"
    needs = "" if find_spec("plotly") else " (after pip install 'loopwright[report]')"
    page = f"page of curves: {command} report {shlex.quote(shown(reported))}{needs}"
    line = f"{place}; {page}"
    return line if len(line) <= _COLUMNS else f"{place}\n  {page}"


def place_of_logs(trainer: Trainer) -> str:
    """Return the folder of the first logger that has one; else what the loggers are."""
    if not trainer.loggers:
        return "Logs: none (no logger)."
    folders = _folders(trainer)
    return f"Logs: {shown(folders[0]) if folders else ', '.join(type(one).__name__ for one in trainer.loggers) + '.'}"


def _folders(trainer: Trainer) -> list[str]:
    return [str(folder) for one in trainer.loggers if (folder := getattr(one, "log_dir", None))]


def _holds_metrics(folder: str) -> bool:
    """Whether `loopwright report` finds something in a logger's folder."""
    from ..report.sources import find_sources

    return bool(find_sources(Path(folder)))


def shown(path: str) -> str:
    """Return a path for messages: relative where it is below the current folder."""
    if "://" in path:
        return path
    if not os.path.isabs(path):
        return os.path.normpath(path) if path else ""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _tell_interruption(trainer: Trainer, error: BaseException) -> None:
    """Log in one line where Ctrl-C or a signal ended a fit, what was saved, and how to continue.

    An uncaught KeyboardInterrupt prints nothing more.
    """
    if trainer.is_global_zero:
        path = trainer._lw_saving.path_at(trainer.global_step) if trainer.state.fn == "fit" else None
        if trainer.state.fn != "fit":
            rest = "."
        elif path is None and (kept := _kept_step(trainer)) >= 0:
            how = trainer._lw_saving.how_to_continue or "trainer.fit(..., ckpt_path='last')"
            rest = f": a copy of step {kept} is in memory; continue with {how}"
        elif path is None:
            earlier = _newest(trainer)
            how = trainer._lw_saving.how_to_continue or f"trainer.fit(..., ckpt_path={shown(earlier or '')!r})"
            rest = ": nothing was saved; " + (
                f"continue from the last checkpoint with {how}"
                if earlier
                else "add ModelCheckpoint(save_on_exception=True)"
            )
        else:
            how = trainer._lw_saving.how_to_continue or f"trainer.fit(..., ckpt_path={_how_to_name(trainer, path)!r})"
            rest = f": saved in {shown(path)}; continue with {how}"
        where = "between two steps, " if trainer.at_step_boundary else ""
        place = f"{where}in epoch {trainer.progress.epochs}, after {counted(trainer.global_step, 'step')}"
        line = f"{trainer.state.fn} was interrupted {place}{rest}"
        logger.info("%s", line if len(line) <= _COLUMNS else line.replace(": ", ":\n  ", 1).replace("; ", ";\n  ", 1))
    if isinstance(error, KeyboardInterrupt):
        if is_configured() or LINES.level_set > logging.INFO:
            end_with_line(error, "KeyboardInterrupt")
        else:
            end_in_silence(error)


def _newest(trainer: Trainer) -> str:
    """Return the checkpoint to continue from; "" if there is none."""
    callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    return next((path for one in callbacks if (path := one.last_model_path or one.best_model_path)), "")


def _kept_step(trainer: Trainer) -> int:
    return max((one.kept_step(trainer) for one in trainer.checkpoint_callbacks), default=-1)


def _how_to_name(trainer: Trainer, path: str) -> str:
    return "last" if any(isinstance(one, ModelCheckpoint) for one in trainer.checkpoint_callbacks) else path


def tell_failure(trainer: Trainer, error: BaseException) -> None:
    """Log an interruption; print the failure of another rank as one line.

    That rank prints its traceback, which is not repeated where it is on this machine. One that a signal ended prints
    nothing: its stack is in this error alone.
    """
    if isinstance(error, KeyboardInterrupt | StopBySignal):
        _tell_interruption(trainer, error)
    if not isinstance(error, RankFailure):
        return
    first = error.what.splitlines()[0]
    if f"(host {socket.gethostname()}," in first and _PYTHON_TRACEBACK in error.what:
        end_with_line(error, f"rank {trainer.global_rank} stops: {first}")
