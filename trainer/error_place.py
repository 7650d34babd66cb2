"""`place_of`: where in a run an error happened, for the note on it. Imported when an error ends a run."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from ..messages import is_of_library, is_of_loopwright
from .lifecycle import HOOKS

if TYPE_CHECKING:
    from .run import Run
    from .view import TrainerView

_LOADER = "the data loader"
_LOADER_MODULES = ("loopwright.data.", "torch.utils.data.")
_MOVERS = {"loopwright.data.move", "loopwright.data.copy_stream", "loopwright.data.tree"}
# Function of Loopwright -> what it does, as users call it.
_ACTIVITIES = {
    "backward": "the backward pass of training_step",
    "optimizer_step": "the optimizer step",
    "take_step": "the optimizer step",
    "clip_gradients": "gradient clipping",
    "clip_gradients_norm": "gradient clipping",
    "clip_gradients_value": "gradient clipping",
    "clip_adaptively": "gradient clipping",
    "unscale_gradients": "the unscaling of gradients",
    "move_to_device": "the transfer of a batch to the device",
    "to_device": "the transfer of a batch to the device",
    "step_due_schedules": "the learning-rate schedule",
    "save_checkpoint": "the saving of a checkpoint",
}


def place_of(trainer: TrainerView, run: Run, error: BaseException) -> str:
    """Return where the run is, for an error's note: hook or activity, verb, stage, epoch, step and batch."""
    hook = run.metrics.table.hook or _activity(error)
    parts = [f"in {hook}"] if hook else []
    parts.append(f"trainer.{trainer.state.fn}" if hook else f"in trainer.{trainer.state.fn}")
    if trainer.state.stage is not None:
        parts.append(f"stage {trainer.state.stage}, epoch {run.progress.epochs}, step {run.progress.steps}")
    stream = run.opened
    if stream is not None and hook == _LOADER and trainer.state.stage == "train":
        parts.append(f"batch {stream.position}")  # the batch that could not be read
    elif stream is not None and not run.at_boundary:
        parts.append(f"batch {stream.position - 1}")
    return f"Loopwright: {', '.join(parts)}"


def _activity(error: BaseException) -> str | None:
    """Return what was under way: the innermost hook or activity on the error's traceback; None if none is known."""
    for frame in reversed(list(_frames(error))):
        function, module = frame.f_code.co_name, str(frame.f_globals.get("__name__", ""))
        if is_of_loopwright(frame) and function in _ACTIVITIES:
            return _ACTIVITIES[function]
        if f"{module}.".startswith(_LOADER_MODULES) and module not in _MOVERS:
            return _LOADER
        if function in HOOKS and not is_of_library(frame) and not is_of_loopwright(frame):
            return _ACTIVITIES.get(function, function)
    return None


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
