"""What a step gathers in stage 3, and how a rank that has no data left takes part: it does again what it has noted.

All ranks must gather the same parameters in the same order, or they wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["Event", "gathering_in_steps", "modules_noted", "repeat"]

# Any in this file: deepspeed has no types.

Event = tuple[bool, Any]
"""Whether it begins (True) or ends, and what: a module, or a GatheredParameters of the user's."""


@contextmanager
def gathering_in_steps(engine: Any, events: list[Event] | None = None) -> Iterator[None]:
    """Return a context in which GatheredParameters leaves to the engine what the engine has gathered.

    DeepSpeed (0.19) would give these parameters back under the engine's feet, and says so with an error: those of
    modules that are run at present, to which each one is added that a step reaches by its name, and those that are on
    their way to the next module.

    Args:
        engine: Of stage 3, with or without an optimizer.
        events: Each use is noted here; None: nowhere.
    """
    from deepspeed.runtime.zero import GatheredParameters

    begin, end = GatheredParameters.__enter__, GatheredParameters.__exit__
    coordinator = _gathering_of(engine).get_param_coordinator()
    on_their_way = coordinator._PartitionedParameterCoordinator__inflight_param_registry

    whole: dict[int, Any] = {}  # what contexts that are open were given

    def enter(context: Any) -> Any:
        if not context.enabled:
            return None
        if events is not None:
            events.append((True, context))
        whole[id(context)] = context.params
        for one in context.params:
            if one in on_their_way:
                on_their_way.pop(one).wait()
        context.params = [one for one in context.params if not one.ds_active_sub_modules]
        return begin(context) if context.params else None

    def leave(context: Any, *error: Any) -> Any:
        if not context.enabled:
            return None
        if events is not None:
            events.append((False, context))
        try:
            return end(context, *error) if context.params else None
        finally:
            context.params = whole.pop(id(context))

    GatheredParameters.__enter__, GatheredParameters.__exit__ = enter, leave
    try:
        yield
    finally:
        GatheredParameters.__enter__, GatheredParameters.__exit__ = begin, end


@contextmanager
def modules_noted(own: nn.Module) -> Iterator[list[Event]]:
    """Return a context that yields the list in which it notes which modules are run, in order.

    Args:
        own: The module around the user's, which is none of those.
    """
    events: list[Event] = []

    def enter(module: nn.Module, _: Any) -> None:
        # Those with the engine's hooks, but for us. The engine itself hands on our attributes as its own.
        if module is not own and "ds_id" in vars(module):
            events.append((True, module))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if module is not own and "ds_id" in vars(module):
            events.append((False, module))

    hooks = nn.modules.module
    handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()


def repeat(events: Sequence[Event], engine: Any) -> None:
    """Gather what was noted. Within the engine's forward pass; it communicates."""
    from deepspeed.runtime.zero import parameter_offload as hooks

    gathering = _gathering_of(engine)
    for begins, what in events:
        if not isinstance(what, nn.Module):
            if begins:
                what.__enter__()
            else:
                what.__exit__(None, None, None)
        elif begins:
            gathering.pre_sub_module_forward_function(what)
        else:
            hooks.FWD_MODULE_STACK.pop()
            gathering.post_sub_module_forward_function(what)


def _gathering_of(engine: Any) -> Any:
    optimizer = engine.optimizer
    return getattr(optimizer, "parameter_offload", optimizer)  # an engine without an optimizer has that alone
