"""Activities of a run under the names that Lightning's profilers have for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...callbacks import Callback
from ...trainer.hooks import Hook, callback_bases, data_bases, find_override, module_bases
from ...trainer.lifecycle import EVENTS, Event, Lifecycle

__all__ = ["STEP", "MeasuredLifecycle"]

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
    """A lifecycle whose profiler is notified of Lightning's names, also of hooks that are not overridden.

    Args:
        arguments: See `Lifecycle`.
    """

    def __init__(self, **arguments: Any) -> None:  # Any: see the base class
        super().__init__(**arguments)
        if self._profiler is None:
            return
        for event in EVENTS:
            if event.kind == "event":
                silent = [self.bracketed(_do_nothing, name) for name in self._names_of_silent(event)]
                if silent:
                    self.wrap(event.name, partial(_followed, silent))

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
        if hook is None or find_override(self._module, hook, module_bases()) is not None:
            return function
        return super().bracketed(function, self.name_of("Module", self._module, hook))

    def _names_of_silent(self, event: Event) -> Iterator[str]:
        """Yield the activities of an event for listeners that do not override its hook."""
        name = event.name
        if "callbacks" in event.listeners:
            for callback in (*self._early, *self._late):
                if find_override(callback, name, callback_bases()) is None:
                    yield self.name_of("Callback", callback, name)
        data = self._datamodule
        if data is not None and "datamodule" in event.listeners and find_override(data, name, data_bases()) is None:
            yield self.name_of("DataModule", data, name)
        if "module" in event.listeners and find_override(self._module, name, module_bases()) is None:
            yield self.name_of("Module", self._module, name)


def _do_nothing() -> None:
    """Stand for a hook that is not overridden."""


def _followed(silent: list[Callable[[], None]], fire: Hook) -> Hook:
    def fire_and_note(*arguments: object) -> object:
        result: object = fire(*arguments)
        for note in silent:
            note()
        return result

    return fire_and_note
