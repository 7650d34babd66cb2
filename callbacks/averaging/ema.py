"""`EMA`: an exponential moving average of the weights.

A checkpoint's "state_dict" holds the trained weights; the average is this callback's own state. Evaluation may use the
average: the values are exchanged before it and restored after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import ModuleError
from .base import StepAveraging, check_ema_arguments
from .weights import as_whole, clones_of, in_memory, tensors_of, write

if TYPE_CHECKING:
    from ...protocols import StateDict
    from ...trainer import Trainer
    from ..base import AnyModule


class EMA(StepAveraging):
    """Keep `average = decay * average + (1 - decay) * weights`, updated after optimizer steps.

    The average starts as a copy of the weights at its first update. Skipped steps (an overflow of the loss scale, a
    batch without a loss) do not count. Nothing is read from the device. A resumed run continues bit for bit.

    Args:
        decay: Weight of the previous average, from 0 to 1.
        device: Device of the average; None is the device of the weights. "cpu" saves device memory and costs a copy per
            update.
        use_buffers: Whether floating-point buffers (batch norm statistics) are averaged; otherwise they are copied.
            Buffers of other types are always copied.
        update_every_n_steps: Update at the 1st, (n+1)-th, ... step.
        update_starting_at_step: No update in the steps before this one, counted from 0.
        update_starting_at_epoch: No update in the epochs before this one, counted from 0.
        evaluate_with: Whether validation, test and prediction use the average, once it has been updated.

    Attributes:
        num_updates: Number of updates.

    Raises:
        ConfigError: An argument is invalid.
        CheckpointError: A saved average does not fit the module.

    With several ranks, each keeps the same average of the weights. If the strategy shards the model, each rank keeps
    the average of its shards; then `shadow_state_dict` and `copy_to` communicate: call them on every rank. Averages of
    buffers (of batch norms) differ as the buffers do; evaluation and checkpoints use rank 0's.

    The average of float16 and bfloat16 weights is kept in float32: at a decay of 0.999, a bfloat16 average would not
    change.
    """

    def __init__(
        self,
        decay: float = 0.999,
        device: str | torch.device | None = None,
        use_buffers: bool = True,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        evaluate_with: bool = True,
    ) -> None:
        check_ema_arguments(decay, update_every_n_steps, update_starting_at_step, update_starting_at_epoch, owner="EMA")
        super().__init__(device, use_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step or 0
        self.update_starting_at_epoch = update_starting_at_epoch or 0
        self.evaluate_with = evaluate_with

        self.num_updates = 0
        self._lw_has_stepped = False  # in this run

    # --- what users call -------------------------------------------------------------------------------------------

    def should_update(self, step_idx: int, epoch_idx: int) -> bool:
        """Whether to update after this step of this epoch, both counted from 0. May be overridden."""
        return (
            step_idx >= self.update_starting_at_step
            and epoch_idx >= self.update_starting_at_epoch
            and step_idx % self.update_every_n_steps == 0
        )

    def shadow_state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the average under the module's names, as `load_state_dict` accepts them; full tensors.

        Raises:
            ModuleError: There was no update yet.
        """
        self._lw_require_updates("shadow_state_dict()")
        state = {name: as_whole(tensor) for name, tensor in self._lw_average.items()}
        return state | {alias: state[name] for alias, name in self._lw_aliases.items() if name in state}

    def copy_to(self, module: nn.Module) -> None:
        """Write the average into a module with the same parameters and buffers.

        Raises:
            ModuleError: There was no update yet.
            CheckpointError: The module has other names or shapes.
        """
        self._lw_require_updates("copy_to()")
        write(self._lw_average, tensors_of(module), owner="EMA")

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[nn.Module]:
        """Load the average into the module within the `with` block, and restore the module's values after it."""
        self._lw_require_updates("applied()")
        tensors = tensors_of(module)
        raw = clones_of(tensors)
        write(self._lw_average, tensors, owner="EMA")
        try:
            yield module
        finally:
            write(raw, tensors, owner="EMA")

    # --- hooks -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Find the module's tensors; a loaded average is checked against them and moved beside them."""
        self._lw_bind(pl_module)
        self._lw_has_stepped = False

    def forget_run(self) -> None:
        """Reset the average."""
        self._lw_average, self.num_updates, self._lw_seen_step, self._lw_source = {}, 0, None, None

    def state_dict(self) -> StateDict:
        """Return the average, the number of updates and the last step."""
        seen_step = -1 if self._lw_seen_step is None else self._lw_seen_step
        return {"shadow": in_memory(self._lw_average), "num_updates": self.num_updates, "seen_step": seen_step}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the average; it is moved to its device when the run starts."""
        self._lw_average, self._lw_is_borrowed = dict(state_dict["shadow"]), True
        self.num_updates = int(state_dict["num_updates"])
        seen_step = int(state_dict["seen_step"])
        self._lw_seen_step = None if seen_step < 0 else seen_step
        self._lw_source = None

    # --- the average -----------------------------------------------------------------------------------------------

    def _lw_note_step(self, trainer: Trainer, module: nn.Module) -> None:
        self._lw_seen_step = step = trainer.global_step
        if self.should_update(step - 1, trainer.current_epoch):
            self._lw_update(module)

    @torch.no_grad()
    def _lw_update(self, module: nn.Module) -> None:
        if not self._lw_has_stepped and self._lw_average:
            self._lw_bind(module)  # torch before 2.13 moves shards that it pads to other memory in the first forward
        self._lw_has_stepped = True
        if not self._lw_average:
            self._lw_begin_average(module)
            self.num_updates = 1
            return
        for group in self._lw_averaged:
            torch._foreach_lerp_(group.averages, group.near(), 1.0 - self.decay)
        self._lw_copy_others()
        self.num_updates += 1

    def _lw_is_evaluated(self) -> bool:
        return self.evaluate_with and self.num_updates > 0

    def _lw_require_updates(self, what: str) -> None:
        if not self.num_updates:
            raise ModuleError(
                f"EMA.{what}: the average was not updated yet.",
                fix="train at least one step (and reach update_starting_at_step / update_starting_at_epoch) first.",
            )
