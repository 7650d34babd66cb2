"""Checkpoints of an attached module outside of a run, and the hooks that receive one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import __version__
from ...checkpoint import content
from ...checkpoint.content import Content
from ...trainer.checkpointing import snapshot

if TYPE_CHECKING:
    from torch import nn

    from ...protocols import StateDict
    from ...trainer.trainer import Trainer

__all__ = ["collect_attached", "show_callbacks"]


def collect_attached(trainer: Trainer, module: nn.Module, *, is_weights_only: bool) -> StateDict:
    """Return the checkpoint of a module that no run has trained yet: no optimizers, and counts of zero."""
    states: StateDict = {"module": module.state_dict(), "progress": trainer.progress.state_dict()}
    if not is_weights_only:
        states.update(callbacks=snapshot.callback_states(trainer.callbacks), optimizers=[], schedulers=[])
    checkpoint = content.write(
        Content(states, snapshot.hyperparameters(module, "")),
        epoch=0,
        global_step=0,
        world_size=trainer.world_size,
        version=__version__,
    )
    trainer.parts.saving.complete(checkpoint)
    if not is_weights_only:
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, module, checkpoint)
    hook = getattr(module, "on_save_checkpoint", None)
    if hook is not None:
        hook(checkpoint)
    return checkpoint


def show_callbacks(trainer: Trainer, checkpoint: StateDict) -> None:
    """Call the callbacks' `on_load_checkpoint`.

    Args:
        trainer: Its callbacks are called with its module, None if no module is attached yet.
        checkpoint: As it was read.
    """
    module: Any = trainer.lightning_module  # Any: see above
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
