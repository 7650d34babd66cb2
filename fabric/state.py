"""Saving and loading the state of a dict of objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import ArgumentTypeError, ConfigError, MissingEntry
from ..protocols import StateDict, Stateful
from ..strategies import Strategy
from ..strategies.base import plain_names

# Any in this file: objects of the user's own, and their state.

_NOTHING: dict[str, object] = {}


def bare(obj: object) -> Any:
    """Return the object inside Fabric's wrapper; other objects are returned as they are."""
    return getattr(obj, "__dict__", _NOTHING).get("_without_fabric", obj)


def collect_state(
    strategy: Strategy, state: Mapping[str, object], filter: Mapping[str, Callable[[str, Any], bool]] | None
) -> dict[str, object]:
    """Return the content of a checkpoint: each object replaced by its state, plain values as they are.

    Args:
        strategy: Returns the state of modules and optimizers.
        state: Objects by name.
        filter: Name -> function of (key, value) that returns whether to keep an entry of the object's state.

    Raises:
        ConfigError: A key of the filter is not in the state.
        ArgumentTypeError: The filter is not a dict, or a value of it is not a function.
    """
    _check_filter(filter, state)
    content = {name: _state_of(strategy, obj) for name, obj in state.items()}
    for name, keep in (filter or {}).items():
        content[name] = {key: value for key, value in content[name].items() if keep(key, value)}
    return content


def put_back_state(strategy: Strategy, content: StateDict, state: StateDict, *, strict: bool, where: str) -> StateDict:
    """Load objects in place from the content of a checkpoint, and replace the plain values of `state`.

    Args:
        strategy: Loads the state of modules and optimizers.
        content: Content of a checkpoint; used entries are removed.
        state: Objects and plain values by name.
        strict: Whether a name that is missing in the content is an error; also passed to modules.
        where: Path of the file, for messages.

    Returns:
        The remaining content.

    Raises:
        MissingEntry: Names are missing; all are named.
        CheckpointError: A state does not fit its object.
    """
    missing = [name for name in state if name not in content]
    if missing and strict:
        raise MissingEntry(
            f"Expected the entries {missing} in {where}, got {sorted(content)}.",
            fix="request only entries of the file.",
        )
    for name in [name for name in state if name in content]:
        value = content.pop(name)
        if not put_back(strategy, state[name], value, strict):
            state[name] = value
    return content


def put_back(strategy: Strategy, obj: Any, value: Any, strict: bool) -> bool:
    """Load one object in place; return False if it has no state to load."""
    inner = bare(obj)
    if isinstance(inner, nn.Module):
        strategy.load_module_state_dict(inner, plain_names(value), strict)
    elif isinstance(inner, Optimizer):
        strategy.load_optimizer_state(inner, value)
    elif isinstance(obj, Stateful):
        obj.load_state_dict(value)
    else:
        return False
    return True


def _state_of(strategy: Strategy, obj: object) -> Any:
    inner = bare(obj)
    if isinstance(inner, nn.Module):
        return strategy.module_state_dict(inner)
    if isinstance(inner, Optimizer):
        return strategy.optimizer_state(inner)
    return obj.state_dict() if isinstance(obj, Stateful) else obj


def _check_filter(filter: object, state: Mapping[str, object]) -> None:
    if filter is None:
        return
    if not isinstance(filter, Mapping):
        raise ArgumentTypeError(
            f"Expected filter of Fabric.save to be a dict, got filter={filter!r}.",
            fix="pass a dict that maps keys of state to functions.",
        )
    unknown = [name for name in filter if name not in state]
    uncallable = [name for name, keep in filter.items() if not callable(keep)]
    if unknown or uncallable:
        raise (ConfigError if unknown else ArgumentTypeError)(
            f"Expected {'keys of state' if unknown else 'functions as values'} in filter of Fabric.save, got "
            f"{unknown or uncallable}.",
            fix="map each key of state to filter to a function of (name, value).",
        )
