"""`BEHAVIOR`: what a Trainer does at its seams for programs written for Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import callbacks
from ...trainer.behavior import Behavior
from ...trainer.session.assemble import default_callbacks
from ...tuner.batch_size import Search, Trials, search_sizes
from .callbacks.classes import ModelCheckpoint, RichProgressBar
from .hooks import check_hook_names, find_override
from .optimizers import LightningOptimizer

if TYPE_CHECKING:
    from ...trainer.session.arguments import Arguments

__all__ = ["BEHAVIOR"]


def _default_callbacks(arguments: Arguments, own: list[callbacks.Callback]) -> list[callbacks.Callback]:
    served = {callbacks.ModelCheckpoint: ModelCheckpoint, callbacks.RichProgressBar: RichProgressBar}
    added = default_callbacks(arguments, own)
    return [served[type(one)]() if type(one) in served else one for one in added]


def _search_sizes(search: Search, most: int, trials: Trials) -> int:
    """Search for a batch size as Loopwright does, and continue if the loaders do not use it."""
    trials.refuses_unused = False
    return search_sizes(search, most, trials)


BEHAVIOR = Behavior(
    default_callbacks=_default_callbacks,
    check_hook_names=check_hook_names,
    find_override=find_override,
    managed_optimizer=LightningOptimizer,
    batch_size_rule=_search_sizes,
)
