"""Parameters that a step gathers in ZeRO stage 3, and how a rank without data gathers them again.

All ranks must gather the same parameters in the same order, or they wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .engine_types import Engine

# Any in this file: DeepSpeed's contexts and coordinator.

Event = tuple[bool, Any]
"""Whether it begins (True) or ends, and what: a module, or a GatheredParameters of the user's."""


@contextmanager
def gathering_in_steps(engine: Engine, events: list[Event] | None = None) -> Iterator[None]:
    """Return a context in which GatheredParameters leaves parameters to the engine that the engine has gathered.

    DeepSpeed (0.19) fails where GatheredParameters releases such parameters: those of running modules, to which each
    parameter is added that a step reaches by its name, and those under way to the next module.

    Args:
        engine: In stage 3, with or without an optimizer.
        events: Each use is added here; None: nowhere.
    """
    from deepspeed.runtime.zero import GatheredParameters

    begin, end = GatheredParameters.__enter__, GatheredParameters.__exit__
    under_way = _offload_of(engine).get_param_coordinator()._PartitionedParameterCoordinator__inflight_param_registry
    requested: dict[int, Any] = {}  # parameters of open contexts

    def enter(context: Any) -> object:
        if not context.enabled:
            return None
        if events is not None:
            events.append((True, context))
        requested[id(context)] = context.params
        for one in context.params:
            if one in under_way:
                under_way.pop(one).wait()
        context.params = [one for one in context.params if not one.ds_active_sub_modules]
        return begin(context) if context.params else None

    def leave(context: Any, *error: object) -> object:
        if not context.enabled:
            return None
        if events is not None:
            events.append((False, context))
        try:
            return end(context, *error) if context.params else None
        finally:
            context.params = requested.pop(id(context))

    GatheredParameters.__enter__, GatheredParameters.__exit__ = enter, leave
    try:
        yield
    finally:
        GatheredParameters.__enter__, GatheredParameters.__exit__ = begin, end


@contextmanager
def modules_noted(root: nn.Module) -> Iterator[list[Event]]:
    """Return a context with a list to which each module under the root is added as it runs."""
    events: list[Event] = []

    def note(module: nn.Module, *, begins: bool) -> None:
        # Modules with the engine's hooks have ds_id, and so has the root.
        if module is not root and "ds_id" in vars(module):
            events.append((begins, module))

    hooks = nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(lambda module, _: note(module, begins=True)),
        hooks.register_module_forward_hook(lambda module, _, __: note(module, begins=False)),
    ]
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()


def repeat(events: Sequence[Event], engine: Engine) -> None:
    """Gather the same parameters again. Within the engine's forward pass; it communicates."""
    from deepspeed.runtime.zero import parameter_offload as hooks

    offload = _offload_of(engine)
    for begins, what in events:
        if not isinstance(what, nn.Module):
            if begins:
                what.__enter__()
            else:
                what.__exit__(None, None, None)
        elif begins:
            offload.pre_sub_module_forward_function(what)
        else:
            hooks.FWD_MODULE_STACK.pop()
            offload.post_sub_module_forward_function(what)


def _offload_of(engine: Engine) -> Any:
    optimizer = engine.optimizer
    return getattr(optimizer, "parameter_offload", optimizer)  # the latter without an optimizer
