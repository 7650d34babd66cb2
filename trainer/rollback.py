"""Rolling back: a fit returns to one of its checkpoints without a restart, and leaves out batches from then on.

A callback calls `prepare` in `on_train_start`, and later, at a step boundary and on every rank, `find` and `request`.
What was rolled back is kept in `rollbacks.json` in `default_root_dir`. A resumed run reads its training's part. It is
known by the first rollback, which later checkpoints hold, or by the checkpoints that the training had at a rollback.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from time import time_ns
from typing import TYPE_CHECKING, NoReturn

from ..callbacks import ModelCheckpoint, Snapshot
from ..callbacks.base import from_rank_zero
from ..callbacks.model_checkpoint.files import (
    exists,
    find_checkpoints,
    modified_ns,
    newest_first,
    normalized,
    same_file,
    set_aside,
    step_in,
)
from ..data.rng import capture_rng, restore_rng
from ..errors import CheckpointError, ConfigError
from ..files import replace_file
from ..loggers.folder import FolderLogger
from ..messages import counted
from .checkpointing import snapshot
from .checkpointing.locate import newer_in_memory, newest_intact, read_rollbacks, rollbacks_file, rollbacks_of
from .loop.fit_loop import Rewind
from .loop.schedule import step_due_schedules
from .replica_groups.healing import restore
from .run import FitRun

if TYPE_CHECKING:
    from ..protocols import StateDict
    from .trainer import Trainer

log = logging.getLogger(__name__)


class LeftOutBatches:
    """What a run was rolled back for, and the batches on which it does not train.

    Args:
        trainer: The Trainer, in fit.
        run: Its run.

    Attributes:
        path: The file.
        entries: One for each rollback of this training, the oldest first, as in the file.
        listeners: Callbacks by name, and what they call after a return to where they had rolled back to.
    """

    def __init__(self, trainer: Trainer, run: FitRun) -> None:
        self.path = rollbacks_file(trainer)
        self.reading = _reading(run)
        self.entries: list[StateDict] = from_rank_zero(trainer, lambda: self._read(trainer, run))
        self._before = from_rank_zero(trainer, lambda: {path: modified_ns(path) for path in _all_files(trainer)})
        self.listeners: list[tuple[str, Callable[[StateDict], None]]] = []
        for one in self._ahead(run):
            if one["reading"] != self.reading:
                raise ConfigError(
                    f"{self.path} leaves out batches {one['batches']} of epoch {one['epoch']}, counted with "
                    f"{one['reading']}; this run reads with {self.reading}.",
                    fix="resume with the number of ranks and the batch size that the file names, or remove the file to "
                    "train on these batches.",
                )
        if any(self._ahead(run)) and trainer.is_global_zero:
            log.info("%s: %d ranges of batches are left out; remove it for other data", self.path, len(self.entries))

    def _read(self, trainer: Trainer, run: FitRun) -> list[StateDict]:
        """Return the entries of this training: it has made them, or resumes from a checkpoint before them.

        Other trainings, perhaps of other data, may have theirs in the same file.
        """
        everyone, resumed = read_rollbacks(self.path), trainer.ckpt_path
        if not everyone or trainer._lw_saving.is_elsewhere:  # of a replay
            return everyone
        known = run.progress.rolled_back_ns
        entries = rollbacks_of(everyone, known, resumed)
        if known and not entries:
            raise ConfigError(
                f"Expected in {self.path} the rollbacks of this training, got those of another one.",
                fix="restore the file, and give trainings that run at the same time a default_root_dir each.",
            )
        if resumed is not None and not entries:
            log.warning("%s is not read: no training in it had the checkpoint %s at a rollback", self.path, resumed)
        return entries

    def _ahead(self, run: FitRun) -> list[StateDict]:
        here = (run.progress.epochs, run.progress.batches_in_epoch)
        return [one for one in self.entries if one["left_out"] and (one["epoch"], one["batches"][1]) >= here]

    def of(self, callback: str) -> list[StateDict]:
        """Return the entries of a callback's rollbacks."""
        return [one for one in self.entries if one["callback"] == callback]

    def call(self, callback: str, then: Callable[[StateDict], None], step: int) -> None:
        """Call a function with the last entry of a callback if the run is at the step to which that had gone back."""
        last = next(reversed(self.of(callback)), None)
        if last is not None and last["to_step"] == step:
            then(last)

    def of_files(self, trainer: Trainer, path: str, step: int) -> StateDict:
        """Return the part of an entry about files. On rank 0.

        They are the checkpoints of this run after the one to return to, with their modification times; those that stay,
        by which a resumed run knows its training; and the time of the return, by the clock of their file system, or by
        that of this process if it is later.
        """
        modified = modified_ns(path)
        found = {one: modified_ns(one) for one in _all_files(trainer) if self.is_of_run(one)}
        is_copy = path not in found  # in memory: what has its step may stay
        after = {one: time for one, time in found.items()
                 if (_step(one) > step if is_copy else (_step(one), time) > (step, modified))}  # fmt: skip
        abandoned = {one: time for one, time in after.items() if not same_file(one, path)}
        kept = {one: time for one, time in found.items() if one not in abandoned} | {path: modified}
        resumed = trainer.ckpt_path
        if resumed is not None and exists(resumed):
            kept[normalized(resumed)] = modified_ns(resumed)
        now = max(time_ns(), modified)
        first = self.entries[0]["training"] if self.entries else now
        return {"abandoned": abandoned, "kept": kept, "time_ns": now, "training": first}

    def is_of_run(self, path: str) -> bool:
        """Whether this run has written the file. On rank 0."""
        return self._before.get(path) != modified_ns(path)

    def add(self, entry: StateDict, trainer: Trainer) -> None:
        """Keep what the run is rolled back for, before it is: a run that is killed meanwhile leaves it out, too.

        Raises:
            ConfigError: Another run writes this file.
        """
        self.entries.append(entry)
        from_rank_zero(trainer, self._write)

    def _write(self) -> None:
        earlier, training = self.entries[:-1], self.entries[0]["training"]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        everyone = read_rollbacks(self.path)
        if rollbacks_of(everyone, training, None) != json.loads(json.dumps(earlier)):
            raise ConfigError(
                f"Expected in {self.path} the {counted(len(earlier), 'rollback')} of this training, got another list.",
                fix="give each of the trainings that run at the same time its own default_root_dir.",
            )
        others = [one for one in everyone if one["training"] != training]
        replace_file(self.path, json.dumps([*others, *self.entries], indent=1))

    def around(self, train_window: Callable[[FitRun, int], bool]) -> Callable[[FitRun, int], bool]:
        """Return a function that trains on the next window, or reads it and leaves it out."""

        def train_or_leave_out(run: FitRun, size: int) -> bool:
            here = run.progress.batches_in_epoch
            for one in self.entries:
                if one["left_out"] and one["epoch"] == run.progress.epochs:
                    first, last = one["batches"]
                    if first <= here <= last:
                        _leave_out(run, last + 1 - here)
                        return True
                    if first > here:
                        size = min(size, first - here)
            return train_window(run, size)

        return train_or_leave_out


