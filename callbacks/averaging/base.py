"""What callbacks that keep an average of the weights share: when it is updated, evaluated and saved.

What is trained stays in the module and in a checkpoint's "state_dict"; the average is the callback's own state.
Evaluation runs on it: the values are exchanged before and put back after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..base import Callback, from_rank_zero
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
    from ...protocols import Batch, StateDict, StepOutput
    from ...trainer.trainer import Trainer

__all__ = ["Averaging"]


class Averaging(Callback):
    """Keep an average beside the weights. A base class: a subclass says when and how it is updated.

    Args:
        device: Where the average lives; None: with the weights.
        use_buffers: Average floating-point buffers, too; otherwise they are copied.
    """

    replaces_weights = True
    hears_every_step = True

    def __init__(self, device: str | torch.device | int | None, use_buffers: bool) -> None:
        self.device = None if device is None else torch.device(device)
        self.use_buffers = use_buffers
        # Tensors in a file, too, from `load_state_dict` on until a module says which part of them is needed.
        self._average: dict[str, Tensor] = {}
        self._is_borrowed = False  # the memory is that of the state that was loaded
        self._seen_step: int | None = None
        self._raw: dict[str, Tensor] | None = None  # the trained values while the module holds the average
        self._source: nn.Module | None = None
        self._aliases: dict[str, str] = {}

    # --- what a subclass says ----------------------------------------------------------------------------------------

    def _note_step(self, trainer: Trainer, module: nn.Module) -> None:
        """Take notice of a step that was taken, and update if one is due."""
        raise NotImplementedError

    def _bind(self, module: nn.Module) -> None:
        """Find which tensor of the module belongs to which average."""
        raise NotImplementedError

    def _is_evaluated(self) -> bool:
        """Whether evaluation runs on the average, as of now."""
        raise NotImplementedError

    # --- hooks -------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Go on where the checkpoint was taken: if it was taken before its step's update, update now."""
        if self._seen_step is not None and self._seen_step < trainer.global_step:
            self._note_step(trainer, pl_module)
        self._seen_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: nn.Module, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Ask for an update after a step that was really taken."""
        if trainer.global_step != self._seen_step:
            self._note_step(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Validate with the average."""
        self._swap_in(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Put the trained weights back."""
        self._swap_out(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Test with the average."""
        self._swap_in(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Put the trained weights back."""
        self._swap_out(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Predict with the average."""
        self._swap_in(trainer, pl_module)

    def on_predict_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Put the trained weights back."""
        self._swap_out(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: nn.Module, exception: BaseException) -> None:
        """Put the trained weights back."""
        self._swap_out(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: nn.Module, checkpoint: StateDict) -> None:
        """Keep the trained weights in the checkpoint, if it is taken while the module holds the average."""
        keep_trained(checkpoint, self._raw, self._aliases)

    # --- the average -------------------------------------------------------------------------------------------------

    def _copy_weights(self, module: nn.Module) -> None:
        """Let the average be a copy of the weights, in a dtype in which it moves."""
        self._average = {
            name: tensor.detach().to(device=self.device or tensor.device, dtype=kept_dtype(tensor), copy=True)
            for name, tensor in tensors_of(module).items()
        }
        self._bind(module)

    def _pairs(self, module: nn.Module) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Place the average beside the module; yield each tensor of this rank, its average, whether it is averaged.

        Raises:
            CheckpointError: The average has other names or shapes than the module.
        """
        self._source = module
        self._aliases = tied_names(module)
        if not self._average:
            return
        tensors = tensors_of(module)
        check_fit(self._average, tensors, owner=type(self).__name__)
        parameters = {clean_name(name) for name, _ in module.named_parameters()}
        for name, source in tensors.items():
            kept = placed(self._average[name], source, self.device, copy=self._is_borrowed)
            self._average[name] = kept
            is_number = source.is_floating_point() or source.is_complex()
            yield part_of(source.detach()), part_of(kept), is_number and (name in parameters or self.use_buffers)
        self._is_borrowed = False

    def _swap_in(self, trainer: Trainer, module: nn.Module) -> None:
        if not self._is_evaluated() or self._raw is not None:
            return
        if self._source is not module:
            self._bind(module)
        if trainer.ranks_answer:
            self._share_buffers(trainer, module)
        tensors = tensors_of(module)
        self._raw = clones_of(tensors)
        write(self._average, tensors, owner=type(self).__name__)

    def _share_buffers(self, trainer: Trainer, module: nn.Module) -> None:
        """Take over rank 0's averages of buffers: each rank's come of its own data, and a checkpoint holds rank 0's."""
        parameters = {clean_name(name) for name, _ in module.named_parameters()}
        own = {name: average for name, average in self._average.items() if name not in parameters}
        if own:
            told = from_rank_zero(trainer, lambda: {name: average.cpu() for name, average in own.items()})
            for name, average in own.items():
                average.copy_(told[name])

    def _swap_out(self, module: nn.Module) -> None:
        if self._raw is not None:
            raw, self._raw = self._raw, None
            write(raw, tensors_of(module), owner=type(self).__name__)
