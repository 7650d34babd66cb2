"""`Behavior`: the seams of a Trainer, at which a layer for programs of another library puts its own functions.

The core has one object, `Behavior()`. A layer derives another with `dataclasses.replace`, and a Trainer of its class
has it as `behavior` from the beginning of its constructor. Nothing else of the core is exchanged, so that a type
checker sees each place, and a name that changes here changes there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..callbacks import Callback
from .session.arguments import Arguments
from .session.assemble import default_callbacks

if TYPE_CHECKING:
    from .checkpointing.saving import Saving
    from .metrics.log_output import LogOutput
    from .metrics.metrics import Metrics
    from .session.loaders import StageLoaders

__all__ = ["Behavior", "BehaviorParts"]


@dataclass(frozen=True, slots=True)
class Behavior:
    """What a Trainer does at its seams.

    Attributes:
        default_callbacks: Returns the callbacks that the arguments ask for and the user did not pass.
    """

    default_callbacks: Callable[[Arguments, list[Callback]], list[Callback]] = default_callbacks


@dataclass(frozen=True, slots=True)
class BehaviorParts:
    """The objects of a Trainer whose public attributes a layer on top of it reads and sets.

    Attributes:
        arguments: The arguments, resolved.
        loaders: The data of each stage.
        metrics: What was logged.
        output: Sends rows to the loggers.
        saving: Takes and writes checkpoints.
    """

    arguments: Arguments
    loaders: StageLoaders
    metrics: Metrics
    output: LogOutput
    saving: Saving