def prepare(trainer: Trainer, callback: str, then: Callable[[StateDict], None] | None = None) -> LeftOutBatches:
    """Let the present fit roll back, and leave out what earlier runs of this training have left out. On every rank.

    Args:
        trainer: The Trainer, in fit.
        callback: Name of the callback that rolls back.
        then: Called with the last entry of that callback when the run has returned to the checkpoint of the entry, also
            if another callback has returned there, and now if the run has resumed from it.

    Raises:
        ConfigError: The run cannot return to a checkpoint, or its batches are not those of the file.
    """
    run = trainer.present_run()
    assert isinstance(run, FitRun), "it is called in fit"
    if run.left_out is None:
        _refuse(trainer, run)
        run.left_out = LeftOutBatches(trainer, run)
    _, left_out = _prepared(trainer)
    if then is not None:
        later = [one["to_step"] for one in left_out.of(callback) if one["to_step"] > run.progress.steps]
        if later and trainer._lw_saving.is_elsewhere:
            raise ConfigError(
                f"Expected a checkpoint of step {later[-1]}, to which the run has returned and where {callback} has "
                f"changed something, got a replay from step {run.progress.steps}.",
                fix=f"replay a step before {later[-1]}, or one after a later checkpoint.",
            )
        left_out.listeners = [one for one in left_out.listeners if one[0] != callback] + [(callback, then)]
        left_out.call(callback, then, run.progress.steps)
    return left_out


