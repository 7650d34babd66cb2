"""`FitSession`: one fit, from its arguments to its end."""

from __future__ import annotations

import importlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd import set_detect_anomaly

from ...checkpoint.verified import CheckpointNotFound
from ...data.batch_size import BatchSizes
from ...errors import CheckpointError, ConfigError
from ...messages import counted, warn
from ...strategies.optional import HasMesh, TakesTrainerConfig
from ..checkpointing import snapshot
from ..checkpointing.locate import can_be_requeued, locate
from ..fit_lines import tell_beginning, tell_end
from ..run import FitRun, Run
from . import assemble
from .arguments import combined
from .checks import check_fit, check_layers
from .continuing import begin_epoch_again, continue_training, take_before
from .fit_actions import FitActions
from .global_batch import derive_accumulation, plan_accumulation, report_global_batch
from .optimizers import build_training
from .session import Session
from .validation import check_sanity, free_gradients, validate

if TYPE_CHECKING:
    from ...checkpoint.content import Content
    from ...data.module import DataModule
    from ...protocols import Loaders, StateDict
    from ...strategies import TrainerConfig
    from ..loop.eval_loader import EvalLoader
    from ..loop.eval_loop import EvalLoop
    from ..replica_groups.groups import ReplicaGroups
    from ..reproducible_world.steps import ReproducibleWorld
    from ..trainer import Trainer


