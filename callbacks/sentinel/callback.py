"""`Sentinel`: digests of what ranks have in common, compared while training continues."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, TypeGuard, cast

from ...errors import ConfigError
from ...messages import counted
from ..base import AnyModule, Callback
from .error import Deviation, SentinelError
from .replicas import ReplicaCheck, ReplicaDifference, Replicas, describe_place

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ...protocols import AnyBatch, AnyOutput, StateDict
    from ...trainer import Trainer
    from ...trainer.played_window import Played, PlayedWindows
    from ...trainer.run import FitRun
    from ..base import Checkpoint
    from ..model_checkpoint import ModelCheckpoint

_log = logging.getLogger(__name__)

_MOST_NAMED = 5


class Sentinel(Callback):
    """Find wrong bits: ranks that have the same weights, gradients and optimizer states must have the same bits.

    Every few steps, each rank sums the bits of these tensors on its device, and one number for each rank is exchanged
    while training continues. The result is read when the step is logged, or at the next check, or before a checkpoint
    is saved; nothing waits for it before. At a difference, every rank raises the same `SentinelError`. It names the
    ranks, the first parameter, what differs of it, the steps in which that happened, and checkpoints written since.
    With three or more ranks the majority decides which of them is wrong.

    The ranks that are compared have the same weights and read different data: all ranks with ddp; with fsdp and copies
    the ranks with the same shard. One device, and fsdp without copies, have none, and nothing is compared.

    Of buffers, those that do not change between two checks are compared: others may follow the data of each rank.

    With `replay_every`, the forward and backward passes of a step are run twice, on any number of ranks: with the same
    micro-batches, random numbers and buffers, they must give the same gradients. This is compared before the optimizer
    steps, so that a wrong gradient does not reach the weights. Where they differ, they are run a third time. Only
    `training_step`, `backward` and hooks of modules and tensors run again; what they log does not count.

    Args:
        every: Number of optimizer steps between two checks.
        replay_every: Number of optimizer steps between two that are run twice; None for none.
        ignore: Names of parameters and buffers that may differ between ranks, as patterns: "model.counts", "*.stats".
        on_difference: "stop", or "rollback": the fit returns to its last checkpoint up to the last check without a
            difference, and trains on the same samples again. Ranks are then compared before each checkpoint, too.
        max_rollbacks: With "rollback", the number of rollbacks of a training, resumed runs included. The next
            difference stops it; so does a second one of the same rank on the same device, where it is known.

    Raises:
        ConfigError: An argument is invalid; or, at the beginning of training, an engine holds the tensors, or steps of
            this run cannot be repeated.
        SentinelError: During training: a difference was found; with "rollback", if the run cannot return.
    """

    hears_every_step = True

    def __init__(
        self,
        every: int = 100,
        *,
        replay_every: int | None = None,
        ignore: Sequence[str] = (),
        on_difference: str = "stop",
        max_rollbacks: int = 3,
    ) -> None:
        super().__init__()
        if every < 1 or (replay_every is not None and replay_every < 1):
            raise ConfigError(
                f"Sentinel: expected every and replay_every of 1 or more, got every={every}, "
                f"replay_every={replay_every}.",
                fix="correct these arguments.",
            )
        if on_difference not in ("stop", "rollback") or max_rollbacks < 1:
            raise ConfigError(
                f"Sentinel: expected on_difference='stop' or 'rollback' and max_rollbacks of 1 or more, got "
                f"{on_difference!r} and {max_rollbacks}.",
                fix="correct these arguments.",
            )
        self.every, self.replay_every = every, replay_every
        self.on_difference, self.max_rollbacks = on_difference, max_rollbacks
        self.ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        self._lw_replicas: Replicas | None = None
        self._lw_check: ReplicaCheck | None = None  # whose result is not read yet
        self._lw_last: ReplicaCheck | None = None
        self._lw_agreed = -1
        self._lw_plays: PlayedWindows | None = None
        self._lw_repeated = -1  # the last step whose gradients were the same twice
        self._lw_files: dict[str, int] = {}  # checkpoints, and the step of each
        self._lw_saved_at = -1  # of a checkpoint that is not in there yet
        self._lw_start = 0
        self._lw_wrong_step: SentinelError | None = None  # of a step that was run twice: goes back at its end

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Find the ranks that have the same weights, and compare them for the first time."""
        strategy = trainer.strategy
        if strategy.traits.owns_optimizers or strategy.traits.traces_lazily:
            raise ConfigError(
                f"Expected a strategy whose gradients and optimizer states are tensors of this process for Sentinel, "
                f"got {type(strategy).__name__}.",
                fix="remove Sentinel, or use strategy='ddp' or 'fsdp'.",
            )
        self._lw_reset()
        self._lw_start = trainer.global_step
        if self.on_difference == "rollback":
            from ...trainer.rollback import prepare

            prepare(trainer, "Sentinel")
        run = cast("FitRun", trainer.present_run())
        run.after_rollback.append(lambda: self._lw_restart(trainer, pl_module))
        self._lw_files = dict.fromkeys(_files_of(trainer), -1)
        if self.replay_every is not None:
            from ...trainer.played_window import PlayedWindows

            self._lw_plays = PlayedWindows(run)
            self._lw_arm(trainer)
        replicas = Replicas.of(strategy, pl_module, self.ignore)
        if replicas.are_several:
            self._lw_replicas = replicas
            self._lw_begin(trainer, pl_module)
        elif trainer.is_global_zero and self._lw_plays is None:
            _log.warning(
                "Sentinel compares nothing: no two ranks of %s have the same weights at every step. replay_every=1000 "
                "runs a step twice, on any number of ranks.",
                type(strategy).__name__,
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Begin a check, compare the last one on the device, or read its result, if it is time."""
        replicas, check, step = self._lw_replicas, self._lw_check, trainer.global_step
        if not trainer.at_step_boundary:
            return
        wrong_step, self._lw_wrong_step = self._lw_wrong_step, None
        if wrong_step is not None:
            self._lw_raise(trainer, wrong_step)
        self._lw_arm(trainer)
        if replicas is None:
            return
        self._lw_note_files(trainer)
        if self.on_difference == "rollback" and trainer.validation_is_due:
            self._lw_look(trainer, pl_module)  # a validation cannot be left
            return
        is_due = step % self.every == 0 and self._lw_last is not None and step > self._lw_last.step
        if check is not None:
            if check.differs is None:
                replicas.compare(check)
            every = trainer.log_every_n_steps
            if is_due or (every and step % every == 0):
                self._lw_read(trainer)
        if is_due:
            self._lw_begin(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Compare what the epoch ends with, if a rollback may follow: training cannot return once it has ended."""
        if self.on_difference == "rollback":
            self._lw_look(trainer, pl_module)

    def _lw_look(self, trainer: Trainer, module: AnyModule) -> None:
        """Read the last check, and make one of now. On every rank.

        Raises:
            SentinelError: Ranks differ.
        """
        if self._lw_check is not None:
            self._lw_read(trainer)
        if self._lw_replicas is not None:
            self._lw_begin(trainer, module)
            self._lw_read(trainer)

    def _lw_restart(self, trainer: Trainer, module: AnyModule) -> None:
        """Begin again after a rollback, with the state of the checkpoint. On every rank."""
        step = trainer.global_step
        if self._lw_plays is not None:
            self._lw_plays.disarm()
            self._lw_arm(trainer)
        if self._lw_check is not None and self._lw_check.differs is None:
            self._lw_check.finish()
        self._lw_check = self._lw_last = self._lw_wrong_step = None
        self._lw_agreed, self._lw_repeated = min(self._lw_agreed, step), min(self._lw_repeated, step)
        self._lw_files = {path: at for path, at in self._lw_files.items() if at <= step}
        self._lw_start, self._lw_saved_at = step, -1
        self._lw_look(trainer, module)

    def _lw_raise(self, trainer: Trainer, error: SentinelError) -> NoReturn:
        """Raise the error, or let the run return to a checkpoint from before it. On every rank, at a step boundary."""
        run = trainer.present_run()
        is_possible = self.on_difference == "rollback" and trainer.global_step > self._lw_start
        if not is_possible or run is None or run.before_validation is not None:
            raise error
        from ...trainer.rollback import find, prepare, request

        found = error.deviation
        earlier = prepare(trainer, "Sentinel").of("Sentinel")
        places: list[list[int | str]] = [[*one] for one in zip(found.ranks, found.hosts, found.devices, strict=True)]
        known = [place for one in earlier if one["is_decided"] for place in one["places"]]
        again = [place for place in places if place in known] if found.is_decided else []
        checkpoint = None
        if again:
            reason = f"It is not the first time on {_ranks([int(place[0]) for place in again])}, for which the run has "
            reason += "returned to a checkpoint before"
        elif len(earlier) >= self.max_rollbacks:
            reason = f"The run has returned to a checkpoint {counted(len(earlier), 'time')} before"
        else:
            reason = f"The run cannot return: no full checkpoint up to step {found.agreed_step} is left (save earlier, "
            reason += "or keep more: ModelCheckpoint(keep_last=...))"
            checkpoint = find(trainer, found.agreed_step)
        if checkpoint is None:
            raise SentinelError(f"{error.what} {reason}.", fix=error.fix, deviation=found) from None
        last = trainer.progress.batches_in_epoch - 1
        request(
            trainer,
            checkpoint,
            callback="Sentinel",
            batches=(trainer.current_epoch, last, last),
            leaves_out=False,
            reason=f"Sentinel: {error.what}",
            details={"places": places, "is_decided": found.is_decided, "parameter": found.parameter,
                     "kind": found.kind},
        )  # fmt: skip

    def _lw_arm(self, trainer: Trainer) -> None:
        plays, every = self._lw_plays, self.replay_every
        if plays is not None and every is not None and (trainer.global_step + 1) % every == 0 and not plays.is_armed:
            plays.arm()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Run the passes of this step again, if it is time."""
        plays = self._lw_plays
        if plays is None or not plays.is_armed:
            return
        played, strategy = plays.play(), trainer.strategy
        if not played.plays:
            return
        if len(played.plays) == 2:
            self._lw_repeated = trainer.global_step + 1
            return
        everywhere = strategy.gather_objects((played, describe_place(strategy)))
        wrong = [rank for rank, (one, _) in enumerate(everywhere) if any(one.plays)]
        if self._lw_repeated < 0 and all(one.plays == (0, 1, 2) for one, _ in everywhere):
            self._lw_plays = None
            if trainer.is_global_zero:
                _log.warning(
                    "Sentinel: three runs of step %d had three different gradients on every rank, first of %s, so "
                    "that no further step is run twice. training_step uses operations that are not deterministic (pass "
                    "deterministic=True), or something that is not restored: attributes that it changes, generators of "
                    "its own, files. Else a processor computes wrongly.",
                    trainer.global_step,
                    everywhere[0][0].parameter,
                )
            return
        error = self._lw_played_error(trainer, wrong, everywhere)
        if self.on_difference == "stop" or self._lw_repeated < 0:  # never the same twice: perhaps not a fault
            raise error
        self._lw_wrong_step = error

    def on_save_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Read a result that is there already; compare what is saved, if it may be returned to."""
        if self.on_difference == "rollback" and (trainer.ranks_answer or trainer.world_size == 1):
            self._lw_look(trainer, pl_module)
        elif self._lw_check is not None and self._lw_check.differs is not None and trainer.ranks_answer:
            self._lw_read(trainer)
        self._lw_note_files(trainer)
        self._lw_saved_at = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Compare what training ends with."""
        last = self._lw_last
        self._lw_start = trainer.global_step  # training cannot return from here
        if last is None or not trainer.ranks_answer:
            self._lw_reset()
            return
        if self._lw_check is not None:
            self._lw_read(trainer)
        if trainer.global_step > last.step:
            self._lw_begin(trainer, pl_module)
            self._lw_read(trainer)
        self._lw_reset()

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Stop communicating with other ranks, which may be elsewhere."""
        self._lw_reset()

    def _lw_reset(self) -> None:
        if self._lw_plays is not None:
            self._lw_plays.disarm()
        self._lw_plays, self._lw_repeated = None, -1
        self._lw_replicas = self._lw_check = self._lw_last = None
        self._lw_agreed, self._lw_files, self._lw_saved_at, self._lw_wrong_step = -1, {}, -1, None

    def _lw_note_files(self, trainer: Trainer) -> None:
        """Note what was written since the last call."""
        step, self._lw_saved_at = self._lw_saved_at, -1
        if step >= 0:
            new = [path for path in _files_of(trainer) if path not in self._lw_files]
            last = [one.last_model_path for one in trainer.checkpoint_callbacks if _has_written(one, step)]
            at_step = trainer._lw_saving.path_at(step)
            self._lw_files.update(dict.fromkeys([*new, *last, *([] if at_step is None else [at_step])], step))

    def _lw_begin(self, trainer: Trainer, module: AnyModule) -> None:
        assert self._lw_replicas is not None
        run = trainer.present_run()
        # Reduced ones: a module that calls backward itself, and a window that is carried on, may have others.
        has_reduced = run is not None and run.is_automatic and run.has_stepped and self._lw_last is not None
        self._lw_check = self._lw_last = self._lw_replicas.begin(
            trainer.global_step, module, trainer.optimizers, self._lw_last, with_gradients=has_reduced
        )

    def _lw_read(self, trainer: Trainer) -> None:
        """Look at the result of the last check. On every rank.

        Raises:
            SentinelError: Ranks differ.
        """
        check, self._lw_check = self._lw_check, None
        assert check is not None
        assert self._lw_replicas is not None
        if self._lw_replicas.has_found(check):
            difference = self._lw_replicas.explain(check)
            if difference is not None:
                self._lw_raise(trainer, self._lw_error(trainer, check, difference))
        self._lw_agreed = check.step

    def _lw_error(self, trainer: Trainer, check: ReplicaCheck, found: ReplicaDifference) -> SentinelError:
        places = trainer.strategy.gather_objects(describe_place(trainer.strategy))
        self._lw_note_files(trainer)
        files = [path for path, step in self._lw_files.items() if path and step > self._lw_agreed]
        deviation = Deviation(
            kind=found.kind,
            parameter=found.items[0].owner,
            tensors=tuple(item.key or item.kind for item in found.items),
            ranks=tuple(found.ranks),
            is_decided=found.is_decided,
            hosts=tuple(places[rank][0] for rank in found.ranks),
            devices=tuple(places[rank][1] for rank in found.ranks),
            agreed_step=self._lw_agreed,
            step=check.step,
            checkpoints=tuple(files),
        )
        named = ", ".join(
            f"rank {rank} ({host}, {device})"
            for rank, host, device in zip(deviation.ranks, deviation.hosts, deviation.devices, strict=True)
        )
        who = f"other bits on {named} than on {_ranks(found.others)}" if found.is_decided else f"other bits on {named}"
        since = "were not compared before" if self._lw_agreed < 0 else f"agreed after step {self._lw_agreed}"
        rest = found.num_tensors - len(found.items)
        more = f" and in {counted(rest, 'tensor')} of others" if rest else ""
        return SentinelError(
            f"Expected the same bits on ranks with the same weights, got {who}, after step {check.step}, in "
            f"{', '.join(deviation.tensors)} of {deviation.parameter}"
            f"{more}. They {since}.",
            fix="test the memory and processor of "
            f"{'that rank' if found.is_decided and len(found.ranks) == 1 else 'these ranks'}, and resume from a "
            f"checkpoint that was taken up to step {max(self._lw_agreed, 0)}"
            f"{', not from ' + _listed(files) if files else ''}. If it happens again at the same step, look for code "
            "that changes a tensor on some ranks only; if it may differ, pass its name in ignore=.",
            deviation=deviation,
        )

    def _lw_played_error(
        self, trainer: Trainer, wrong: Sequence[int], everywhere: Sequence[tuple[Played, tuple[str, str]]]
    ) -> SentinelError:
        self._lw_note_files(trainer)
        step, since = trainer.global_step, self._lw_repeated
        files = [path for path, at in self._lw_files.items() if path and at > since]
        is_known = not trainer.strategy.traits.shards_parameters or trainer.world_size == 1
        deviation = Deviation(
            kind="played step",
            parameter=everywhere[wrong[0]][0].parameter,
            tensors=("gradient",),
            ranks=tuple(wrong),
            is_decided=is_known,
            hosts=tuple(everywhere[rank][1][0] for rank in wrong),
            devices=tuple(everywhere[rank][1][1] for rank in wrong),
            agreed_step=since,
            step=step + 1,
            checkpoints=tuple(files),
        )
        lines = [
            f"\n  rank {rank} ({host}, {device}): {_VERDICTS[played.plays]}; first in {played.parameter}"
            for rank, (played, (host, device)) in enumerate(everywhere)
            if rank in wrong
        ]
        whose = "" if is_known else " Any rank may have caused it, since gradients are reduced over ranks."
        last = (
            "none was run twice before" if since < 0 else f"the last step with the same gradients is step {since - 1}"
        )
        return SentinelError(
            f"Expected the same gradients from each run of step {step}, got different ones ({last}):{''.join(lines)}"
            f"{whose}",
            fix="if earlier steps had the same gradients twice, test the memory and processor of "
            f"{'that rank' if is_known and len(wrong) == 1 else 'these ranks'}, and resume from a checkpoint"
            f"{', preferably not ' + _listed(files) if files else ''}: the optimizer has not made this step. Otherwise "
            "pass deterministic=True, and let training_step change nothing but buffers and metrics.",
            deviation=deviation,
        )


_VERDICTS: dict[tuple[int, ...], str] = {
    (0, 0, 0): "all runs are the same",
    (0, 0, 2): "the third run differs",
    (0, 1, 1): "the second and the third run differ from the first",
    (0, 1, 0): "the second run differs from the others",
    (0, 1, 2): "all three runs differ",
}


def _files_of(trainer: Trainer) -> list[str]:
    """Return the checkpoints that checkpoint callbacks know of."""
    return [
        str(path)
        for one in trainer.checkpoint_callbacks
        for path in (*getattr(one, "best_k_models", ()), getattr(one, "best_model_path", ""))
    ]


def _has_written(callback: Checkpoint, step: int) -> TypeGuard[ModelCheckpoint]:
    """Return whether the newest file of a checkpoint callback, which may replace one of that name, is of this step."""
    return getattr(callback, "written_step", -1) == step and hasattr(callback, "last_model_path")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_MOST_NAMED])}{' ...' if len(names) > _MOST_NAMED else ''}"