def _prepared(trainer: Trainer) -> tuple[FitRun, LeftOutBatches]:
    run = trainer.present_run()
    assert isinstance(run, FitRun), "it is called in fit"
    assert isinstance(run.left_out, LeftOutBatches), "prepare was called"
    return run, run.left_out


def find(trainer: Trainer, last_good_step: int) -> tuple[str, int] | None:
    """Return the newest intact checkpoint of this run up to a step, and its step; None without one. On every rank.

    It is one that a `ModelCheckpoint` has written in this run, a copy of `Snapshot`, or the one that the run has
    resumed from.
    """
    trainer.wait_for_save()
    _, left_out = _prepared(trainer)
    resumed = trainer.ckpt_path

    def candidates() -> list[str]:
        found = [path for path in _written(trainer) if left_out.is_of_run(path)]
        found += [resumed] if resumed is not None and resumed not in found and exists(resumed) else []
        return [path for path in newest_first(found) if _step(path) <= last_good_step]

    found = newest_intact(trainer, candidates)
    copy = newer_in_memory(trainer, found)
    if copy is not None and from_rank_zero(trainer, lambda: _step(copy)) <= last_good_step:
        found = copy
    if found is None:
        return None
    return str(found), from_rank_zero(trainer, lambda: _step(str(found)))


def request(
    trainer: Trainer,
    checkpoint: tuple[str, int],
    *,
    callback: str,
    batches: tuple[int, int, int],
    leaves_out: bool,
    reason: str,
    details: StateDict | None = None,
) -> NoReturn:
    """Go back to a checkpoint, by leaving the hook that calls this. On every rank, at a step boundary.

    Args:
        trainer: The Trainer, in fit.
        checkpoint: What `find` returned.
        callback: Name of the callback, as in `prepare`.
        batches: The epoch, and the first and last batch in it that caused the rollback, as each rank counts them.
        leaves_out: Whether training continues without these batches.
        reason: For the log and the file.
        details: Further entries for the file, as JSON.
    """
    run, left_out = _prepared(trainer)
    epoch, *span = batches
    path, step = checkpoint
    for one in trainer.checkpoint_callbacks:
        if isinstance(one, Snapshot):
            one.return_to(trainer, path, step)
    entry: StateDict = {
        "callback": callback,
        "epoch": epoch,
        "batches": span,
        "left_out": leaves_out,
        "step": run.progress.steps,
        "to_step": step,
        "checkpoint": path,
        "reason": reason,
        "reading": left_out.reading,
        **from_rank_zero(trainer, lambda: left_out.of_files(trainer, path, step)),
        **(details or {}),
    }
    left_out.add(entry, trainer)
    raise Rewind(lambda: _go_back(trainer, run, left_out, entry))


def _go_back(trainer: Trainer, run: FitRun, left_out: LeftOutBatches, entry: StateDict) -> Callable[[], None] | None:
    path = entry["checkpoint"]
    renamed = from_rank_zero(trainer, lambda: set_aside(entry["abandoned"]))
    if trainer.is_global_zero:
        what = "left out" if entry["left_out"] else "trained on again"
        log.warning(
            "%s: back from step %d to step %d (%s); batches %s of epoch %d are %s",
            entry["reason"], entry["step"], entry["to_step"], path, entry["batches"], entry["epoch"], what,
        )  # fmt: skip
        if renamed:
            log.warning("checkpoints of the abandoned steps are renamed to %s", ", ".join(renamed))
    run.stream.close()
    run.metrics.table, run.metrics.waiting_since = run.metrics.nowhere, None
    run.watch.losses.clear()
    run.after_epoch.clear()
    run.validated, run.is_epoch_over, trainer.fit_loop.is_used_up = None, False, False
    content = snapshot.read(run.fabric, path, is_trusted=run.session.is_trusted)
    loggers = content.states.get("loggers", {})
    problem = from_rank_zero(trainer, lambda: _problem_of_loggers(run, loggers))
    if (
        problem is None
    ):  # services without a state in it had sent nothing then: they pass over what they have sent since
        snapshot.put_back_loggers(run.output, {**snapshot.logger_states(run.output), **loggers})
    put_back = restore(run, content, path)
    run.progress.rolled_back_ns = left_out.entries[0]["training"]
    trainer._lw_saving.return_to(entry["to_step"], path)
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback.return_to(trainer, path)
    for name, then in left_out.listeners:
        left_out.call(name, then, run.progress.steps)
    for restart in run.after_rollback:
        restart()

    def stop() -> NoReturn:  # last: what is saved at an error has the state of the checkpoint
        if put_back is not None:
            put_back()
        raise CheckpointError(
            f"{entry['reason']}: the run cannot return to step {entry['to_step']} ({path}), because {problem}.",
            fix="make the logger work and resume with ckpt_path='last', which continues as after the return.",
        )

    return put_back if problem is None else stop


