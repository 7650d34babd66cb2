"""`ModelCheckpoint`: the schedule, the names and the retention of checkpoints.

A new file is complete before an older one is removed: the checkpoint state is updated, the file is written (so that it
names itself), `last` is updated, and then replaced files are removed. The state lists these files, so that a resumed
run repairs what a kill in between left behind.

With background saves (AsyncCheckpointIO), the steps after writing run in `Saving.then`. Before the next save
they have run, or the checkpoint state has been restored.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from ...console import ONLY_LOGS
from ...errors import CheckpointError, StopBySignal
from ...remote import is_url
from ...strategies.distributed.shards import local
from ..averaging.base import StepAveraging
from ..base import AnyModule, Checkpoint, find_state, from_rank_zero
from . import files as files
from .arguments import check_arguments, check_restore_best
from .interval import TimeInterval
from .names import COUNTERS, missing_metric, render_name, template_names
from .removal import CheckpointRemoval, remove_or_warn
from .rules import SaveRules
from .state import CheckpointState, score_tensor
from .writing import link_or_copy, link_or_warn, make_way, notify_loggers

if TYPE_CHECKING:
    from ...protocols import AnyBatch, AnyOutput, StateDict
    from ...trainer import Trainer

_log = logging.getLogger(__name__)


class ModelCheckpoint(Checkpoint):
    """Write checkpoints every n epochs, every n steps or at a time interval, and keep the best k or the newest.

    A metric in the file name or used as monitor must belong to the step of the checkpoint. If it is older when a save
    is due, the save waits for the next validation; `last` is written at once, because it needs no metric.

    With several ranks, metrics are reduced over all ranks. Rank 0 decides on names, scores and times, and is the only
    rank that accesses files; its errors are raised on all ranks.

    Args:
        dirpath: Directory or URL. None is "checkpoints" in the first logger's directory, else in `default_root_dir`.
        filename: Template of file names, such as "{epoch}-{val_loss:.3f}"; None is "{epoch}-{step}".
        monitor: Name of the logged metric that ranks checkpoints. None: the newest checkpoint is the best.
        verbose: Whether each save is logged.
        save_last: Whether "last.ckpt" is written at every save; "link" makes it a link to the newest file.
        save_top_k: Number of checkpoints to keep: the best ones, without `monitor` the newest; -1 for all, 0 for none.
        keep_last: Number of the newest checkpoints to keep as well, whatever their scores. None is 0.
        restore_best: Whether the module has the weights of the best checkpoint when fit has ended, instead of the last;
            with `WeightAveraging` and its subclasses the average at that checkpoint, which had the score. Not after an
            error or Ctrl-C.
        save_on_exception: Whether a checkpoint is written when training fails or is interrupted.
        save_weights_only: Whether to omit optimizers, schedules and callbacks; such a file cannot be resumed.
        mode: "min" if a smaller metric is better, else "max".
        auto_insert_metric_name: Whether file names contain "name=value" instead of the value.
        every_n_train_steps: Number of optimizer steps between saves.
        train_time_interval: Time between saves, which happen at step boundaries. With several ranks a save may be late
            if steps become slower, because ranks do not communicate at every step.
        every_n_epochs: Number of epochs between saves; 0 for never. None is 1 if no other interval is passed.
        save_on_train_epoch_end: Whether to save at the end of training epochs, else of validations. None: at the end of
            epochs if each ends with a validation or if validation is disabled.
        enable_version_counter: Whether an existing name gets "-v1", "-v2", ...; otherwise the file is overwritten.

    Attributes:
        rules: Functions that a layer for another library can replace; see `SaveRules`.
        checkpoint_state: Kept files and scores, for libraries that save by themselves.
        written_step: `global_step` of the newest file of this run; -1 before the first.
        saves_at_epoch_end: Whether saves follow training epochs, else validations; known when training begins.
        given_dirpath: Directory that was passed or assigned; None for the default.

    Raises:
        ConfigError: Arguments are invalid; all are named. At the start of training: the directory is not writable, or
            `restore_best` cannot be combined with other callbacks.
        ModuleError: After the first validation, or after the first epoch if its end may log more: no logged metric has
            the name `monitor`.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1
    rules = SaveRules()

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        keep_last: int | None = None,
        restore_best: bool = False,
    ) -> None:
        super().__init__()
        if every_n_train_steps is None and train_time_interval is None and every_n_epochs is None:
            every_n_epochs = 1
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.keep_last = keep_last
        self.restore_best = restore_best
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.filename = filename
        self.dirpath = dirpath
        self._every_n_train_steps = every_n_train_steps or 0
        self._every_n_epochs = every_n_epochs or 0
        self._train_time_interval = train_time_interval
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._enable_version_counter = enable_version_counter
        check_arguments(
            monitor=monitor,
            mode=mode,
            filename=filename,
            dirpath=self.dirpath,
            save_last=save_last,
            save_top_k=save_top_k,
            keep_last=keep_last,
            restore_best=restore_best,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=train_time_interval,
        )

        self.checkpoint_state = self._lw_empty_state()

        # This run's.
        self._lw_loading_in: str | None = None
        self._lw_loaded_dirpath: str | None = None
        self._lw_continues_last = False
        self._lw_may_remove_resumed = False
        self._lw_overwritable: set[str] = set()
        self.saves_at_epoch_end = True
        self._lw_is_training = False
        self._lw_start_step = 0
        self.written_step = -1  # global_step of the newest file of this run
        self._lw_validated = False
        self._lw_reported: set[str] = set()  # missing metrics that a line has named
        self._lw_interval: TimeInterval | None = None
        if train_time_interval is not None:
            self._lw_interval = TimeInterval(train_time_interval)

    # --- what users read -------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint: monitor, mode and triggers distinguish instances."""
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self._train_time_interval,
        )

    @property
    def dirpath(self) -> str | None:
        """Directory of the checkpoints; if not passed, None until fit starts. It may be assigned before fit."""
        return self._lw_dirpath

    @dirpath.setter
    def dirpath(self, dirpath: str | os.PathLike[str] | None) -> None:
        if dirpath is not None and is_url(dirpath):
            from ...remote.store import check_protocol

            check_protocol(os.fspath(dirpath), "dirpath")
        self._lw_dirpath = self.given_dirpath = None if dirpath is None else files.normalized(dirpath)

    @property
    def every_n_epochs(self) -> int:
        """Number of epochs between two saves; 0 if saves do not depend on epochs."""
        return self._every_n_epochs

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint, or of the newest without monitor; empty without any. It may be assigned."""
        return self.checkpoint_state.best_path

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self.checkpoint_state.best_path = path

    @property
    def best_model_score(self) -> Tensor | None:
        """Score of the best checkpoint: shape (), on the CPU; None without monitor."""
        score = self.checkpoint_state.best_score
        return None if score is None else score_tensor(score)

    @best_model_score.setter
    def best_model_score(self, score: Tensor | float | None) -> None:
        self.checkpoint_state.best_score = None if score is None else float(score)

    @property
    def last_model_path(self) -> str:
        """Path of `last`; empty if there is none."""
        return self.checkpoint_state.last_path

    @last_model_path.setter
    def last_model_path(self, path: str) -> None:
        self.checkpoint_state.last_path = path

    @property
    def current_score(self) -> Tensor | None:
        """Score of the latest checkpoint that was considered: shape (), on the CPU; None without monitor."""
        score = self.checkpoint_state.current_score
        return None if score is None else score_tensor(score)

    @current_score.setter
    def current_score(self, score: Tensor | float | None) -> None:
        self.checkpoint_state.current_score = None if score is None else float(score)

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """Path -> score (shape (), on the CPU) of the kept checkpoints."""
        return {path: score_tensor(score) for path, score in self.checkpoint_state.top_k.scores.items()}

    @best_k_models.setter
    def best_k_models(self, scores: Mapping[str, Tensor | float]) -> None:
        self.checkpoint_state.top_k.scores = {path: float(score) for path, score in scores.items()}

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst kept checkpoint, which the next better one replaces; empty while fewer than k are kept."""
        return self.checkpoint_state.top_k.kth_path if self.save_top_k != -1 else self.checkpoint_state.top_k.worst_path

    @property
    def kth_value(self) -> Tensor:
        """Score that a new checkpoint must beat: shape (), on the CPU; the worst possible if fewer than k are kept."""
        top_k = self.checkpoint_state.top_k
        return score_tensor(top_k.scores[top_k.kth_path] if top_k.kth_path else top_k.worst_score)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | float | None = None) -> bool:
        """Whether a checkpoint with this score would be kept; the same on all ranks."""
        if current is None:
            return False
        return bool(trainer.strategy.reduce_boolean_decision(self.checkpoint_state.top_k.accepts(float(current))))

    def file_exists(self, filepath: str, trainer: Trainer) -> bool:
        """Whether a file or folder of this name exists for rank 0; the same on all ranks."""
        return from_rank_zero(trainer, lambda: files.exists(filepath))

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Tensor | float],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path for these metrics (with "epoch" and "step" among them).

        Args:
            metrics: Values by name.
            filename: Template instead of the constructor's.
            ver: Version that is added as "-v{ver}".
            prefix: Text before the name.

        Returns:
            The path, in which a missing metric is 0.
        """
        template = filename or self.filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        name = render_name(
            template,
            metrics,
            insert_names=self.auto_insert_metric_name,
            equals=self.CHECKPOINT_EQUALS_CHAR,
            number_format=self.rules.number_format,
        )
        parts = [part for part in (prefix, name, None if ver is None else f"v{ver}") if part]
        name = self.CHECKPOINT_JOIN_CHAR.join(parts) + self.FILE_EXTENSION
        return os.path.join(self.dirpath, name) if self.dirpath else name

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write paths and scores of the kept checkpoints to a YAML file; None is best_k_models.yaml in `dirpath`."""
        path = os.fspath(filepath) if filepath else os.path.join(self.dirpath or "", "best_k_models.yaml")
        with open(path, "w", encoding="utf-8") as file:
            rows = [f"{json.dumps(path)}: {score}\n" for path, score in self.checkpoint_state.top_k.scores.items()]
            file.writelines(rows or ["{}\n"])

    def find_last(self, trainer: Trainer) -> list[str]:
        """Return the checkpoints that `ckpt_path="last"` may resume from, the last step first.

        These are all checkpoints in `dirpath` if it was passed, else of all versions of the first logger, because a
        restarted run opens a new version. Unfinished files are omitted; damaged ones are not, because the caller
        verifies them.
        """
        self._lw_continues_last = True

        def find() -> list[str]:
            folders = [self.given_dirpath] if self.given_dirpath else files.default_dirpaths(trainer)
            return files.newest_first(files.find_checkpoints(folders, self.FILE_EXTENSION))

        return from_rank_zero(trainer, find)

    def return_to(self, trainer: Trainer, path: str) -> None:
        """Continue from a checkpoint within a fit, as a resumed run does. On every rank, when the state is loaded.

        Args:
            trainer: The Trainer, in fit.
            path: The checkpoint; files of later steps are gone.
        """
        if self.dirpath is None or self._lw_is_inert(trainer):
            return
        self._lw_compare_folders(self.dirpath)
        named, may_remove = trainer.ckpt_path, self._lw_may_remove_resumed
        trainer.ckpt_path, self._lw_continues_last = path, True
        try:
            self._lw_begin_training(trainer)
        finally:
            trainer.ckpt_path, self._lw_may_remove_resumed = named, may_remove
        state = self.checkpoint_state
        state.forget(from_rank_zero(trainer, lambda: {one for one in state.files() if not files.exists(one)}))

    # --- hooks -----------------------------------------------------------------------------------------------------

    def forget_run(self) -> None:
        """Reset the checkpoint state; the files of the other run are kept."""
        self.checkpoint_state = self._lw_empty_state()
        self._lw_loaded_dirpath = None

    def _lw_empty_state(self) -> CheckpointState:
        newest = max(self.keep_last or 0, self.save_top_k if self.monitor is None else 0)
        top_k = self.rules.top_k_type(self.save_top_k, self.mode)
        return CheckpointState(top_k, num_newest=0 if self.save_top_k == -1 else newest)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Record the verb for which the state is loaded."""
        self._lw_loading_in = trainer.state.fn

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Determine the directory; the loggers know their version by now."""
        if self.restore_best:
            check_restore_best(self, trainer)
        if trainer._lw_saving.is_elsewhere:
            return

        def decide() -> tuple[str, CheckpointState]:
            dirpath = self.given_dirpath or files.normalized(files.default_dirpath(trainer))
            if not trainer.fast_dev_run:
                files.check_dirpath(dirpath)
                files.write_trial(dirpath)
            return dirpath, self.checkpoint_state

        # The state, too: a rank that failed alone does not know the result of the last background save.
        dirpath, self.checkpoint_state = from_rank_zero(trainer, decide)
        self._lw_compare_folders(dirpath)
        self._lw_dirpath = dirpath

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Check the settings, remove leftovers of a killed run, and start the clock."""
        self._lw_begin_training(trainer)

    def _lw_begin_training(self, trainer: Trainer) -> None:
        self.saves_at_epoch_end = self._lw_resolve_at_epoch_end(trainer)
        self._lw_is_training = True
        self._lw_start_step = trainer.global_step
        self.written_step = -1
        self._lw_validated = False
        if self._lw_interval is not None:
            self._lw_interval.begin(trainer)
        if trainer.fast_dev_run or self.dirpath is None or trainer._lw_saving.is_elsewhere:
            return
        self._lw_overwritable = from_rank_zero(trainer, lambda: self._lw_prepare_folder(trainer))
        self.checkpoint_state.pending_removals = []
        # A file that was named in ckpt_path may be named again; "last" will find a newer one.
        self._lw_may_remove_resumed, self._lw_continues_last = self._lw_continues_last, False

    def _lw_prepare_folder(self, trainer: Trainer) -> set[str]:
        """Check the directory and remove leftovers of a killed run; return the files that may be overwritten."""
        self._lw_warn_of_settings(trainer)
        files.remove_unfinished(str(self.dirpath))
        removal = self._lw_removal(trainer)
        removal.remove_leftovers()
        if not (self._lw_continues_last and removal.resumed_path):
            return set()
        if self.save_last:
            removal.complete_last(trainer.global_step, is_link=self.save_last == "link")
        return removal.find_passed_over(self.FILE_EXTENSION)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Save if a step or time interval has passed."""
        interval = self._lw_interval
        if self._every_n_train_steps:
            step = trainer.global_step
            if not step or step % self._every_n_train_steps:
                return
        elif interval is None:
            return
        if not trainer.at_step_boundary or self._lw_is_inert(trainer):
            return
        if interval is not None:
            if not interval.is_over(trainer):
                return
            interval.begin(trainer)
        self.rules.trigger(self, trainer, strict=False)

    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Save if saves follow validations, or if a save waits for this validation's metrics."""
        if self._lw_is_inert(trainer):
            return
        self._lw_validated = True
        # A metric of training may follow at the end of the epoch.
        strict = not any(map(trainer._lw_may_log_at_epoch_end, self.score_metrics()))
        if not self.saves_at_epoch_end and self._lw_is_epoch_due(trainer):
            self.rules.trigger(self, trainer, strict=strict)
        elif self.checkpoint_state.is_waiting:
            self._lw_save_if_fresh(trainer, strict=strict)
        elif self.saves_at_epoch_end and self._lw_is_epoch_due(trainer) and self._lw_is_scored_by(trainer):
            trainer._lw_saving.keep_validated()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Save if saves follow epochs, or if a save waits for metrics of the epoch."""
        if self._lw_is_inert(trainer):
            return
        strict = self._lw_validated or not trainer.enable_validation
        if self.saves_at_epoch_end and self._lw_is_epoch_due(trainer):
            self.rules.trigger(self, trainer, strict=strict)
        elif self.checkpoint_state.is_waiting:
            self._lw_save_if_fresh(trainer, strict=strict)

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Update `last` at the end of training."""
        self._lw_is_training = False
        # A resumed run that had no step left may have been killed right before it wrote `last`.
        is_behind = 0 <= self.checkpoint_state.last_step < trainer.global_step
        if self._lw_is_inert(trainer) or (trainer.global_step == self._lw_start_step and not is_behind):
            return
        if self.checkpoint_state.is_waiting and trainer.is_global_zero:
            _log.warning(
                "ModelCheckpoint: the checkpoint that was due at step %d is not written, because training ended before "
                "a value of %s was computed at a later validation or epoch end.",
                self.checkpoint_state.triggered_step,
                ", ".join(map(repr, self.score_metrics())),
            )
        is_wanted = self.rules.updates_last_alone or self.written_step < 0
        if self.save_last and is_wanted and self.checkpoint_state.last_step != trainer.global_step:
            self.write_last_alone(trainer)
        self._lw_finish_before(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Load the weights of the best checkpoint, if requested; all last files are written by now."""
        if not self.restore_best or self._lw_is_inert(trainer):
            return
        self._lw_finish_before(trainer)
        if self.best_model_path:
            states = trainer._lw_saving.load_weights(self.best_model_path)
            for callback in trainer.callbacks:
                if isinstance(callback, StepAveraging) and (key := find_state(states, callback.state_key)) is not None:
                    callback.take_over(trainer, pl_module, states[key])
            _log.info("ModelCheckpoint: the module has the weights of %s.", self.best_model_path)
        elif trainer.is_global_zero:
            _log.warning("ModelCheckpoint: restore_best=True, but no checkpoint was written: the module is unchanged.")

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Save the current state; no other checkpoint is removed or overwritten."""
        was_training, self._lw_is_training = self._lw_is_training, False
        if not self.save_on_exception or not was_training or self._lw_is_inert(trainer):
            return
        if not (trainer.ranks_answer or trainer.is_global_zero):
            return  # after an error the ranks cannot synchronize: rank 0 saves its own state
        step = trainer.global_step
        if step in (self._lw_start_step, self.written_step) or isinstance(exception, CheckpointError):
            return
        if trainer.strategy.traits.shards_parameters and trainer.world_size > 1 and not trainer.ranks_answer:
            _log.warning(
                "ModelCheckpoint: nothing is saved on %s of this rank: the model is sharded, and the others do not "
                "respond. Resume from the last checkpoint.",
                type(exception).__name__,
            )
            return
        if not self._lw_is_finite(trainer, pl_module):
            _log.warning("ModelCheckpoint: nothing is saved on %s: weights are not finite.", type(exception).__name__)
            return
        self._lw_synchronize(trainer)
        is_stale = bool(self._lw_stale_metrics(trainer, self._lw_needed_metrics()))
        template = f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}" if is_stale else None
        path = self._lw_free_path(trainer, self.rules.metrics(self, trainer), template, own=())
        self.written_step = step
        try:
            trainer.save_checkpoint(path, self.save_weights_only)
            self._lw_finish_before(trainer)
        except (CheckpointError, OSError, RuntimeError):
            _log.exception("ModelCheckpoint: the checkpoint on %s could not be saved.", type(exception).__name__)
            return
        lost = "" if trainer.at_step_boundary else " The unfinished step is not in it and will be repeated."
        # The line with which an interrupted fit ends names it, too.
        extra = ONLY_LOGS if isinstance(exception, KeyboardInterrupt | StopBySignal) else None
        _log.warning("ModelCheckpoint: saved %s on %s.%s", path, type(exception).__name__, lost, extra=extra)

    def _lw_is_finite(self, trainer: Trainer, module: nn.Module) -> bool:
        """Whether all weights are finite; on every rank, if the ranks respond."""
        own = local(module.parameters())
        is_finite = all(bool(part.isfinite().all()) for part in own)
        return bool(trainer.strategy.reduce_boolean_decision(is_finite)) if trainer.ranks_answer else is_finite

    def state_dict(self) -> StateDict:
        """Return the checkpoint state; while a checkpoint is written, it names that checkpoint already."""
        return {"monitor": self.monitor, "dirpath": self.dirpath, **self.checkpoint_state.state_dict()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the checkpoint state. In validation and test, the state of this callback's own training is kept."""
        loading_in, self._lw_loading_in = self._lw_loading_in, None
        if loading_in not in (None, "fit"):
            if not self.best_model_path:
                self.checkpoint_state.load_state_dict(state_dict)
                self.checkpoint_state.keep_best_path_only()
            return
        self.checkpoint_state.load_state_dict(state_dict)
        self._lw_loaded_dirpath = state_dict.get("dirpath")
        if self.given_dirpath is not None:
            self._lw_compare_folders(self.given_dirpath)

    # --- when ------------------------------------------------------------------------------------------------------

    def _lw_is_inert(self, trainer: Trainer) -> bool:
        is_off = bool(trainer.fast_dev_run) or trainer._lw_saving.is_elsewhere
        return is_off or trainer.state.fn != "fit" or trainer.sanity_checking

    def _lw_is_epoch_due(self, trainer: Trainer) -> bool:
        return self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    def _lw_resolve_at_epoch_end(self, trainer: Trainer) -> bool:
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if not trainer.enable_validation:
            return True
        interval = 1.0 if trainer.val_check_interval is None else trainer.val_check_interval
        return isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch == 1

    def trigger_save(self, trainer: Trainer, *, strict: bool) -> None:
        """Save now, or write `last` and wait for the metrics."""
        at = trainer.global_step
        if at == self.checkpoint_state.triggered_step and (at or not trainer.progress.total_batches):
            return  # nothing was trained since; batches of a module that counts no steps may have changed it
        self.checkpoint_state.triggered_step = trainer.global_step
        self.checkpoint_state.is_waiting = True
        if not self._lw_save_if_fresh(trainer, strict=strict) and self.save_last and self.rules.updates_last_alone:
            self.write_last_alone(trainer)

    def _lw_save_if_fresh(self, trainer: Trainer, *, strict: bool) -> bool:
        """Save unless the score is older than this step. `strict`: a missing score is an error."""
        self._lw_synchronize(trainer)
        if not self.rules.is_fresh(self, trainer, strict=strict):
            return False
        self.checkpoint_state.is_waiting = False
        self.checkpoint_state.triggered_step = trainer.global_step
        self.save_now(trainer)
        return True

    def has_fresh_score(self, trainer: Trainer, *, strict: bool) -> bool:
        """Whether the score belongs to this step; `strict`: a missing score is an error."""
        metrics, score = trainer.callback_metrics, self.score_metrics()
        missing = [name for name in score if name not in metrics]
        if missing and strict:
            raise missing_metric(missing, metrics, self._lw_described())
        # What only the name shows is worth waiting for where it comes right now, with a validation at this step.
        wanted = self._lw_needed_metrics() if trainer.validation_is_due else score
        if self._lw_stale_metrics(trainer, wanted):
            if missing and trainer.is_global_zero and not self._lw_reported.issuperset(missing):
                _log.info(
                    "ModelCheckpoint: the checkpoint of step %d waits until %s is logged.",
                    trainer.global_step,
                    ", ".join(map(repr, missing)),
                )
            self._lw_reported.update(missing)
            return False
        unlogged = [name for name in self._lw_needed_metrics() if name not in metrics and name not in self._lw_reported]
        if unlogged and trainer.is_global_zero:
            _log.warning("%s The file name shows 0.", missing_metric(unlogged, metrics, self._lw_described()).what)
        self._lw_reported.update(unlogged)
        return True

    def score_metrics(self) -> list[str]:
        """Return the name of the logged metric that ranks checkpoints, as a list; [] if none does."""
        has_score = self.save_top_k != 0 and self.monitor and self.monitor not in COUNTERS
        return [str(self.monitor)] if has_score else []

    def _lw_needed_metrics(self) -> list[str]:
        if self.save_top_k == 0 and not self.keep_last:
            return []
        return list(dict.fromkeys([*self.score_metrics(), *template_names(self.filename or "")]))

    def _lw_synchronize(self, trainer: Trainer) -> None:
        """Synchronize the metrics that names and scores use; on every rank."""
        if names := [*self._lw_needed_metrics(), *template_names(self.CHECKPOINT_NAME_LAST)]:
            trainer.synchronize_metrics(*names)

    def _lw_is_scored_by(self, trainer: Trainer) -> bool:
        """Whether the score belongs to the current step and weights; equal on all ranks."""
        metric, step = self.monitor, trainer.global_step
        if metric is None:
            return False
        return from_rank_zero(
            trainer, lambda: metric in trainer.callback_metrics and trainer.metric_step(metric) == step
        )

    def _lw_stale_metrics(self, trainer: Trainer, names: list[str]) -> list[str]:
        step, metrics = trainer.global_step, trainer.callback_metrics
        return [name for name in names if name not in metrics or trainer.metric_step(name) not in (None, step)]

    # --- writing ---------------------------------------------------------------------------------------------------

    def save_now(self, trainer: Trainer) -> None:
        """Write the checkpoint if it is one of the best, `last` if it is due, and remove what was replaced."""
        metrics = self.rules.metrics(self, trainer)
        score = None
        if self.monitor is not None and (self.save_top_k != 0 or self.monitor in metrics):
            # Waits for the device, once per checkpoint.
            score = self.checkpoint_state.top_k.cleaned(float(metrics[self.monitor]))
            self.checkpoint_state.current_score = score
        is_best = self.save_top_k != 0 and (score is None or self.check_monitor_top_k(trainer, score))
        is_kept = is_best or bool(self.keep_last)
        is_last_due = self._lw_is_last_due(is_kept=is_kept)
        if is_kept or is_last_due:
            self._lw_finish_before(trainer)
        last_path = self._lw_plan_last(trainer) if is_last_due else ""
        path = self._lw_write_kept(trainer, metrics, score, last_path, is_best=is_best) if is_kept else None
        if is_last_due:
            self._lw_write_last(trainer, last_path, path)
        trainer._lw_saving.then(lambda: self._lw_remove_pending(trainer))

    def _lw_is_last_due(self, *, is_kept: bool) -> bool:
        counts_epochs = not self._every_n_train_steps and self._lw_interval is None
        return bool(self.save_last) and (is_kept or self.rules.updates_last_alone or not counts_epochs)

    def _lw_finish_before(self, trainer: Trainer) -> None:
        """Wait for the previous save: names and removals of a new one depend on it."""
        if trainer._lw_saving.is_in_background:
            trainer.wait_for_save(before_save=self._lw_is_training)

    def _lw_write_kept(
        self,
        trainer: Trainer,
        metrics: Mapping[str, Tensor | float],
        score: float | None,
        last_path: str,
        *,
        is_best: bool,
    ) -> str:
        before = self.checkpoint_state.copy()
        if self.save_top_k == -1:
            replaced = [self.best_model_path if score is None else self.kth_best_model_path]
        else:
            replaced = before.replaced_by(score, is_best=is_best)
        path = self._lw_free_path(trainer, metrics, None, own=replaced)
        self.checkpoint_state.enter(path, score, is_best=is_best)
        if last_path:
            self.checkpoint_state.enter_last(last_path, trainer.global_step)
        # In the background, a second save would wait for the first: one takes the content to both.
        is_with_last = trainer._lw_saving.is_in_background and self.save_last != "link" and last_path not in ("", path)
        trainer._lw_saving.has_score = score is not None
        try:
            self._lw_write(trainer, [path, last_path] if is_with_last else [path], before)
        finally:
            trainer._lw_saving.has_score = False
        if self.verbose:
            shown = f"step {trainer.global_step}" + ("" if score is None else f", {self.monitor} = {score:.6g}")
            trainer._lw_saving.then(lambda: _log.info("ModelCheckpoint: %s: saved %s", shown, path))
        return path

    def write_last_alone(self, trainer: Trainer) -> None:
        """Write `last` where no other checkpoint is written; on every rank."""
        self._lw_finish_before(trainer)
        self._lw_synchronize(trainer)
        self._lw_write_last(trainer, self._lw_plan_last(trainer), None)
        trainer._lw_saving.then(lambda: self._lw_remove_pending(trainer))

    def _lw_write_last(self, trainer: Trainer, path: str, kept_path: str | None) -> None:
        """Make `last` the current state: a link to the file just written if requested, else a file."""
        before = self.checkpoint_state.copy()
        self.checkpoint_state.enter_last(path, trainer.global_step)
        if kept_path == path:
            return  # the template itself says "last"
        if trainer._lw_saving.is_in_background and kept_path is not None:
            if self.save_last == "link":
                trainer._lw_saving.then(lambda: from_rank_zero(trainer, lambda: link_or_copy(kept_path, path)))
            return
        is_link_wanted = self.save_last == "link" and kept_path is not None
        if is_link_wanted and from_rank_zero(trainer, lambda: link_or_warn(str(kept_path), path)):
            return
        self._lw_write(trainer, [path], before)

    def _lw_write(self, trainer: Trainer, paths: list[str], before: CheckpointState) -> None:
        written_before = self.written_step
        has_own_format = type(self)._save_checkpoint is not ModelCheckpoint._save_checkpoint
        moved = make_way(trainer, paths, has_own_format=has_own_format)

        def take_back() -> None:  # the file does not exist: the state must not name it
            self.checkpoint_state, self.written_step = before, written_before
            for path, old in moved.items():
                if trainer.is_global_zero and not files.exists(path):
                    files.move(old, path)

        self.checkpoint_state.pending_removals += moved.values()
        try:
            if len(paths) == 1:
                self._save_checkpoint(trainer, paths[0])
            else:
                trainer.save_checkpoint_to(paths, self.save_weights_only)
        except BaseException:
            take_back()
            raise
        self.written_step = trainer.global_step
        self._lw_overwritable.difference_update(paths)
        trainer._lw_saving.then(lambda: notify_loggers(trainer, self, num_files=len(paths)), take_back)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Write one file; a subclass may write its own folder format."""
        trainer.save_checkpoint(filepath, self.save_weights_only)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Remove what `_save_checkpoint` wrote; on rank 0."""
        remove_or_warn(filepath, trainer.fabric.checkpoint_io)

    def naming_metrics(self, trainer: Trainer) -> dict[str, Tensor | float]:
        """Return the values that names and scores use; with several ranks, rank 0's."""

        def read() -> dict[str, Tensor | float]:
            counts = {"epoch": trainer.current_epoch, "step": trainer.global_step}
            metrics: dict[str, Tensor | float] = {**counts, **trainer.callback_metrics}
            if not trainer.ranks_answer:
                return metrics
            used = ["epoch", "step", *self._lw_needed_metrics(), *template_names(self.CHECKPOINT_NAME_LAST)]
            return {name: float(metrics[name]) for name in used if name in metrics}

        return from_rank_zero(trainer, read)

    def _lw_free_path(
        self, trainer: Trainer, metrics: Mapping[str, Tensor | float], template: str | None, *, own: Collection[str]
    ) -> str:
        """Return the path of a new file, with a version if a file that is not one of `own` has the name."""
        path = self.format_checkpoint_name(metrics, template)
        if not self._enable_version_counter:
            return path
        version = self.STARTING_VERSION
        while path not in own and path not in self._lw_overwritable and self.file_exists(path, trainer):
            path = self.format_checkpoint_name(metrics, template, ver=version)
            version += 1
        return path

    def _lw_plan_last(self, trainer: Trainer) -> str:
        template, metrics = self.CHECKPOINT_NAME_LAST, self.rules.metrics(self, trainer)
        if any(name not in metrics for name in template_names(template)):
            template = ModelCheckpoint.CHECKPOINT_NAME_LAST  # `last` does not wait for metrics
        return self._lw_free_path(trainer, metrics, template, own=[self.last_model_path])

    # --- removing --------------------------------------------------------------------------------------------------

    def _lw_remove_pending(self, trainer: Trainer) -> None:
        if self.checkpoint_state.pending_removals:  # the state is equal on all ranks
            removal = self._lw_removal(trainer)
            from_rank_zero(trainer, lambda: removal.remove_pending(lambda path: self._remove_checkpoint(trainer, path)))
        self.checkpoint_state.pending_removals = []

    def _lw_removal(self, trainer: Trainer) -> CheckpointRemoval:
        return CheckpointRemoval(
            self.checkpoint_state,
            dirpath=str(self.dirpath),
            resumed_path=str(trainer.ckpt_path or ""),
            may_remove_resumed=self._lw_may_remove_resumed,
        )

    # --- checks ----------------------------------------------------------------------------------------------------

    def _lw_compare_folders(self, dirpath: str) -> None:
        """Keep only the best path of a loaded state whose files are in another directory."""
        loaded, self._lw_loaded_dirpath = self._lw_loaded_dirpath, None
        if loaded is not None and loaded != dirpath:
            _log.warning(
                "ModelCheckpoint: the state is of folder %s and this run saves to %s: only best_model_path is kept.",
                loaded,
                dirpath,
            )
            self.checkpoint_state.keep_best_path_only()

    def _lw_warn_of_settings(self, trainer: Trainer) -> None:
        dirpath = str(self.dirpath)
        is_used = os.path.isdir(dirpath) and bool(os.listdir(dirpath))
        if self.save_top_k != 0 and not trainer.ckpt_path and is_used:
            _log.warning("ModelCheckpoint: the folder %s is not empty.", self.dirpath)
        if not self.saves_at_epoch_end and self._every_n_epochs and not trainer.enable_validation:
            _log.warning("ModelCheckpoint: it saves at the end of validations, and this run does not validate.")

    def _lw_described(self) -> str:
        shown = {"monitor": self.monitor, "filename": self.filename}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)
