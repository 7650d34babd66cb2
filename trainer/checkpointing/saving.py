"""`Saving` writes the checkpoints of a Trainer's run, and tracks one that is still being written in the background.

Called on every rank: some of it communicates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ...checkpoint.checkpoint_io import saves_in_background
from ...errors import CheckpointError, ModuleError
from ...messages import counted
from ...protocols import StateDict, StorageOptions
from ...strategies.optional import every_weight, saves_shards, written_state
from ..loop.run_signals import add_place
from ..session.assemble import has_override
from . import snapshot

if TYPE_CHECKING:
    from ..run import Run
    from ..view import TrainerView
    from .pending_save import PendingSave

_PLAIN = (Tensor, nn.Parameter, UninitializedParameter, UninitializedBuffer)

logger_ = logging.getLogger(__name__)

_fits = count()  # of this process


class Saving:
    """Writes checkpoints, now or in the background.

    Attributes:
        is_after_error: Whether on_exception is being called: a checkpoint is taken wherever the run stopped, and other
            ranks may be elsewhere.
        how_to_continue: How to continue an interrupted run, for messages; None for `fit` with `ckpt_path`.
        is_elsewhere: Whether another replica group writes checkpoints: nothing is saved here.
        has_score: Whether the checkpoint being saved has the score of the latest validation, and so the weights that it
            saw.
        program: Record of the program, of the process that started this one for a function; None in other processes.
        fit: Number of the fit among those of the process, from 0; a search's trials do not count.
    """

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self._pending: PendingSave | None = None
        self.is_after_error = False
        self.how_to_continue: str | None = None
        self.has_score = self.is_elsewhere = False
        self.program: StateDict | None = None
        self.fit = 0
        self._saved_at, self._saved_path = -1, ""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_trainer": self._trainer._lw_itself}

    def begin_fit(self) -> None:
        """Count a fit, in the process that the user has called it in."""
        self.fit = next(_fits)

    def path_at(self, step: int) -> str | None:
        """Return the last checkpoint that holds the state after this optimizer step; None where there is none."""
        return self._saved_path if self._saved_at == step else None

    def return_to(self, step: int, path: str) -> None:
        """Forget later saves: the run has returned to a checkpoint."""
        self._saved_at, self._saved_path = step, path

    def keep_validated(self) -> None:
        """Keep the current weights until the epoch has ended, if a hook may change them before the score is saved.

        On every rank, at the end of a validation.
        """
        run = self._trainer.present_run()
        if run is None or run.validated is not None:
            return
        from .validated_weights import ValidatedWeights, may_change_weights

        if may_change_weights(self._trainer.callbacks, run.module):
            run.validated = ValidatedWeights(self._trainer.strategy.module_state_dict(run.model))

    def check_weights(self, module: nn.Module) -> None:
        """Refuse weights that no checkpoint of the run could hold: before the first step.

        Raises:
            CheckpointError: Names them.
        """
        if all(type(one) in _PLAIN for one in (*module.parameters(), *module.buffers())):
            return
        if not self._trainer.checkpoint_callbacks or has_override(module, "on_save_checkpoint"):  # it may replace them
            return
        from ...strategies.distributed.shards import is_sharded  # not imported for plain weights

        state = module.state_dict()
        if getattr(module, "exclude_frozen_parameters", False):
            frozen = {name for name, one in module.named_parameters() if not one.requires_grad}
            state = {name: one for name, one in state.items() if name not in frozen}
        odd = [
            f"{name} ({type(one).__module__}.{type(one).__qualname__})"
            for name, one in state.items()
            if isinstance(one, Tensor) and type(one) not in _PLAIN and not is_sharded(one)
        ]
        if odd:
            raise CheckpointError(
                f"Expected weights that every reader of a checkpoint can open, got {counted(len(odd), 'tensor')} of a "
                f"subclass: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}.",
                fix="set exclude_frozen_parameters = True on the module if they are frozen and its constructor makes "
                "them, convert them in on_save_checkpoint, or pass enable_checkpointing=False.",
            )

    def complete(self, checkpoint: StateDict) -> None:
        """Add entries to a checkpoint before `on_save_checkpoint`; for subclasses.

        Args:
            checkpoint: What was collected.
        """

    @property
    def is_in_background(self) -> bool:
        """Whether a save returns before the file is complete."""
        return saves_in_background(self._trainer.strategy.checkpoint_io)

    def save(
        self,
        run: Run,
        filepaths: Sequence[str | Path],
        *,
        is_weights_only: bool,
        storage_options: StorageOptions | None,
    ) -> None:
        """Take a checkpoint and write it to each path.

        Raises:
            CheckpointError: Called between two micro-batches of one window, or within a validation that a callback
                keeps a state of; or it cannot be written; or an earlier one could not be written in the background.
        """
        trainer = self._trainer
        if self.is_elsewhere:
            return
        if not run.at_boundary and not self.is_after_error:
            raise CheckpointError(
                "trainer.save_checkpoint was called between two micro-batches of one optimizer step, where a "
                "checkpoint could not be resumed exactly.",
                fix="save in on_train_batch_end when trainer.at_step_boundary is true, or at the end of an epoch.",
            )
        if not self.is_after_error and not is_weights_only and run is trainer.present_run():
            self._reach_end_of_event(run)
        if not is_weights_only and not self.is_after_error and run.watch.policy == "raise":
            run.watch.look(trainer.progress)
        trainer.timeline.timed("checkpoint", run.lifecycle.bracketed(self._collect_and_write, "save_checkpoint"))(
            run, filepaths, is_weights_only=is_weights_only, storage_options=storage_options
        )
        if not is_weights_only:
            self._saved_at, self._saved_path = trainer.global_step, str(filepaths[0])

    @property
    def is_writing(self) -> bool:
        """Whether this rank is writing a checkpoint in the background."""
        return self._pending is not None and self._pending.is_writing

    def take(self, run: Run, *, for_each_node: bool) -> StateDict:
        """Return the checkpoint of now, for a save elsewhere. On every rank, when no save is on its way.

        Args:
            run: The present run, between two steps.
            for_each_node: Whether any rank may write it, not only rank 0.

        Raises:
            CheckpointError: An earlier checkpoint could not be written.
        """
        self._reach_end_of_event(run)
        if run.watch.policy == "raise":
            run.watch.look(self._trainer.progress)
        self.wait()
        collect = run.lifecycle.bracketed(snapshot.collect, "save_checkpoint")
        taken: StateDict = self._trainer.timeline.timed("checkpoint", collect)(
            run, is_weights_only=False, for_each_node=for_each_node
        )
        return taken

    def _reach_end_of_event(self, run: Run) -> None:
        """Call the remaining listeners of the current event, so that a resume loses nothing of it."""
        run.lifecycle.finish_event()
        validation = run.before_validation
        if validation is None or validation.is_over:
            return
        counting = [
            type(callback).__name__ for callback in self._trainer.callbacks if snapshot.counts_batches(callback)
        ]
        if counting:
            raise CheckpointError(
                "trainer.save_checkpoint was called within a validation, which a resumed run repeats: the "
                f"batches in the state of {', '.join(counting)} would count twice.",
                fix="save in on_validation_epoch_end or on_validation_end; or pass weights_only=True.",
            )

    def _collect_and_write(
        self,
        run: Run,
        filepaths: Sequence[str | Path],
        *,
        is_weights_only: bool,
        storage_options: StorageOptions | None,
    ) -> None:
        trainer, strategy = self._trainer, self._trainer.strategy
        ranks_answer = trainer.ranks_answer
        if ranks_answer:
            from ..loop import rank_coordination

            rank_coordination.meet(trainer, "trainer.save_checkpoint")
        self.wait(before_save=True)
        with trainer.timeline.own_time("checkpoint", strategy):  # ranks that were late before are here by now
            self._collect_and_write_here(run, filepaths, is_weights_only, storage_options)

    def _collect_and_write_here(
        self, run: Run, filepaths: Sequence[str | Path], is_weights_only: bool, storage_options: StorageOptions | None
    ) -> None:
        trainer, strategy = self._trainer, self._trainer.strategy
        ranks_answer = trainer.ranks_answer
        checkpoint = snapshot.collect(run, is_weights_only=is_weights_only, has_score=self.has_score)
        has_own_part = saves_shards(strategy, "full")
        if run.has_ranks and not ranks_answer:
            from ..loop.rank_coordination import require_full

            require_full(checkpoint, filepaths[0])
        else:
            checkpoint = written_state(strategy, checkpoint, "full")

        def write() -> None:
            self.write_to(checkpoint, filepaths, storage_options)

        if has_own_part:
            write()
        elif ranks_answer:
            from ..loop import rank_coordination

            rank_coordination.write_on_rank_zero(strategy, write, str(filepaths[0]))
        elif trainer.is_global_zero:
            write()
        else:
            return
        self._begin_wait(filepaths)

    def load_weights(self, path: str) -> StateDict:
        """Load the weights of a checkpoint into the module of the present run; on every rank.

        The module's `on_load_checkpoint` is called before: it may add what `on_save_checkpoint` has left out.

        Returns:
            The states of callbacks in the checkpoint, which are not loaded.
        """
        run = self._trainer.present_run()
        assert run is not None
        content = snapshot.read(run.fabric, path, is_trusted=False)
        if (own := run.lifecycle.own("on_load_checkpoint")) is not None:
            own(content.extra["__checkpoint__"])
        snapshot.restore_weights(run, content)
        states: StateDict = content.states.get("callbacks", {})
        return states

    def full_state(self, run: Run, module: nn.Module | None) -> StateDict:
        """Return full weights on rank 0; see `Trainer.full_state_dict`."""
        trainer, strategy = self._trainer, self._trainer.strategy
        of_whole = module is None or module in (run.module, run.model)
        path = None if of_whole else next((path for path, one in run.module.named_modules() if one is module), None)
        if not of_whole and path is None:
            raise ModuleError(
                f"Expected {type(run.module).__name__} or a part of it, got another module, a {type(module).__name__}.",
                fix="pass the module that is trained, or a submodule of it, such as self.model.",
            )
        if trainer.ranks_answer:
            from ..loop import rank_coordination

            rank_coordination.meet(trainer, "trainer.full_state_dict")
        state = every_weight(strategy, run.model)
        if run.has_ranks and not trainer.ranks_answer:
            from ..loop.rank_coordination import require_full

            require_full(state, "full_state_dict()")
        else:
            state = strategy.gather_state(state)
        if not trainer.is_global_zero:
            return {}
        prefix = f"{snapshot.plain_path(path)}." if path else ""
        found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in found.items()}

    def write(
        self, checkpoint: StateDict, filepaths: Sequence[str | Path], storage_options: StorageOptions | None
    ) -> None:
        """Write a checkpoint that was taken before, for instance in another process."""
        self.write_to(checkpoint, filepaths, storage_options)
        self._begin_wait(filepaths)

    def write_to(
        self, checkpoint: StateDict, filepaths: Sequence[str | Path], storage_options: StorageOptions | None
    ) -> None:
        """Write a checkpoint to each path by the plugin; for subclasses.

        Args:
            checkpoint: What was collected, on the ranks that write.
            filepaths: Paths to write.
            storage_options: Passed to the plugin.
        """
        io = self._trainer.fabric.checkpoint_io
        if not saves_in_background(io):
            for filepath in filepaths:
                io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        io.on_failure = self._trainer.run_signals.note_failed_save
        if len(filepaths) == 1:  # a plugin need not know `also_to`
            io.save_checkpoint(checkpoint, filepaths[0], storage_options=storage_options)
        else:
            io.save_checkpoint(checkpoint, filepaths[0], storage_options=storage_options, also_to=filepaths[1:])

    def _begin_wait(self, filepaths: Sequence[str | Path]) -> None:
        """Keep the save in progress, on every rank that took part in it, if the plugin saves in the background."""
        io = self._trainer.fabric.checkpoint_io
        if not saves_in_background(io):
            return
        from .pending_save import PendingSave

        self._pending = PendingSave(io, str(filepaths[0]))
        if self._trainer.present_run() is None:
            self.wait()  # no training continues that could report an error later

    def wait(self, *, before_save: bool = False) -> None:
        """Wait until the last checkpoint is complete, including the actions after it; see `wait_for_save`."""
        pending = self._pending
        if pending is None:
            return
        self._trainer.timeline.timed("checkpoint", pending.wait)(before_save=before_save)
        self._pending = None
        pending.finish(self._trainer)

    def wait_after(self, error: BaseException) -> None:
        """Wait for a save in progress; its failure does not hide the error that ends the run."""
        try:
            self.wait()
        except Exception as second:  # plugins raise errors of any class
            logger_.exception("a checkpoint could not be written in the background, besides %s", type(error).__name__)
            add_place(error, f"and a save in the background had failed: {type(second).__name__}: {second}")

    def then(self, done: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Call `done` when the last checkpoint is complete: now, or later in the main thread, on all ranks alike.

        Called by callbacks after a save, on every rank.

        Args:
            done: Removes older files, say. May communicate.
            failed: Called instead if the checkpoint could not be written in the background.
        """
        if self._pending is None:
            done()
        else:
            self._pending.then(done, failed)
