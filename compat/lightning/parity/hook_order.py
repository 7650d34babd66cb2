"""The order of hooks at the end of a batch and of a validation: callbacks that save or stop before the module."""

from __future__ import annotations

from ....trainer.hooks import module_bases
from ....trainer.run import Run
from ..patch import patch

__all__ = ["save_within_events"]


def save_within_events(run: Run) -> None:
    """Let checkpoint callbacks act before the module's own hook, and a checkpoint be taken within an event."""
    life = run.lifecycle
    for name in ("on_train_batch_end", "on_validation_end"):
        callbacks = [*life._early, *life._late]
        hooks = life._callback_hooks(callbacks, name)
        own = life._single(life._module, name, module_bases(), "Module")
        system = [life._system[name]] if name in life._system else []
        # In a checkpoint of on_validation_end the validation is done; a batch's row has what the module logs there.
        ordered = [*system, *hooks, *own] if name == "on_validation_end" else [*hooks, *own, *system]
        patch(life, name, life._fire(name, ordered, [], []))
    patch(life, "finish_event", _finish_nothing)
    patch(life, "pending_checkpoints", _finish_nothing)


def _finish_nothing() -> None:
    """Leave the event as it is."""
