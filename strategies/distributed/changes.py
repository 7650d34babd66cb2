"""Changes of a module after it was set up: what a strategy fixed then is adopted or refused before the next step."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from operator import itemgetter

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ...errors import ModuleError
from .rendezvous import store
from .store_tree import StoreTree

params_of_group: Callable[[dict[str, list[Tensor]]], list[Tensor]] = itemgetter("params")
"""Takes the parameters out of a group of an optimizer, in C."""

_PAUSE_S = 0.002
_MOST_NAMED = 16


class Changes:
    """Notes that a parameter or a submodule was registered in a module, or in one of its submodules.

    A step costs one look at `is_set`: torch calls the hooks when something is registered, wherever that is. What else
    changes a module (`del`, entries of `_parameters`) is not noted.

    Args:
        module: The module, as it was set up.

    Attributes:
        is_set: Whether something was registered since `settle`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._ids: set[int] = set()
        self.settle(module)
        note = _noting(weakref.ref(self))
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            weakref.finalize(self, register(note).remove).atexit = False

    def __getstate__(self) -> dict[str, object]:
        """Return an empty state: a copy of the module is not watched."""
        return {"is_set": False, "_owners": set(), "_known": {}, "_ids": set()}

    def settle(self, module: nn.Module) -> None:
        """Take the module as it is now."""
        self.is_set = False
        self._owners = {id(one) for one in module.modules()}
        # Not weak references, with which torch cannot swap tensors (`module.to(...)` of shards).
        self._known = {id(one): one for one in [*module.parameters(), *module.buffers()]}
        self._ids.update(self._known)

    def is_new(self, tensor: Tensor) -> bool:
        """Return whether a parameter or buffer was not in the module when `settle` was called."""
        return id(tensor) not in self._known

    def has_had(self, parameter: Tensor) -> bool:
        """Return whether a parameter has been in the module at any time when `settle` was called."""
        return id(parameter) in self._ids

    def new_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of the module that were not in it, by name."""
        return {name: one for name, one in module.named_parameters() if self.is_new(one)}

    def new_tensors(self, module: nn.Module) -> list[Tensor]:
        """Return the parameters and buffers of the module that were not in it."""
        return [one for one in [*module.parameters(), *module.buffers()] if self.is_new(one)]

    def note(self, owner: nn.Module) -> None:
        """Note a registration in this module, if it is one of those."""
        if id(owner) in self._owners:
            self.is_set = True


def _noting(reference: weakref.ref[Changes]) -> Callable[[nn.Module, str, object], None]:
    def note(owner: nn.Module, name: str, value: object) -> None:
        changes = reference()
        if changes is not None:
            changes.note(owner)

    return note


def agree_on_changes(what: str, rank: int, size: int, patience: timedelta) -> None:
    """Wait until every rank has changed its module, outside of any collective. On each rank that has.

    Args:
        what: What has changed, for the message.
        rank: Of this process.
        size: Number of ranks.
        patience: How long to wait for the others, which may still read their data.

    Raises:
        ModuleError: Other ranks did not come; names both.
    """
    shared = store()
    if shared is None:
        return
    number = shared.add(f"loopwright/changes/of/{rank}", 1)  # ranks that change alike count alike
    place = f"loopwright/changes/{number}"
    here = StoreTree(shared, place, size)
    if here.post(rank, "") is not None:
        shared.set(f"{place}/all", "here")
    end = time.monotonic() + patience.total_seconds()
    while not shared.check([f"{place}/all"]):
        if time.monotonic() > end:
            missing = here.missing(_MOST_NAMED)
            raise ModuleError(
                f"The module was changed on rank {rank} after it was set up ({what}), but not on "
                f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}.",
                fix="change it on every rank, in the same hook at the same step; what depends on chance, a clock or a "
                "file is decided on rank 0 and sent with trainer.strategy.broadcast(...).",
            )
        time.sleep(_PAUSE_S)
