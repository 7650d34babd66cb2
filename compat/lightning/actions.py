"""Activities of a run under the names that Lightning's profilers have for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ...callbacks import Callback
from ...data import DataModule
from ...trainer.hooks import CALLBACK_BASES, DATA_BASES, MODULE_BASES, Hook
from ...trainer.lifecycle import EVENTS, Event, Lifecycle
from .hooks import find_override

if TYPE_CHECKING:
    from ...trainer.run import Run

__all__ = ["STEP", "MeasuredLifecycle", "lifecycle_of"]

STEP = "run_training_batch"
"""The activity that is one training step: with accumulation, of all its batches."""

_NAMES = {
    "run_training_step": STEP,
    "[BatchStream].next_batch": "[_TrainingEpochLoop].train_dataloader_next",
    "[EvalLoop].validation_next": "[_EvaluationLoop].val_next",
    "[EvalLoop].test_next": "[_EvaluationLoop].test_next",
    "[EvalLoop].predict_next": "[_PredictionLoop].predict_next",
}
_KINDS = {"Module": "LightningModule", "DataModule": "LightningDataModule"}
# Method of a strategy -> the module's hook around it, which Lightning measures, too.
_DEFAULTS = {
    "optimizer_step": "optimizer_step",
    "zero_grad": "optimizer_zero_grad",
    "clip_gradients": "configure_gradient_clipping",
}


class MeasuredLifecycle(Lifecycle):
    """A lifecycle that passes Lightning's names to the profiler, also for hooks that are not overridden.

    Args:
        arguments: See `Lifecycle`.

    Attributes:
        around_own: See `put_around_own`.
        around_callbacks: See `put_around_callbacks`.
        earlier_datamodule: The data module of an earlier verb; its `prepare_data` is called, too.
    """

    override_of = staticmethod(find_override)

    def __init__(self, **arguments: Any) -> None:  # Any: see the base class
        super().__init__(**arguments)
        self.around_own: dict[str, Callable[[Hook | None], Hook | None]] = {}
        self.around_callbacks: dict[str, Callable[[Hook], Hook]] = {}
        self.earlier_datamodule: DataModule | None = None
        self._saves_within_events = False
        if self._profiler is None:
            return
        for event in EVENTS:
            if event.kind == "event":
                silent = [self.bracketed(_do_nothing, name) for name in self._names_of_silent(event)]
                if silent:
                    self.wrap(event.name, partial(_followed, silent))

    def put_around_own(self, name: str, around: Callable[[Hook | None], Hook | None]) -> None:
        """Let `own` return what `around` makes of the user's override, None without one.

        Args:
            name: Name of a hook that is not an event.
            around: Called each time the hook is looked up.
        """
        inner = self.around_own.get(name)
        self.around_own[name] = around if inner is None else lambda hook: around(inner(hook))

    def put_around_callbacks(self, name: str, around: Callable[[Hook], Hook]) -> None:
        """Let `of_callbacks` return what `around` makes of the function.

        Args:
            name: Name of an event.
            around: Called each time the event is looked up.
        """
        inner = self.around_callbacks.get(name)
        self.around_callbacks[name] = around if inner is None else lambda fire: around(inner(fire))

    def own(self, name: str) -> Hook | None:
        """Return the user's override of a hook that is not an event, or what was put around it.

        Args:
            name: Name of the hook.
        """
        around = self.around_own.get(name)
        return super().own(name) if around is None else around(super().own(name))

    def of_callbacks(self, name: str, *, chosen: Callable[[Callback], bool] = lambda callback: True) -> Hook:
        """Return what calls an event's hook of callbacks only, with what was put around it.

        Args:
            name: Name of the event.
            chosen: Which callbacks; all of them by default.
        """
        around = self.around_callbacks.get(name)
        fire = super().of_callbacks(name, chosen=chosen)
        return fire if around is None else around(fire)

    def all_own(self, name: str) -> list[Hook]:
        """Return every override of a data hook, that of an earlier data module first.

        Args:
            name: Name of the hook.
        """
        is_wanted = self.earlier_datamodule is not None and name == "prepare_data"
        hook = self.override_of(self.earlier_datamodule, name, DATA_BASES) if is_wanted else None
        return [*([] if hook is None else [hook]), *super().all_own(name)]

    def save_within_events(self) -> None:
        """Let callbacks that save or stop act before the module's hook, and take a checkpoint within its event."""
        self._saves_within_events = True
        for name in ("on_train_batch_end", "on_validation_end"):
            hooks = self._callback_hooks([*self._early, *self._late], name)
            own = self._single(self._module, name, MODULE_BASES, "Module")
            system = [self._system[name]] if name in self._system else []
            # In a checkpoint of on_validation_end the validation is done; a batch's row has what the module logs there.
            ordered = [*system, *hooks, *own] if name == "on_validation_end" else [*hooks, *own, *system]
            fire = self._fire(name, ordered, [], [])
            self.wrap(name, lambda _, fire=fire: fire)  # type: ignore[misc]  # the value of this pass

    def finish_event(self) -> None:
        """Call the remaining listeners before a checkpoint is taken, unless it is taken within the event."""
        if not self._saves_within_events:
            super().finish_event()

    def pending_checkpoints(self) -> dict[str, object] | None:
        """Return the checkpoint callbacks that were not called yet; None where they are called after a resume."""
        return None if self._saves_within_events else super().pending_checkpoints()

    def name_of(self, kind: str, owner: object, hook: str) -> str:
        """Return Lightning's name for a listener's hook.

        Args:
            kind: "Module", "DataModule" or "Callback".
            owner: The listener.
            hook: Name of the hook.
        """
        if isinstance(owner, Callback):
            return f"[{kind}]{owner.state_key}.{hook}"
        return super().name_of(_KINDS[kind], owner, hook)

    def bracketed(self, function: Hook, activity: str) -> Hook:
        """Return the function inside the profiler's bracket for the activity; itself without a profiler.

        Args:
            function: What is measured.
            activity: Loopwright's name of it.
        """
        if self._profiler is None:
            return function
        strategy = re.fullmatch(r"\[Strategy\]\w+\.(\w+)", activity)
        hook = None if strategy is None else _DEFAULTS.get(strategy[1])
        function = super().bracketed(function, _NAMES.get(activity, activity))
        if hook is None or self.override_of(self._module, hook, MODULE_BASES) is not None:
            return function
        return super().bracketed(function, self.name_of("Module", self._module, hook))

    def _names_of_silent(self, event: Event) -> Iterator[str]:
        """Yield the activities of an event for listeners that do not override its hook."""
        name = event.name
        if "callbacks" in event.listeners:
            for callback in (*self._early, *self._late):
                if self.override_of(callback, name, CALLBACK_BASES) is None:
                    yield self.name_of("Callback", callback, name)
        data = self._datamodule
        if data is not None and "datamodule" in event.listeners and self.override_of(data, name, DATA_BASES) is None:
            yield self.name_of("DataModule", data, name)
        if "module" in event.listeners and self.override_of(self._module, name, MODULE_BASES) is None:
            yield self.name_of("Module", self._module, name)


def lifecycle_of(run: Run) -> MeasuredLifecycle:
    """Return the lifecycle of a run of this layer.

    Args:
        run: A run of a Trainer of Lightning.
    """
    assert isinstance(run.lifecycle, MeasuredLifecycle)
    return run.lifecycle


def _do_nothing() -> None:
    """Do nothing, in place of a hook that is not overridden."""


def _followed(silent: list[Callable[[], None]], fire: Hook) -> Hook:
    def fire_and_note(*arguments: object) -> object:
        result: object = fire(*arguments)
        for note in silent:
            note()
        return result

    return fire_and_note
