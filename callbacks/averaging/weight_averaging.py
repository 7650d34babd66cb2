"""`WeightAveraging` and `EMAWeightAveraging`: averages of the weights, by torch's averaging functions.

A checkpoint's "state_dict" contains the trained weights; the average is this callback's state. Validation uses the
average, and at the end of training it is written into the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from ...errors import ConfigError, nearest
from .base import StepAveraging, check_ema_arguments
from .weights import clones_of, in_memory, refuse_engines, tensors_of

if TYPE_CHECKING:
    from ...protocols import StateDict
    from ...trainer import Trainer
    from ..base import AnyModule

AvgFn = Callable[[Tensor, Tensor, Tensor], Tensor]
MultiAvgFn = Callable[[list[Tensor], list[Tensor], Tensor | int], None]


class WeightAveraging(StepAveraging):
    """Average the weights after each optimizer step, or whenever an override of `should_update` says so.

    The first update copies the weights. Each further one applies `avg_fn` or `multi_avg_fn`, or takes the mean of all
    updates so far. Once there is an average, validation, test and prediction use it; the trained weights are restored
    afterwards. At the end of training, the average is written into the module. Nothing is read from the device.

    Checkpoints contain the trained weights in "state_dict" and the average in this callback's state, so that resuming
    is exact. A checkpoint that is saved after `trainer.fit` has returned contains the average. Lightning's checkpoints,
    which store them the other way round, can be loaded.

    Args:
        device: Device of the average; None is the device of the weights. "cpu" saves device memory and costs a copy per
            update.
        use_buffers: Whether floating-point buffers (batch norm statistics) are averaged; otherwise they are copied from
            the module. Buffers of other types are always copied.
        kwargs: `avg_fn(average, weight, num_averaged) -> average`, or `multi_avg_fn(averages, weights, num_averaged)`,
            which changes lists of tensors of one device and dtype in place; as for `torch.optim.swa_utils`.

    Attributes:
        n_averaged: Number of updates.

    Raises:
        ConfigError: An argument is unknown, both functions are passed, or the strategy is DeepSpeed.
        CheckpointError: A saved average does not fit the module.

    With several ranks, each keeps the same average of the weights. If the strategy shards the model, each rank keeps
    the average of its shards; functions then receive shards, and must compute elementwise. In evaluation, at the end of
    training and in checkpoints, averages of buffers are rank 0's. The average of float16 and bfloat16 weights is kept
    in float32.
    """

    def __init__(
        self, device: str | torch.device | int | None = None, use_buffers: bool = True, **kwargs: Any
    ) -> None:  # Any: see the docstring
        name = type(self).__name__
        known = ("avg_fn", "multi_avg_fn")
        problems = [f"{key}= is not an argument{nearest(key, known)}" for key in kwargs if key not in known]
        given = {key: kwargs[key] for key in known if kwargs.get(key) is not None}
        problems += [f"{key}={value!r} is not callable" for key, value in given.items() if not callable(value)]
        if len(given) == 2:
            problems.append("avg_fn and multi_avg_fn are both given")
        if problems:
            raise ConfigError(f"{name}: {'; '.join(problems)}.", fix="pass one of avg_fn and multi_avg_fn, or neither.")
        super().__init__(device, use_buffers)
        self.n_averaged = 0
        self._lw_avg_fn: AvgFn | None = given.get("avg_fn")
        self._lw_multi_avg_fn: MultiAvgFn = given.get("multi_avg_fn") or get_swa_multi_avg_fn()
        self._lw_is_mean = not given
        self._lw_latest_epoch = -1
        self._lw_is_due = False  # the update of the epoch that ends
        self._lw_is_final = False  # training is over, and the module is the average

    @property
    def state_key(self) -> str:
        """The class name and the arguments that distinguish instances."""
        return self._generate_state_key(use_buffers=self.use_buffers)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update now. Override it to choose.

        Called on every rank after each optimizer step that was not skipped, with `step_idx`, and at the end of each
        epoch, with `epoch_idx`. The result must be the same on all ranks.

        Args:
            step_idx: Index of the last optimizer step, counted from 0; None at the end of an epoch.
            epoch_idx: Index of the epoch that ends, counted from 0; None after a step.
        """
        return step_idx is not None

    # --- hooks -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Find the module's tensors; a loaded average is checked against them and moved beside them."""
        refuse_engines(trainer, owner=type(self).__name__)
        if self._lw_source is not None and self._lw_source is not pl_module:
            self._lw_average, self.n_averaged, self._lw_seen_step, self._lw_latest_epoch = {}, 0, None, -1
            self._lw_is_due = False
        self._lw_is_final = False
        self._lw_bind(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Request an update at the end of an epoch, unless a limit interrupted it.

        The update runs after the checkpoints are saved, because their score belongs to the average before it.
        """
        epoch = trainer.current_epoch
        if trainer.progress.epoch_paused or epoch <= self._lw_latest_epoch:
            return
        self._lw_latest_epoch = epoch
        if self.should_update(epoch_idx=epoch):
            self._lw_is_due = True
            trainer._lw_after_epoch_end(lambda: self._lw_update_if_due(pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Continue from the checkpoint; make an update that was due."""
        super().on_train_start(trainer, pl_module)
        self._lw_update_if_due(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Write the average into the module. Checkpoints that are still due in this run hold the trained weights."""
        self._lw_swap_in(trainer, pl_module)

    def take_over(self, trainer: Trainer, module: nn.Module, state: StateDict) -> None:
        """Write the average of a checkpoint into the module whose weights it has; see `on_train_end`."""
        super().take_over(trainer, module, state)
        self._lw_swap_in(trainer, module)

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Release the trained weights: the module now holds the average."""
        if stage == "fit" and self._lw_raw is not None:
            self._lw_raw, self._lw_is_final = None, True

    def on_load_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Extract the average from a checkpoint of Lightning, which stores it in "state_dict"."""
        if "averaging_state" not in checkpoint or "current_model_state" not in checkpoint:
            return
        self._lw_average = clones_of(tensors_of(pl_module))  # loaded from "state_dict" just now
        self.n_averaged = int(checkpoint["averaging_state"]["n_averaged"])
        self._lw_seen_step, self._lw_source = int(checkpoint["global_step"]), None
        trainer.strategy.load_module_state_dict(pl_module, checkpoint["current_model_state"])

    def forget_run(self) -> None:
        """Reset the average."""
        self._lw_average, self.n_averaged, self._lw_seen_step, self._lw_latest_epoch, self._lw_source = (
            {},
            0,
            None,
            -1,
            None,
        )

    def state_dict(self) -> StateDict:
        """Return the average, the number of updates, and the last step and epoch."""
        return {
            "average": in_memory(self._lw_average),
            "n_averaged": self.n_averaged,
            "latest_update_step": -1 if self._lw_seen_step is None else self._lw_seen_step,
            "latest_update_epoch": self._lw_latest_epoch,
            "is_due": self._lw_is_due,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the average; it is moved to its device when the run starts."""
        self._lw_average, self._lw_is_borrowed = dict(state_dict["average"]), True
        self.n_averaged = int(state_dict["n_averaged"])
        step = int(state_dict["latest_update_step"])
        self._lw_seen_step = None if step < 0 else step
        self._lw_latest_epoch = int(state_dict["latest_update_epoch"])
        self._lw_is_due = bool(state_dict.get("is_due", False))
        self._lw_source, self._lw_is_final = None, False

    # --- the average -----------------------------------------------------------------------------------------------

    def _lw_swap_in(self, trainer: Trainer, module: nn.Module) -> None:
        is_own = type(self).should_update not in (WeightAveraging.should_update, EMAWeightAveraging.should_update)
        if is_own and trainer.ranks_answer:
            self._lw_compare_updates(trainer)
        super()._lw_swap_in(trainer, module)

    def _lw_compare_updates(self, trainer: Trainer) -> None:
        """Refuse averages with different numbers of updates on the ranks; on every rank."""
        counts = trainer.strategy.gather_objects(self.n_averaged)
        if len(set(counts)) > 1:
            listed = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
            raise ConfigError(
                f"{type(self).__name__}.should_update led to different numbers of updates: {listed}.",
                fix="decide by step_idx and epoch_idx, or by values that are equal on all ranks, not at random.",
            )

    def _lw_note_step(self, trainer: Trainer, module: nn.Module) -> None:
        self._lw_seen_step = step = trainer.global_step
        if self.should_update(step_idx=step - 1):
            self._lw_update(module)

    def _lw_update_if_due(self, module: nn.Module) -> None:
        if self._lw_is_due:
            self._lw_is_due = False
            self._lw_update(module)

    @torch.no_grad()
    def _lw_update(self, module: nn.Module) -> None:
        if not self.n_averaged:
            self._lw_begin_average(module)
            self.n_averaged = 1
            return
        # Users' functions get a tensor, as from torch; its own mean would read it, and takes a number as well.
        count = self.n_averaged if self._lw_is_mean else torch.tensor(self.n_averaged)
        for group in self._lw_averaged:
            if self._lw_avg_fn is None:
                self._lw_multi_avg_fn(group.averages, group.near(), count)
                continue
            for source, average in zip(group.near(), group.averages, strict=True):
                average.copy_(self._lw_avg_fn(average, source, torch.as_tensor(count)))
        self._lw_copy_others()
        self.n_averaged += 1

    def _lw_is_evaluated(self) -> bool:
        return self.n_averaged > 0 and not self._lw_is_final


class EMAWeightAveraging(WeightAveraging):
    """Keep `average = decay * average + (1 - decay) * weights`; otherwise as `WeightAveraging`.

    `EMA` computes the same average and leaves the trained weights in the module at the end of training.

    Args:
        device: See `WeightAveraging`.
        use_buffers: See `WeightAveraging`.
        decay: Weight of the previous average, from 0 to 1.
        update_every_n_steps: Update after the steps whose index, counted from 0, is a multiple of this.
        update_starting_at_step: First step, counted from 0, after which to update; None is the first step.
        update_starting_at_epoch: First epoch, counted from 0, at whose end to update as well; None for never.
        kwargs: See `WeightAveraging`; a function in them replaces the decay.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        device: str | torch.device | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,  # Any: functions, see WeightAveraging
    ) -> None:
        check_ema_arguments(
            decay, update_every_n_steps, update_starting_at_step, update_starting_at_epoch, owner=type(self).__name__
        )
        if kwargs.get("avg_fn") is None and kwargs.get("multi_avg_fn") is None:
            kwargs["multi_avg_fn"] = get_ema_multi_avg_fn(decay)
        super().__init__(device, use_buffers, **kwargs)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    @property
    def state_key(self) -> str:
        """The class name and the arguments that distinguish instances."""
        return self._generate_state_key(decay=self.decay, update_every_n_steps=self.update_every_n_steps)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update now; see `WeightAveraging.should_update`."""
        if step_idx is not None:
            return step_idx >= (self.update_starting_at_step or 0) and step_idx % self.update_every_n_steps == 0
        starts = self.update_starting_at_epoch
        return epoch_idx is not None and starts is not None and epoch_idx >= starts