def _problem_of_loggers(run: FitRun, states: StateDict) -> str | None:
    """Return why rows of abandoned steps would stay, or be written after the return; None without. On rank 0."""
    failing = run.output.unwritten()
    if failing:
        return f"{type(failing[0]).__name__} fails or hangs, and would write rows of abandoned steps later"
    files = [f"{index}-{type(one).__name__}" for index, one in enumerate(run.output.loggers)
             if isinstance(one, FolderLogger)]  # fmt: skip
    without = [name for name in files if name not in states]
    if without:
        return f"it was saved while a logger failed, and does not know where that was ({', '.join(without)})"
    return None


def _leave_out(run: FitRun, count: int) -> None:
    """Read batches without a step. Random numbers that reading them draws are drawn again."""
    stream, progress, rng = run.stream, run.progress, capture_rng()
    while count and stream.has_next():
        stream.next_batch()
        progress.batches_in_epoch += 1
        progress.total_batches += 1
        count -= 1
    restore_rng(rng)
    run.at_boundary, run.has_stepped = True, False
    if run.schedulers and run.is_automatic and not stream.has_next():
        step_due_schedules(run, "epoch", progress.epochs + 1)


def _reading(run: FitRun) -> str:
    """Return what a batch's number depends on."""
    size = getattr(run.stream.loader, "batch_size", None)
    ranks = run.fabric.strategy.topology.data_size
    return f"{size * ranks} samples" if isinstance(size, int) else f"{ranks} ranks"


def _written(trainer: Trainer) -> list[str]:
    """Return the checkpoints in the folders of the present callbacks, which a run can resume from. On rank 0."""
    return _in_folders([one for one in _model_checkpoints(trainer) if not one.save_weights_only])


def _all_files(trainer: Trainer) -> list[str]:
    """Return the checkpoints in the folders of the present callbacks, also of weights only. On rank 0."""
    return _in_folders(_model_checkpoints(trainer))


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]


def _in_folders(callbacks: list[ModelCheckpoint]) -> list[str]:
    folders = {one.dirpath: one.FILE_EXTENSION for one in callbacks if one.dirpath}
    return [path for folder, extension in folders.items() for path in find_checkpoints([folder], extension)]


def _step(path: str) -> int:
    step = step_in(path)
    return -1 if step is None else step


def _refuse(trainer: Trainer, run: FitRun) -> None:
    traits = run.fabric.strategy.traits
    reason = None
    if run.groups is not None:
        reason = "fault_tolerance=TorchFT(), where one group would go back without the others"
    elif trainer.accumulate_across_epochs:
        reason = "accumulate_across_epochs=True, whose windows do not begin at the same batches again"
    elif run.evaluation_weights is not None:
        reason = "a schedule-free optimizer"
    elif traits.has_stages or traits.model_axes or traits.owns_optimizers or traits.traces_lazily:
        reason = f"{type(run.fabric.strategy).__name__}; strategies ddp and fsdp can go back"
    elif trainer._lw_arguments.reproducible:
        reason = "reproducible='world'"
    elif trainer._lw_arguments.on_oom == "shrink":
        reason = "on_oom='shrink'"
    elif trainer._lw_arguments.reload_dataloaders_every_n_epochs:
        reason = "reload_dataloaders_every_n_epochs, whose loaders of earlier epochs are gone"
    if reason is not None:
        raise ConfigError(f"A rollback within a run with {reason}.", fix="leave out one of the two.")
