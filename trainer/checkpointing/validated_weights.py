"""The weights that a validation has seen, kept until the checkpoint with its score is saved at the end of the epoch.

Hooks that run in between (`on_train_epoch_end` of a pruning callback, or of a user) may change weights. The
checkpoint's `state_dict` then holds those that were validated, so that the file has the score in its name. The weights
with which training continues are stored beside them, and fit loads those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...callbacks.averaging.weights import part_of
from ...protocols import StateDict, Tree
from ..hooks import CALLBACK_BASES, MODULE_BASES, find_override

if TYPE_CHECKING:
    from torch import nn

    from ...callbacks import Callback

_PACKAGE = __name__.partition(".trainer.")[0]
_EVENT = "on_train_epoch_end"


def may_change_weights(callbacks: list[Callback], module: nn.Module) -> bool:
    """Whether a listener to the end of an epoch may change weights: the module, and all but built-in callbacks."""
    if find_override(module, _EVENT, MODULE_BASES) is not None:
        return True
    for callback in callbacks:
        hook = find_override(callback, _EVENT, CALLBACK_BASES)
        where = getattr(getattr(hook, "__func__", hook), "__module__", None) or ""
        if hook is not None and (callback.changes_weights or not where.startswith(f"{_PACKAGE}.callbacks.")):
            return True
    return False


class ValidatedWeights:
    """A copy of a module's state.

    Args:
        state: What `Strategy.module_state_dict` returns.
    """

    def __init__(self, state: StateDict) -> None:
        with torch.no_grad():
            self._state = {name: copied(value) for name, value in state.items()}

    def split(self, state: StateDict, of_all_ranks: Callable[[list[str]], list[str]]) -> tuple[StateDict, StateDict]:
        """Return the state that was validated, and those entries of the present one that differ from it.

        Waits for the device. With several ranks: on every rank.

        Args:
            state: The module's present state.
            of_all_ranks: Returns the names that any rank calls it with.
        """
        names = [name for name, value in state.items() if name in self._state and _differs(value, self._state[name])]
        changed = of_all_ranks(names)
        return {**state, **{name: self._state[name] for name in changed}}, {name: state[name] for name in changed}


def copied(value: Tree) -> Tree:
    """Return a copy of a tensor; other values as they are."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _differs(now: Tree, then: Any) -> bool:  # Any: a tensor where `now` is one
    if not isinstance(now, Tensor):
        return False
    return not torch.equal(part_of(now.detach()), part_of(then))
