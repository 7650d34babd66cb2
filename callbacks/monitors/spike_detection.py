"""`SpikeDetection`, which acts when the loss jumps, and `SpikeDetector`, which works in any loop."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from ...errors import ConfigError, LoopwrightError
from ...files import only_describes, replace_file
from ...messages import counted
from ...remote import local_dir
from ..base import AnyModule, Callback, from_rank_zero

if TYPE_CHECKING:
    from ...protocols import AnyBatch, AnyOutput, StateDict
    from ...trainer import Trainer

_log = logging.getLogger(__name__)

_MOST_KEPT = 1000


class TrainingSpikeException(LoopwrightError, RuntimeError):
    """The loss of a batch jumped.

    Attributes:
        batch_idx: Index of the batch in its epoch, from 0.
    """

    _lw_arguments = ("fix", "batch_idx")

    def __init__(self, what: str, *, fix: str, batch_idx: int = -1) -> None:
        super().__init__(what, fix=fix)
        self.batch_idx = batch_idx


class SpikeDetector:
    """Compare each loss with the mean of the losses before it.

    A loss is a spike if it is not finite (with `finite_only`), or if it is worse than the mean by at least `atol` and
    by at least `rtol` times the mean. Spikes do not enter the mean.

    Args:
        mode: "min" if a smaller loss is better, else "max".
        window: Number of losses in the mean.
        warmup: Number of initial losses that are only collected; non-finite ones are spikes nevertheless.
        atol: Smallest difference of a spike; None for any.
        rtol: Smallest difference of a spike, as a fraction of the mean's absolute value; None for any.
        finite_only: Whether losses that are not finite are spikes.

    Raises:
        ConfigError: Arguments are invalid; all are named.
    """

    def __init__(
        self,
        mode: str = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        finite_only: bool = True,
    ) -> None:
        problems = [f"mode={mode!r} is neither 'min' nor 'max'"] if mode not in ("min", "max") else []
        problems += [f"window={window} is below 1"] if window < 1 else []
        problems += [f"warmup={warmup} is below 1"] if warmup < 1 else []
        problems += [f"{name}={value} is negative" for name, value in (("atol", atol), ("rtol", rtol))
                     if value is not None and value < 0]  # fmt: skip
        if atol is None and rtol is None and not finite_only:
            problems.append("atol=None, rtol=None and finite_only=False leave only a loss that is worse than the mean")
        if problems:
            raise ConfigError(f"SpikeDetection: {'; '.join(problems)}.", fix="change these arguments.")
        self.mode, self.window, self.warmup = mode, window, warmup
        self.atol, self.rtol, self.finite_only = atol, rtol, finite_only
        self.seen = 0
        self._losses: deque[float] = deque(maxlen=window)

    @property
    def mean(self) -> float:
        """Mean of the window; NaN if it is empty."""
        return sum(self._losses) / len(self._losses) if self._losses else math.nan

    def is_spike(self, loss: float) -> bool:
        """Return whether the next loss is a spike; otherwise add it to the mean."""
        found = self._judge(loss)
        self.seen += 1
        if not found and math.isfinite(loss):
            self._losses.append(loss)
        return found

    def _judge(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return self.finite_only
        if self.seen < self.warmup or not self._losses:
            return False
        mean = self.mean
        worse_by = loss - mean if self.mode == "min" else mean - loss
        return (
            worse_by > 0
            and (self.atol is None or worse_by >= self.atol)
            and (self.rtol is None or worse_by >= self.rtol * abs(mean))
        )

    def state_dict(self) -> StateDict:
        """Return the window as plain numbers."""
        return {"seen": self.seen, "losses": list(self._losses)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what `state_dict` returned."""
        self.seen = int(state_dict["seen"])
        self._losses = deque(state_dict["losses"], maxlen=self.window)