class FitSession(Session):
    """One fit.

    Args:
        trainer: Its arguments apply.
        model: The module that was passed.
        datamodule: The user's data module, or None.
        given: The loaders that were passed, "train" and "validation".
        ckpt_path: What to resume from: a path, "last", "best", or None.
        is_trusted: Whether objects that were marked as trusted in the checkpoint are unpickled.

    Attributes:
        groups: This replica group among the others; None without fault tolerance.
        put_back: Restores the random number generators of the checkpoint, once `start` has read one: the loop calls it
            when nothing else can draw.
    """

    run_type = FitRun
    run: FitRun
    put_back: Callable[[], None] | None
    groups: ReplicaGroups | None = None

    def __init__(
        self,
        trainer: Trainer,
        model: nn.Module,
        *,
        datamodule: DataModule | None,
        given: dict[str, Loaders],
        ckpt_path: str | Path | None,
        is_trusted: bool,
    ) -> None:
        super().__init__(trainer, "fit", datamodule=datamodule, given=given)
        self.model, self.ckpt_path, self.is_trusted = model, ckpt_path, is_trusted
        self.loop = trainer.fit_loop
        self.world: ReproducibleWorld | None = None
        if not (trainer._lw_is_trial or trainer._lw_is_in_child):
            trainer._lw_saving.begin_fit()
        if "LOOPWRIGHT_REPLAY" in os.environ and not trainer._lw_is_trial:  # set by `loopwright replay`
            from ..replay import replay_in

            replay_in(self)

    def start(self) -> None:
        """Begin to train: everything up to `on_train_start`, which the loop fires.

        before       what the last fit left, while its module and optimizers are as it left them
        begin        see `Session.begin`
        restore      see `restore`: from a checkpoint, after the last fit, or from the beginning
        """
        self.trainer.should_stop = False  # that of the last fit
        before = take_before(self.trainer, self.model) if self.ckpt_path is None else None
        self.begin(self.model)
        self.put_back = self.trainer.training_rng.resume(self.restore(before))

    def restore(self, before: StateDict | None) -> Callable[[], None] | None:
        """Continue where the checkpoint was taken, else where the last fit ended, else begin.

            weights      of the module, of the data module and callbacks: their hooks come first. Loggers continue
            folders      all ranks know where loggers write
            optimizers   are built
            training     counts, states of optimizers, schedules, precision, metrics; then on_fit_start, which sees it
            sanity check leaves no trace; not within an epoch
            data         where they were; the functions of a step are bound to them
            window       that the end of an epoch had cut short
            modes        what is frozen, and what is in eval mode
            generators   last, by the loop

        Args:
            before: What the last fit left, where this one continues it.

        Returns:
            What puts the random number generators back; None without a checkpoint.
        """
        trainer, progress = self.trainer, self.progress
        path = locate(trainer, self.ckpt_path, "fit", has_model=True)
        self.behavior.adopt_callbacks(self)  # `locate` has asked them for files of another run
        content = None
        if path is not None:
            content = self._load_checkpoint(path)
            self.behavior.continue_logs(self, content.states.get("loggers", {}))
        elif progress.epoch_open and trainer._lw_stream_state is None:
            begin_epoch_again(trainer, self.run)
        self.synchronize_folders()
        build_training(self.run)
        self.strategy.setup(trainer)
        put_back = self.behavior.restore_and_start(self, content, path, before)
        if not progress.epoch_open:
            check_sanity(self)
        self.open_data()
        self._open_loop(content, path)
        self._carry_window(content)
        self._set_modes(content)
        return put_back

    def _load_checkpoint(self, path: str) -> Content:
        """Return the checkpoint, with module, data module and callbacks restored."""
        try:
            return self.load_weights(path, is_trusted=self.is_trusted)
        except CheckpointNotFound:
            newer = locate(self.trainer, self.ckpt_path, "fit", has_model=True) if self.groups is not None else None
            if newer in (None, path):
                raise
            return self._load_checkpoint(str(newer))  # another replica group has replaced the file in between

    # --- the parts of a start --------------------------------------------------------------------------------------

    def requeue_signal(self) -> Signals | None:
        """Return the signal with which the cluster asks to save and requeue the job; None without."""
        if not can_be_requeued(self.trainer):
            return None
        from ..checkpointing.requeue import requeue_signal

        return requeue_signal(self.trainer)

    def check_verb(self) -> None:
        """Refuse a module that cannot be trained, and let the strategy's engine know the arguments that it needs."""
        check_fit(self, self.module)

    def check(self) -> None:
        """Refuse what cannot run, also weights that no checkpoint could hold."""
        super().check()
        self.trainer._lw_saving.check_weights(self.module)
        if self.arguments.reproducible:
            self._check_world()
        if isinstance(self.strategy, TakesTrainerConfig):
            taken = self.strategy.apply_trainer_config(self._trainer_config())
            if accumulate := taken.get("accumulate_grad_batches"):
                self.trainer.accumulate_grad_batches = accumulate
            self.trainer.gradient_clip_val = taken.get("gradient_clip_val", self.trainer.gradient_clip_val)

    def launch(self) -> None:
        """Choose the strategy by a plan if it is left to the Trainer, and connect the processes."""
        if self.fabric.leaves_choice:
            data = self.given["train"] if self.datamodule is None else self.datamodule
            self.trainer._lw_settle_strategy(self.module, data)
            self.strategy = self.fabric.strategy
            check_layers(self.strategy, self.module)
            if self.arguments.reproducible:
                self._check_world()
        super().launch()

    def _check_world(self) -> None:
        """Refuse what depends on the number of ranks."""
        from ..reproducible_world.checks import check_norms, wrong_setup

        trainer, num_shards = self.trainer, self.arguments.micro_shards
        assert num_shards is not None
        ranks = trainer.num_devices * trainer.num_nodes
        problems = wrong_setup(self.strategy, self.fabric.precision, self.module, num_shards=num_shards, ranks=ranks)
        if problems:
            raise combined(problems)
        check_norms(self.module)
        self.loaders.counts_all_ranks = True

    def _trainer_config(self) -> TrainerConfig:
        """Return the Trainer's arguments for a strategy whose engine has its own configuration."""
        trainer, loader = self.trainer, self.given["train"]
        size = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        micro = size if isinstance(size, int) else None
        accumulate: int | None = trainer.accumulate_grad_batches
        wanted = self.arguments.global_batch_size
        if trainer.accumulation_scheduler is not None:
            accumulate = None
        elif wanted is not None:
            accumulate = plan_accumulation(wanted, micro, self.strategy.topology.data_size)
        return {
            "accumulate_grad_batches": accumulate,
            "global_batch_size": wanted,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            "micro_batch_size": micro,
            "is_automatic": getattr(self.module, "automatic_optimization", True),
            "grad_accumulation_dtype": "fp32" if self.strategy.accumulate_dtype is not None else None,
        }

    def launched(self) -> None:
        """Connect the ranks, log what the fit runs on, and set the generators to where training continues."""
        super().launched()
        if self.arguments.fault_tolerance is not None:
            from ..replica_groups.groups import ReplicaGroups

            self.groups = ReplicaGroups(self.arguments.fault_tolerance, self, self.trainer._lw_saving)
            self.log = self.groups.log
        if self.arguments.reproducible:
            from ..reproducible_world.steps import ReproducibleWorld

            self.world = ReproducibleWorld(
                self.strategy, self.fabric.device, self.arguments.micro_shards or 1, self.ending
            )
        tell_beginning(self.trainer)
        rank_drawn_as = self.strategy.topology.data_rank if self.strategy.traits.copies_draw_alike else None
        self.trainer.training_rng.begin_training(self.fabric.global_rank, self.fabric.world_size, rank_drawn_as)

    def actions(self) -> Mapping[str, Callable[..., object]]:
        """Return what the Trainer does at events: it logs, counts, and steps the schedules that count epochs."""
        actions = FitActions(self)
        # Barebones logs nothing, so there is nothing to do after a batch.
        after_batch = {} if self.arguments.barebones else {"on_train_batch_end": actions.after_batch}
        return {
            **after_batch,
            "on_train_epoch_start": actions.after_epoch_start,
            "on_train_epoch_end": actions.after_train_epoch,
            "on_validation_epoch_end": actions.after_validation,
            "on_validation_end": actions.after_validation_end,
        }

    def make_run(self) -> Run:
        """Compile the lifecycle and return the run, which knows this session while it lasts."""
        run = super().make_run()
        self.run.session = self
        if self.groups is not None:
            self.groups.attach(self.run)
        return run

    def set_up(self) -> None:
        """Run the hooks up to `configure_model`; batch norms see the batches of all ranks where that is requested."""
        super().set_up()
        self._checkpoint_activations()
        sync = self.fabric.layer_sync
        if not self.run.has_ranks or (sync is None and not self.trainer.sync_batchnorm):
            return
        if sync is None:
            from ...strategies.distributed.layer_sync import TorchSyncBatchNorm

            sync = TorchSyncBatchNorm(self.strategy.batch_norm_group if isinstance(self.strategy, HasMesh) else None)
        sync.apply(self.module)
        self.ending.callback(sync.revert, self.module)

    def _checkpoint_activations(self) -> None:
        """Let modules recompute their activations in the backward pass, until fit ends, where that is requested."""
        wanted = self.arguments.activation_checkpointing
        if wanted is None or wanted is False:
            return
        own = self.trainer._lw_own_compiler
        is_compiled = self.arguments.compile is not False or (own is not None and own[0] is self.module)
        if isinstance(wanted, float) and is_compiled:
            config = importlib.import_module("torch._functorch.config")
            self.ending.enter_context(config.patch(activation_memory_budget=wanted))
            return
        from ...strategies.construction.activation_checkpointing import (
            apply_activation_checkpointing,
            remove_activation_checkpointing,
        )

        self.ending.callback(remove_activation_checkpointing, self.module)
        apply_activation_checkpointing(self.module, wanted)

    def place(self) -> None:
        """Set the module up on its device; gradients are reduced in the backward pass, or after it."""
        strategy, run = self.strategy, self.run
        sums_after_backward = strategy.accumulate_dtype is not None and not strategy.traits.sums_gradients_itself
        averages_later = self.arguments.on_oom == "shrink" and strategy.traits.averages_after_backward
        averages_later = averages_later or (self.world is not None and strategy.traits.averages_after_backward)
        if not run.is_automatic or sums_after_backward or averages_later:
            super().place()
        else:
            run.model = self.fabric.prepare_module(self.module)

    def adopt_callbacks(self) -> None:
        """Let callbacks that another Trainer has trained with forget that run."""
        identity = self.trainer._lw_identity
        for callback in self.trainer.callbacks:
            if vars(callback).setdefault("_adopted_by", identity) != identity:
                if hasattr(callback, "forget_run"):
                    callback.forget_run()
                vars(callback)["_adopted_by"] = identity

    def begin_data_anew(self) -> None:
        """Forget where the data of the last fit were."""
        self.trainer._lw_stream_state = None

    def continue_logs(self, states: StateDict) -> None:
        """Let loggers continue where a checkpoint saw them. Called before anything is logged."""
        snapshot.put_back_loggers(self.output, states)

    def restore_and_start(
        self, content: Content | None, path: str | None, before: StateDict | None
    ) -> Callable[[], None] | None:
        """Restore training, then fire `on_fit_start`; arguments and result as `restore_training`."""
        put_back = self.restore_training(content, path, before)
        self.write_hyperparameters()
        self.state.stage = "train"
        self.run.lifecycle.on_fit_start()
        return put_back

    def restore_training(
        self, content: Content | None, path: str | None, before: StateDict | None
    ) -> Callable[[], None] | None:
        """Put groups and states of optimizers back, schedules, and the counts.

        Args:
            content: The checkpoint to resume from; None without.
            path: Where it was read.
            before: What the last fit left, where this one continues it.

        Returns:
            A function that restores the random number generators of the checkpoint, to be called last; None without
            one.
        """
        put_back = None
        if content is not None:
            put_back = snapshot.restore_training(self.run, content, str(path))
        elif before is not None:
            continue_training(self.trainer, self.run, before)
        self.loop.is_used_up = self._has_used_up_data()
        return put_back

    def _has_used_up_data(self) -> bool:
        """Whether `max_samples` or `max_tokens` is reached already."""
        if not self.loop.data_limits:
            return False
        from ..loop.data_limits import is_reached

        progress = self.progress  # with several ranks, an interrupted fit has left each rank's own there
        if self.run.has_ranks:
            return is_reached(self.trainer, progress.samples_before, progress.tokens_before)
        return is_reached(self.trainer, progress.samples, progress.tokens)

    def _open_loop(self, content: Content | None, path: str | None) -> None:
        """Open the data where they were, and bind the functions of a step."""
        run, trainer = self.run, self.trainer
        if not self.loaders.waits_for_validation:
            self.loaders.open_validation()
        if content is not None:
            self.loaders.restore_generators(content.states.get("validation_generators", {}))
        self._place_stream(content, path)
        self._check_limits(path)
        report_global_batch(trainer, run)
        run.plan = assemble.make_plan(run, trainer)
        if self.world is not None:
            self.world.bind(run, self.ending)
        if self.loop.data_limits:
            from ..loop.data_limits import DataLimits

            limits = DataLimits(weakref.proxy(trainer), weakref.proxy(run))
            run.plan.transfer, run.plan.count_window = limits.counting(run.plan.transfer), limits.end_window
        if self.arguments.on_oom == "shrink":
            from ..loop.shrink import bind_shrinking

            bind_shrinking(trainer, run, syncs_norms=trainer.sync_batchnorm or self.fabric.layer_sync is not None)
        else:
            self.progress.parts_per_batch = 1  # also where the checkpoint is of a training that has split its batches
        if self.arguments.offload_activations and run.device.type != "cpu":  # which has nothing to move
            from ...strategies.construction.activation_offload import HostActivations

            run.plan.training_step = HostActivations(run.module, run.device).around(run.plan.training_step)
        if self.strategy.accumulate_dtype is not None:
            from ..loop.float32_gradients import bind_float32_gradients

            undo = bind_float32_gradients(trainer, run)
            if undo is not None:
                self.ending.callback(undo)
        if self.groups is not None:
            self.groups.bind(content)
        if self.loop.validates_in_this_epoch:  # else the first validation asks for its loaders again
            self.loaders.epoch_of_validation = self.progress.epochs

    def _place_stream(self, content: Content | None, path: str | None) -> None:
        """Set the position of the stream: that of the checkpoint, or of the end of the last fit of this Trainer."""
        stream, progress = self.run.stream, self.progress
        state = content.states.get("data") if content is not None else self.trainer._lw_stream_state
        if state is not None:
            stream.load_state_dict(state)
        elif progress.epoch_open and not (content is not None and content.is_foreign):
            raise CheckpointError(
                f"{path} was taken within epoch {progress.epochs} and does not record the position in the data.",
                fix="resume from a checkpoint that was taken at the end of an epoch, or start from its weights with "
                "load_from_checkpoint.",
            )

    def _check_limits(self, path: str | None) -> None:
        loop, progress = self.loop, self.progress
        limit = loop.epoch_limit
        if path is not None and limit != -1 and progress.epochs > limit:
            raise ConfigError(
                f"{path} has finished {counted(progress.epochs, 'epoch')}, and max_epochs={limit}.",
                fix=f"set max_epochs above {progress.epochs}.",
            )
        if loop.is_done and (progress.steps or progress.epochs) and not progress.epoch_open:
            others = "".join(f", {name}={value}" for name, value in loop.data_limits.items())
            warn(
                f"trainer.fit has nothing to do: {counted(progress.epochs, 'epoch')} and "
                f"{counted(progress.steps, 'step')} are done, and the "
                f"limits are max_epochs={limit} and max_steps={loop.max_steps}{others}",
            )

    def _carry_window(self, content: Content | None) -> None:
        """Continue the window that an epoch's end had cut short, where windows continue in the next epoch."""
        trainer, run = self.trainer, self.run
        carried, trainer._lw_carried_states = trainer._lw_carried_states, {}
        states, path = carried if content is None else content.states, trainer.ckpt_path
        if self.arguments.accumulate_across_epochs:
            from ..loop.carried_window import CarriedWindow

            run.carried = CarriedWindow(weakref.proxy(trainer), weakref.proxy(run))
            if "window" in states:
                run.carried.load_states(states, path or "the last fit")
        elif "window" in states:
            warn(
                f"{path} was taken within a window that continues in the next epoch: the gradients of its "
                f"{states['window']['count']} micro-batches are left out; pass accumulate_across_epochs=True to use "
                "them",
            )

    def _set_modes(self, content: Content | None) -> None:
        """Put the module into training mode; frozen parameters and random numbers of ranks are as in the checkpoint."""
        # A submodule that the user put into eval mode (a frozen batch norm) stays there.
        if not self.module.training:
            self.module.train()
        snapshot.mark_callbacks(self.run)
        if content is not None:
            snapshot.restore_frozen(self.run, content)
        elif self.run.has_ranks and not self.progress.total_batches:
            self.trainer.training_rng.separate_ranks(self.strategy)

    # --- the data --------------------------------------------------------------------------------------------------

    def open_data(self) -> None:
        """Request the training data, unless that was done already."""
        if self.run.opened is None:
            self._take_stream()

    def num_training_batches(self) -> int | float:
        """Return the training batches of an epoch; opens the data, if that was not done yet."""
        self.open_data()
        return self.run.stream.num_batches

    def reload_training_if_due(self) -> None:
        """Request training loaders when `reload_dataloaders_every_n_epochs` says so. Called before each epoch."""
        every = self.arguments.reload_dataloaders_every_n_epochs
        if every and self.progress.epochs and self.progress.epochs % every == 0:
            self._replace_stream()

    def reload_validation_if_due(self) -> None:
        """Request validation loaders when `reload_dataloaders_every_n_epochs` says so. Called before a validation."""
        every, epoch = self.arguments.reload_dataloaders_every_n_epochs, self.progress.epochs
        if not every or self.loaders.epoch_of_validation == epoch:
            return
        # From the epoch alone, so that a resumed run asks where the uninterrupted one does.
        spacing = self.arguments.check_val_every_n_epoch or 1
        if ((epoch + 1) // spacing - 1) % math.ceil(every / spacing) == 0:
            self.loaders.drop_validation()
            self.loaders.open_validation()
            self.loaders.epoch_of_validation = epoch

    def reload_loaders(self) -> None:
        """Request new loaders now; called between two epochs, by the tuner when it changed the batch size."""
        self._replace_stream()
        self.loaders.drop_validation()
        self.loaders.open_validation()

    def _replace_stream(self) -> None:
        if self.run.opened is not None:
            self.run.stream.shut_down()
        self._take_stream()

    def _take_stream(self) -> None:
        run = self.run
        stream = run.stream = self.loaders.open_training()
        self.metrics.sizes = BatchSizes(stream.loader, stream.count_latest)
        if run.has_ranks:
            from ..loop.copies import watch_batches  # not imported where there is one process

            watch_batches(stream, self.strategy)
        stream.next_batch = run.lifecycle.bracketed(stream.next_batch, "[BatchStream].next_batch")
        if self.arguments.global_batch_size is not None:
            self.trainer.accumulate_grad_batches = derive_accumulation(self.trainer, run)
        if self.world is not None:
            self.world.take_stream(stream, self.trainer)

    def evaluation_loop(self, stage: str, data: EvalLoader) -> EvalLoop:
        """Return the loop over validation data."""
        loop = super().evaluation_loop(stage, data)
        if self.world is not None and not self.trainer.sanity_checking:
            self.world.take_validation(loop)
        return loop

    def validate(self) -> None:
        """Validate between two training steps."""
        validate(self)

    def free_gradients(self) -> None:
        """Zero the gradients before a validation."""
        free_gradients(self.run)

    # --- the end ---------------------------------------------------------------------------------------------------

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Enable gradients, also within an evaluation of another Trainer; detect anomalies if requested."""
        with torch.inference_mode(False), torch.enable_grad(), set_detect_anomaly(self.arguments.detect_anomaly):
            yield

    def finish(self) -> None:
        """End a fit that has succeeded."""
        trainer, run, progress = self.trainer, self.run, self.progress
        trainer._lw_carried_states = run.carried.states() if run.carried is not None else {}
        if trainer.is_global_zero:
            run.watch.conclude(progress)
        run.lifecycle.on_fit_end()
        if self.groups is not None:
            self.groups.conclude()
        if run.has_ranks:
            times = trainer.timeline.times_of_rank(trainer.world_size)
            progress.samples, progress.tokens, trainer.timeline.ranks = snapshot.count_data(run, times)
            progress.samples_before, progress.tokens_before = progress.samples, progress.tokens
        super().finish()

    def report(self) -> None:
        """Write the timeline beside the logs, and log why training ended."""
        from ..describe_run import describe_run

        describe_run(self.trainer)
        tell_end(self.trainer, time.monotonic() - self.begun_s)
        super().report()

    def detach(self) -> None:
        """End the run, and what measured it."""
        if self.trainer._lw_timeline is not None:
            run = self.trainer._lw_run
            self.trainer._lw_timeline.end(run if isinstance(run, FitRun) else None)
        super().detach()
        self.trainer._lw_toggles.end()

    def keep(self, run: Run) -> None:
        """Keep what the fit has built, and the position of its data."""
        trainer = self.trainer
        trainer._lw_last_run = run
        assert isinstance(run, FitRun)
        run.monitored = None  # it refers back to the run: a cycle
        if run.configured:
            trainer._lw_last_fit = run
        if run.own_steps is not None:
            run.own_steps.remove()
        if run.opened is not None:
            trainer._lw_stream_state = run.stream_state = snapshot.stream_state(run)
            run.stream.shut_down()
