"""The values of `ckpt_path`: "last", "best", "hpc" or a path."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...callbacks import Checkpoint, ModelCheckpoint
from ...callbacks.base import find_state, from_rank_zero
from ...callbacks.model_checkpoint.files import (
    default_dirpaths,
    exists,
    find_checkpoints,
    is_inside,
    is_local,
    modified_ns,
    newest_first,
    normalized,
    set_aside,
    step_in,
)
from ...checkpoint import storage
from ...console import ONLY_LOGS
from ...errors import CheckpointError, ConfigError
from ...messages import warn
from ...remote import local_dir

if TYPE_CHECKING:
    from ...protocols import StateDict
    from ..trainer import Trainer

logger = logging.getLogger(__name__)

_MOST_OTHERS = 3  # that are named
_ENTRY: dict[str, type] = {"callback": str, "epoch": int, "batches": list, "left_out": bool, "to_step": int,
                           "reading": str, "time_ns": int, "training": int, "kept": dict,
                           "abandoned": dict}  # fmt: skip


def can_be_requeued(trainer: Trainer) -> bool:
    """Whether the cluster can put this job back into the queue."""
    return hasattr(trainer.fabric.cluster_environment, "requeue")


def locate(trainer: Trainer, ckpt_path: str | Path | None, verb: str, *, has_model: bool) -> str | None:
    """Return the path of the selected checkpoint, None to use the current weights.

    Args:
        trainer: Its checkpoint callbacks are searched.
        ckpt_path: A path or URL, "last", "best", "hpc", or None.
        verb: "fit", "validate", "test" or "predict".
        has_model: Whether the user passed a module; without one, evaluation means the best checkpoint.

    Raises:
        ConfigError: There is no such checkpoint.
    """
    if verb == "fit" and can_be_requeued(trainer):
        from .requeue import find_requeued

        requeued = from_rank_zero(trainer, lambda: find_requeued(trainer))
        if requeued is not None:
            return _last(trainer, requeued) if ckpt_path == "last" else requeued
    if ckpt_path is None:
        if verb == "fit" or has_model:
            return None
        warn(f"trainer.{verb}() without a module and ckpt_path loads the best checkpoint")
        ckpt_path = "best"
    if ckpt_path == "best":
        return _best(trainer, verb)
    if ckpt_path == "last":
        return _last(trainer)
    if ckpt_path == "hpc":
        return _hpc(trainer)
    if str(ckpt_path).startswith("registry"):
        raise ConfigError(f"ckpt_path={str(ckpt_path)!r}: there is no model registry.", fix="pass a path.")
    return os.path.expanduser(os.fspath(ckpt_path))


def _best(trainer: Trainer, verb: str) -> str:
    callback = trainer.checkpoint_callback
    if trainer.fast_dev_run:
        raise ConfigError("ckpt_path='best' with fast_dev_run, which saves nothing.", fix="pass a path.")
    if not isinstance(callback, ModelCheckpoint):
        raise ConfigError(
            f"trainer.{verb}(ckpt_path='best') needs a ModelCheckpoint callback.", fix="add one, or pass a path."
        )
    best = callback.best_model_path or from_rank_zero(trainer, lambda: _best_of_files(trainer, callback))
    if not best:
        raise ConfigError(
            f"trainer.{verb}(ckpt_path='best'): ModelCheckpoint has saved nothing yet, nor has an earlier run.",
            fix="train first, pass a path, or pass the module to evaluate its current weights.",
        )
    return str(best)


def _best_of_files(trainer: Trainer, callback: ModelCheckpoint) -> str | None:
    """Return the best checkpoint of an earlier process, as the newest intact one in the callback's folder names it."""
    from ...checkpoint.tools.formats import Reading, open_checkpoint

    newest = storage.newest_valid(callback.find_last(trainer), lambda path, error: warn(f"{path} is damaged: {error}"))
    if newest is None:
        return None
    states = open_checkpoint(str(newest), Reading()).tree.get("callbacks") or {}
    state = states.get(find_state(states, callback.state_key)) or {}
    best = str(state.get("best_model_path") or "")
    moved = os.path.join(os.path.dirname(str(newest)), os.path.basename(best))  # with its folder
    found = next((path for path in (best, moved) if best and exists(path)), None)
    if found is not None:
        logger.info("ckpt_path='best': %s, according to %s", found, newest)
    return found


def _last(trainer: Trainer, requeued: str | None = None) -> str | None:
    """Return the last checkpoint that is intact, or a newer state in memory; log each damaged one that is skipped.

    Args:
        trainer: Whose checkpoint callbacks are asked.
        requeued: The checkpoint of a job that was requeued; taken if it is not older.
    """
    from_rank_zero(trainer, lambda: _finish_rollback(trainer))
    paths: list[str] = []
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            paths += [path for path in callback.find_last(trainer) if path not in paths]

    def ordered() -> list[str]:
        found = newest_first(paths) if len(trainer.checkpoint_callbacks) > 1 else paths
        if trainer.state.fn != "fit" or not any(_writes_weights_only(one) for one in trainer.checkpoint_callbacks):
            return found
        return [path for path in found if _has_optimizers(path)] or found  # where none has, the fit says so

    found = newest_intact(trainer, ordered)
    if requeued is not None and from_rank_zero(trainer, lambda: found is None or _step(requeued) >= _step(found)):
        found = requeued
    found = newer_in_memory(trainer, found) or found
    if found is None:
        logger.info("ckpt_path='last': no checkpoint found, the run starts fresh")
        return None
    logger.info("resuming from %s", found, extra=ONLY_LOGS)  # with epoch and step when it was read
    others = [path for path in paths if path != found][:_MOST_OTHERS]
    if others and trainer.is_global_zero:
        shown = ", ".join(f"{path} (step {step_in(path)})" for path in others)
        logger.info("also found: %s", shown, extra=ONLY_LOGS)
    return str(found)


