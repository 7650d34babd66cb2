"""Bases of callbacks that average the weights: the average itself, and its updates after steps.

The trained weights stay in the module and in a checkpoint's "state_dict"; the average is the callback's own state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ..base import AnyModule, Callback, from_rank_zero
from .weights import (
    check_fit,
    clean_name,
    clones_of,
    keep_trained,
    kept_dtype,
    part_of,
    placed,
    tensors_of,
    tied_names,
    write,
)

if TYPE_CHECKING:
    from ...protocols import AnyBatch, AnyOutput, StateDict
    from ...trainer import Trainer


class Averaging(Callback):
    """Keep an average in addition to the weights.

    Args:
        device: Device of the average; None is the device of the weights.
    """

    replaces_weights = True

    def __init__(self, device: str | torch.device | int | None) -> None:
        self.device = None if device is None else torch.device(device)
        # After `load_state_dict`, tensors may still be in a file until a module determines the part that is needed.
        self._lw_average: dict[str, Tensor] = {}
        self._lw_is_borrowed = False  # the memory is that of the state that was loaded
        self._lw_raw: dict[str, Tensor] | None = None  # the trained values while the module holds the average
        self._lw_source: nn.Module | None = None
        self._lw_aliases: dict[str, str] = {}

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Restore the trained weights."""
        self._lw_swap_out(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Keep the trained weights in the checkpoint if the module holds the average."""
        keep_trained(checkpoint, self._lw_raw, self._lw_aliases)

    def averaged_module(self) -> nn.Module | None:
        """Return a copy of the module with the averaged weights; None before training."""
        if self._lw_source is None:
            return None
        module = copy.deepcopy(self._lw_source)
        if self._lw_average:
            write(self._lw_average, tensors_of(module), owner=type(self).__name__)
        return module

    def _lw_copy_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Start the average as a copy of the weights, in a dtype that small changes are not lost in."""
        self._lw_average = {
            name: tensor.detach().to(device=self.device or tensor.device, dtype=kept_dtype(tensor), copy=True)
            for name, tensor in tensors.items()
        }

    def _lw_place(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Move the average to its device, sharded as the module's tensors are.

        Raises:
            CheckpointError: The average has other names or shapes than the module.
        """
        self._lw_source, self._lw_aliases = module, tied_names(module)
        if self._lw_average:
            check_fit(self._lw_average, tensors, owner=type(self).__name__)
            for name, tensor in tensors.items():
                self._lw_average[name] = placed(self._lw_average[name], tensor, self.device, copy=self._lw_is_borrowed)
            self._lw_is_borrowed = False

    def _lw_swap_out(self, module: nn.Module) -> None:
        if self._lw_raw is not None:
            raw, self._lw_raw = self._lw_raw, None
            write(raw, tensors_of(module), owner=type(self).__name__)


@dataclass(slots=True)
class _Group:
    """Weights and their averages, which have one device and dtype."""

    sources: list[Tensor] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)
    is_near: bool = True  # the weights have the device and dtype of the averages

    def near(self) -> list[Tensor]:
        """Return the weights on the device and in the dtype of the averages."""
        if self.is_near:
            return self.sources
        return [source.to(average) for source, average in zip(self.sources, self.averages, strict=True)]


class StepAveraging(Averaging):
    """Update the average after optimizer steps, and evaluate with it: subclasses define when and how to update.

    Args:
        device: Device of the average; None is the device of the weights.
        use_buffers: Whether floating-point buffers are averaged; otherwise they are copied.
    """

    hears_every_step = True

    def __init__(self, device: str | torch.device | int | None, use_buffers: bool) -> None:
        super().__init__(device)
        self.use_buffers = use_buffers
        self._lw_seen_step: int | None = None
        # What an update touches, collected once per run.
        self._lw_averaged: list[_Group] = []
        self._lw_copied: list[tuple[Tensor, Tensor]] = []

    # --- defined by a subclass ---------------------------------------------------------------------------------------

    def _lw_note_step(self, trainer: Trainer, module: nn.Module) -> None:
        """Record a completed step, and update if one is due."""
        raise NotImplementedError

    def _lw_is_evaluated(self) -> bool:
        """Whether evaluation currently uses the average."""
        raise NotImplementedError

    # --- hooks -------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Continue from the checkpoint; if it was saved before the update of its step, update now."""
        if self._lw_seen_step is not None and self._lw_seen_step < trainer.global_step:
            self._lw_note_step(trainer, pl_module)
        self._lw_seen_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Request an update after a step that was not skipped."""
        if trainer.global_step != self._lw_seen_step:
            self._lw_note_step(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Evaluate with the average."""
        self._lw_swap_in(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Restore the trained weights."""
        self._lw_swap_out(pl_module)

    def take_over(self, trainer: Trainer, module: nn.Module, state: StateDict) -> None:
        """Continue with the average of a checkpoint whose weights have just been loaded into the module.

        Args:
            trainer: The trainer, whose training has ended.
            module: The module.
            state: What `state_dict` returned.
        """
        self._lw_raw = None
        self.load_state_dict(state)
        self._lw_bind(module)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # --- the average -------------------------------------------------------------------------------------------------

    def _lw_begin_average(self, module: nn.Module) -> None:
        self._lw_copy_weights(tensors_of(module))
        self._lw_bind(module)

    def _lw_bind(self, module: nn.Module) -> None:
        """Place the average beside the module, and group this rank's tensors as an update treats them.

        Raises:
            CheckpointError: The average has other names or shapes than the module.
        """
        tensors = tensors_of(module)
        self._lw_place(module, tensors)
        parameters = {clean_name(name) for name, _ in module.named_parameters()}
        self._lw_copied = []
        groups: dict[tuple[torch.device, torch.dtype], _Group] = {}
        for name, tensor in tensors.items() if self._lw_average else ():
            source, average = part_of(tensor.detach()), part_of(self._lw_average[name])
            is_number = tensor.is_floating_point() or tensor.is_complex()
            if not (is_number and (name in parameters or self.use_buffers)):
                self._lw_copied.append((source, average))
                continue
            group = groups.setdefault((average.device, average.dtype), _Group())
            group.sources.append(source)
            group.averages.append(average)
            group.is_near &= source.device == average.device and source.dtype == average.dtype
        self._lw_averaged = list(groups.values())

    def _lw_copy_others(self) -> None:
        """Copy what is not averaged."""
        for source, average in self._lw_copied:
            average.copy_(source)

    def _lw_swap_in(self, trainer: Trainer, module: nn.Module) -> None:
        if not self._lw_is_evaluated() or self._lw_raw is not None:
            return
        if self._lw_source is not module:
            self._lw_bind(module)
        if trainer.ranks_answer:
            self._lw_share_buffers(trainer, module)
        tensors = tensors_of(module)
        self._lw_raw = clones_of(tensors)
        write(self._lw_average, tensors, owner=type(self).__name__)

    def _lw_share_buffers(self, trainer: Trainer, module: nn.Module) -> None:
        """Use rank 0's averages of buffers, as checkpoints do: each rank's come from its own data."""
        parameters = {clean_name(name) for name, _ in module.named_parameters()}
        own = {name: average for name, average in self._lw_average.items() if name not in parameters}
        if own:
            received = from_rank_zero(trainer, lambda: {name: average.cpu() for name, average in own.items()})
            for name, average in own.items():
                average.copy_(received[name])


def check_ema_arguments(
    decay: float,
    update_every_n_steps: int,
    update_starting_at_step: int | None,
    update_starting_at_epoch: int | None,
    *,
    owner: str,
) -> None:
    """Raise an error for invalid arguments of an exponential moving average.

    Raises:
        ConfigError: Names all of them.
    """
    problems = []
    if not isinstance(decay, int | float) or not 0.0 <= decay <= 1.0:
        problems.append(f"decay={decay!r} (expected a number from 0 to 1)")
    if not isinstance(update_every_n_steps, int) or update_every_n_steps < 1:
        problems.append(f"update_every_n_steps={update_every_n_steps!r} (expected an integer >= 1)")
    starts = {"update_starting_at_step": update_starting_at_step, "update_starting_at_epoch": update_starting_at_epoch}
    problems += [f"{name}={value!r} (expected 0 or more)" for name, value in starts.items() if (value or 0) < 0]
    if problems:
        raise ConfigError(f"{owner}: {', '.join(problems)}.", fix="correct these arguments.")