class SpikeDetection(Callback):
    """Stop training with a `TrainingSpikeException` when the loss of a batch jumps, on any rank, or roll it back.

    `SpikeDetector` defines a spike. The batch and the one before it, whose step may have caused the jump, are added to
    `skip_batches.json`, a list of batch indices in their epoch. A later run may skip them: `training_step` returns None
    for a batch in `SpikeDetection.bad_batches`.

    Losses stay on the device and are checked at log boundaries and before a checkpoint is written, so that no
    checkpoint follows an undetected spike. `check_every_n_steps=1` detects a spike at once, and waits for the device at
    each step.

    With `on_spike="rollback"`, the fit returns to its last checkpoint (of a `ModelCheckpoint` or `Snapshot`) in the
    same process, and leaves out the window of the spike, bit for bit as if its samples had not been in the data.

    Args:
        mode: See `SpikeDetector`.
        window: See `SpikeDetector`.
        warmup: See `SpikeDetector`.
        atol: See `SpikeDetector`.
        rtol: See `SpikeDetector`.
        exclude_batches_path: Directory or `.json` file of the list. None is the Trainer's `default_root_dir`, or the
            working directory if that is a URL.
        finite_only: See `SpikeDetector`.
        check_every_n_steps: Number of steps between checks; None is `log_every_n_steps`.
        on_spike: "stop", or "rollback".
        skip: With "rollback": "samples" leaves out the window of the spike, None trains on it again.
        max_rollbacks: Number of rollbacks of a training, resumed runs included; the next spike stops it.

    Attributes:
        bad_batches: Indices of all batches found so far, including the batches in the file.

    Raises:
        ConfigError: An argument is invalid.
        TrainingSpikeException: In training, on every rank: the loss of a batch jumped; with "rollback", if there is no
            checkpoint before it, or after `max_rollbacks`.
    """

    hears_every_step = True

    def __init__(
        self,
        mode: str = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
        *,
        check_every_n_steps: int | None = None,
        on_spike: str = "stop",
        skip: str | None = "samples",
        max_rollbacks: int = 3,
    ) -> None:
        self._lw_arguments = {"mode": mode, "window": window, "warmup": warmup, "atol": atol, "rtol": rtol,
                           "finite_only": finite_only}  # fmt: skip
        self.detector = SpikeDetector(**self._lw_arguments)  # type: ignore[arg-type]
        if check_every_n_steps is not None and check_every_n_steps < 1:
            raise ConfigError(
                f"SpikeDetection: check_every_n_steps={check_every_n_steps} is below 1.", fix="pass None, or 1 or more."
            )
        if on_spike not in ("stop", "rollback") or skip not in ("samples", None) or max_rollbacks < 1:
            raise ConfigError(
                f"SpikeDetection: expected on_spike='stop' or 'rollback', skip='samples' or None and max_rollbacks of "
                f"1 or more, got {on_spike!r}, {skip!r} and {max_rollbacks}.",
                fix="correct these arguments.",
            )
        self.on_spike, self.skip, self.max_rollbacks = on_spike, skip, max_rollbacks
        self.exclude_batches_path = None if exclude_batches_path is None else Path(exclude_batches_path).expanduser()
        self.check_every_n_steps = check_every_n_steps
        self.bad_batches: list[int] = []
        # What was not judged yet: the losses of this rank, on the device, and those that every rank knows.
        self._lw_own: list[tuple[int, Tensor]] = []
        self._lw_known: list[tuple[int, int, float]] = []
        self._lw_every = 1
        self._lw_has_looked, self._lw_first_step = False, 0
        self._lw_trainer: Trainer | None = None

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint: all arguments distinguish instances."""
        return self._generate_state_key(**self._lw_arguments)

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Read the list of earlier runs."""
        self._lw_every = min(self.check_every_n_steps or trainer.log_every_n_steps or 50, _MOST_KEPT)
        self._lw_own = []
        self._lw_has_looked = False
        self._lw_first_step = trainer.progress.steps
        self._lw_trainer = trainer
        if self.on_spike == "rollback":
            self._lw_prepare(trainer, pl_module)
            return
        path = self._lw_file(trainer)
        found = from_rank_zero(trainer, lambda: json.loads(path.read_text()) if path.exists() else [])
        self.bad_batches = sorted({*self.bad_batches, *found})

    def _lw_prepare(self, trainer: Trainer, pl_module: AnyModule) -> None:
        from ...trainer.rollback import prepare

        is_changed = type(self).after_rollback is not SpikeDetection.after_rollback
        then = (lambda entry: self.after_rollback(trainer, pl_module, entry)) if is_changed else None
        prepare(trainer, "SpikeDetection", then)
        run = trainer.present_run()
        assert run is not None, "it is called in fit"
        if run.skips_bad_steps:
            self.detector.finite_only = False  # nonfinite_loss="skip" leaves such steps out already
        elif self.detector.finite_only:
            run.watch.keeps = False  # instead of a warning or an error

    def after_rollback(self, trainer: Trainer, pl_module: AnyModule, entry: StateDict) -> None:
        """Change something after a rollback, on every rank: a subclass may lower the learning rate here.

        It is called again when a run resumes from the same checkpoint.

        Args:
            trainer: The Trainer, whose state is that of the checkpoint.
            pl_module: The module.
            entry: Its entry in `rollbacks.json`.
        """

    def _lw_file(self, trainer: Trainer) -> Path:
        path = self.exclude_batches_path or Path(local_dir(trainer.default_root_dir))
        return path if path.suffix == ".json" else path / "skip_batches.json"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Keep the loss without reading it; check all kept losses when a check is due."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is not None:
            self._lw_own.append((batch_idx, loss))
        # Windows are counted, not steps: their number is the same on all ranks and grows with each.
        if not trainer.at_step_boundary:
            return
        is_due = (trainer.progress.steps + trainer.progress.skipped_steps) % self._lw_every == 0
        # No loss is to be judged within a validation, which a rollback would have to leave.
        if is_due or (self.on_spike == "rollback" and trainer.validation_is_due):
            self._lw_look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Check the remaining losses, because batch indices start again."""
        self._lw_look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Stop communicating with other ranks."""
        self._lw_trainer = None

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Communicate with other ranks only if they are at the same place."""
        if not trainer.ranks_answer:
            self._lw_trainer = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Check the remaining losses: no checkpoint may follow a spike. At the end of a run, they are saved instead."""
        if not trainer.interrupted:
            self._lw_judge_known(trainer)

    def _lw_learn(self) -> None:
        """Let every rank know the losses of all, in the order of their batches. One copy and one exchange."""
        own, self._lw_own = self._lw_own, []
        values = torch.stack([loss.detach().double().reshape(()) for _, loss in own]).tolist() if own else []
        trainer = self._lw_trainer
        rank = 0 if trainer is None else trainer.strategy.topology.report_place[0]
        losses = [(number, rank, value) for (number, _), value in zip(own, values, strict=True)]
        if trainer is not None and trainer.ranks_answer:
            everywhere = trainer.strategy.gather_objects(losses)
            losses = [one for part in trainer.strategy.topology.reports(everywhere) for one in part]
        self._lw_known += sorted(losses, key=lambda one: one[:2])
        self._lw_has_looked |= bool(losses)  # they may be judged before a check is due: when a checkpoint is saved

    def _lw_look(self, trainer: Trainer) -> None:
        self._lw_learn()
        steps = trainer.progress.steps - self._lw_first_step  # none in an epoch that is only ended after a resume
        if not self._lw_has_looked and trainer.is_global_zero and steps:
            _log.warning(
                "SpikeDetection has seen no loss in %s: training_step returns none. Return it, also with manual "
                "optimization, as a tensor or a dict with the key 'loss'.",
                counted(steps, "step"),
            )
        self._lw_has_looked |= steps > 0
        self._lw_judge_known(trainer)

    def _lw_judge_known(self, trainer: Trainer) -> None:
        """Judge, with the same result on every rank."""
        known, self._lw_known = self._lw_known, []
        found = [(number, loss, mean) for number, _, loss in known
                 for mean in (self.detector.mean,) if self.detector.is_spike(loss)]  # fmt: skip
        if not found:
            return
        number, loss, mean = found[0]
        what = (
            f"batch {number} of epoch {trainer.current_epoch} has the loss {loss:.6g}, the mean of those before is "
            f"{mean:.6g}"
        )
        if self.on_spike == "rollback":
            self._lw_go_back(trainer, number, loss, mean, what)
        numbers = {number for spike in found for number in (spike[0] - 1, spike[0]) if number >= 0}
        self.bad_batches = sorted({*self.bad_batches, *numbers})
        path = self._lw_file(trainer)
        if trainer.is_global_zero:
            with only_describes(f"The list of batches {path}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, json.dumps(self.bad_batches))
        raise TrainingSpikeException(
            f"{what}.",
            fix=f"resume from an earlier checkpoint and leave out the batches in {path}, or lower the learning rate.",
            batch_idx=number,
        )

    def _lw_go_back(self, trainer: Trainer, number: int, loss: float, mean: float, what: str) -> NoReturn:
        from ...trainer.rollback import find, prepare, request

        left_out, epoch = prepare(trainer, "SpikeDetection"), trainer.current_epoch
        earlier = left_out.of("SpikeDetection")
        if len(earlier) >= self.max_rollbacks:
            places = ", ".join(f"epoch {one['epoch']} batches {one['batches']}" for one in earlier)
            raise TrainingSpikeException(
                f"{what}, after {len(earlier)} rollbacks for {places}.",
                fix=f"look at these batches and the learning rate; {left_out.path} lists them. Pass a larger "
                "max_rollbacks to continue, or remove the file to count from 0.",
                batch_idx=number,
            )
        # Losses are judged before each checkpoint, so that all of them were taken before the spike.
        checkpoint = find(trainer, trainer.global_step)
        if checkpoint is None:
            raise TrainingSpikeException(
                f"{what}, and this run has no full checkpoint from before to roll back to.",
                fix="save earlier: ModelCheckpoint(every_n_train_steps=...) or Snapshot(every=...); a longer warmup "
                "tolerates the first losses of a run.",
                batch_idx=number,
            )
        size = trainer.fit_loop.accumulation_for_epoch(epoch)
        first = number // size * size
        last = max(number, min(first + size, trainer.progress.batches_in_epoch) - 1)
        request(
            trainer,
            checkpoint,
            callback="SpikeDetection",
            batches=(epoch, first, last),
            leaves_out=self.skip == "samples",
            reason=f"SpikeDetection: {what}",
            details={"batch": number, "loss": repr(loss), "mean": repr(mean)},
        )

    def forget_run(self) -> None:
        """Reset the losses and batches of another run."""
        self.detector = SpikeDetector(**self._lw_arguments)  # type: ignore[arg-type]
        self.bad_batches, self._lw_known, self._lw_own = [], [], []

    def state_dict(self) -> StateDict:
        """Return the window, the batches found, and the unchecked losses. In fit, call it on every rank."""
        self._lw_learn()
        return {
            "detector": self.detector.state_dict(),
            "bad_batches": list(self.bad_batches),
            "pending": [list(one) for one in self._lw_known],
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what `state_dict` returned."""
        self.detector.load_state_dict(state_dict["detector"])
        self.bad_batches = list(state_dict["bad_batches"])
        self._lw_known = [(number, rank, loss) for number, rank, loss in state_dict["pending"]]