def rollbacks_file(trainer: Trainer) -> Path:
    """Return the file of what the trainings of this folder were rolled back for."""
    return Path(local_dir(trainer.default_root_dir)) / "rollbacks.json"


def read_rollbacks(path: Path) -> list[StateDict]:
    """Return what the file lists, of each training the oldest first; nothing if it does not exist.

    Raises:
        ConfigError: It was changed, or is another program's.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError:
        entries = None
    if not isinstance(entries, list) or any(
        not isinstance(one, dict) or any(not isinstance(one.get(key), kind) for key, kind in _ENTRY.items())
        for one in entries
    ):
        raise ConfigError(
            f"Expected a list of rollbacks, as a training writes it, in {path}, got something else.",
            fix="restore the file; without it a run trains on the samples that were left out.",
        )
    return entries


def rollbacks_of(entries: list[StateDict], rolled_back_ns: int, checkpoint: str | None) -> list[StateDict]:
    """Return the entries of one training.

    Args:
        entries: Those of all trainings in the folder.
        rolled_back_ns: What its checkpoints say since its first rollback; 0 before.
        checkpoint: One of its checkpoints, which tells the training by its name and time before that; None for no
            training.
    """
    if not rolled_back_ns and checkpoint is not None and exists(checkpoint):
        known = os.path.basename(normalized(checkpoint)), modified_ns(checkpoint)
        for one in entries:  # equal ones are of forks: the last counts
            if known in ((os.path.basename(path), time) for path, time in one["kept"].items()):
                rolled_back_ns = one["training"]
    return [one for one in entries if one["training"] == rolled_back_ns]


def _finish_rollback(trainer: Trainer) -> None:
    """Set checkpoints aside that a rollback has abandoned, if it was killed before it could. On rank 0.

    They have the names and times of the file, and lie in the folders of the callbacks: nothing else is renamed,
    wherever the file says that they lie, and a folder may have been moved.
    """
    entries = read_rollbacks(rollbacks_file(trainer))
    callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)] if entries else []
    for callback in callbacks:
        extension, given = callback.FILE_EXTENSION, callback.given_dirpath
        folders = [given] if given else default_dirpaths(trainer)
        found = [one for one in find_checkpoints(folders, extension)
                 if not is_local(one) or any(is_inside(one, folder) for folder in folders)]  # fmt: skip
        for folder in {*folders, *map(os.path.dirname, found)}:
            for entry in entries:
                named = ((os.path.basename(path), time) for path, time in entry["abandoned"].items())
                set_aside({os.path.join(folder, name): time for name, time in named if name.endswith(extension)})


def newest_intact(trainer: Trainer, find: Callable[[], list[str]]) -> str | Path | None:
    """Return the first intact checkpoint of those that rank 0 finds; log each damaged one. On every rank."""

    def skip(path: str | Path, error: Exception) -> None:
        warn(f"{path} is damaged and skipped: {error}")

    if trainer.ranks_answer and trainer.strategy.traits.shards_parameters:
        return _newest_valid(trainer, from_rank_zero(trainer, find), skip)
    return from_rank_zero(trainer, lambda: storage.newest_valid(find(), skip))


def newer_in_memory(trainer: Trainer, found: str | Path | None) -> str | None:
    """Return a state that a callback has kept since the last checkpoint; None if there is none. On every rank."""
    callbacks = [one for one in trainer.checkpoint_callbacks if one.ends_with_run]
    if not callbacks or trainer.state.fn != "fit":  # what is evaluated is on the disk
        return None
    step = from_rank_zero(trainer, lambda: -1 if found is None else _step(found))
    return next((path for one in callbacks if (path := one.find_newer(trainer, step)) is not None), None)


def _writes_weights_only(callback: Checkpoint) -> bool:
    return isinstance(callback, ModelCheckpoint) and callback.save_weights_only


def _has_optimizers(path: str) -> bool:
    """Return whether a fit can continue from a file; if it cannot be read, its verification says so."""
    if not is_local(path):
        return True
    try:
        return "optimizer_states" in storage.load(path, lazy=True, verify=False)
    except CheckpointError:
        return True


def _step(path: str | Path) -> int:
    step = step_in(str(path))
    return -1 if step is None else step


def _newest_valid(trainer: Trainer, paths: list[str], skip: Callable[[str, Exception], None]) -> str | None:
    """Return the first intact checkpoint; each rank reads its share of the files. On every rank."""
    from ...fabric.on_all_ranks import run_on_all_ranks

    for path in paths:
        try:
            run_on_all_ranks(
                trainer.strategy, partial(storage.verify_share, path, trainer.global_rank, trainer.world_size)
            )
        except CheckpointError as error:
            if trainer.is_global_zero:
                skip(path, error)
        else:
            return path
    return None


def _hpc(trainer: Trainer) -> str:
    from .requeue import numbered_checkpoints

    folder = trainer.default_root_dir
    found = from_rank_zero(trainer, lambda: numbered_checkpoints(folder))
    if not found:
        raise ConfigError(f"ckpt_path='hpc': no hpc_ckpt_N.ckpt in {folder}.", fix="pass a path, or 'last'.")
    return found[max(found)]
