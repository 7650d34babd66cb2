"""The state of a dict of objects, out and in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError, ConfigError
from ..protocols import Stateful
from ..strategies import Strategy

__all__ = ["bare", "collect_state", "put_back", "put_back_state"]

# Any in this file: objects of the user's own, and their state.

_NOTHING: dict[str, Any] = {}


def bare(obj: object) -> Any:
    """Return what the strategy works on, from what `Fabric.setup` returned or from itself."""
    return getattr(obj, "__dict__", _NOTHING).get("_without_fabric", obj)


def collect_state(
    strategy: Strategy, state: Mapping[str, object], filter: Mapping[str, Callable[[str, Any], bool]] | None
) -> dict[str, Any]:
    """Return the content of a checkpoint: each object replaced by its state, plain values as they are.

    Args:
        strategy: Takes the state of modules and optimizers out.
        state: Objects by name.
        filter: For a name, a function of (key, value) that says which entries of the object's state are kept.

    Raises:
        ConfigError: The filter names what is not in the state, or is no function.
    """
    _check_filter(filter, state)
    content = {name: _state_of(strategy, obj) for name, obj in state.items()}
    for name, keep in (filter or {}).items():
        content[name] = {key: value for key, value in content[name].items() if keep(key, value)}
    return content


def put_back_state(
    strategy: Strategy, content: dict[str, Any], state: dict[str, Any], *, strict: bool, where: str
) -> dict[str, Any]:
    """Load objects in place from the content of a checkpoint, and replace the plain values of `state`.

    Args:
        strategy: Puts the state of modules and optimizers back.
        content: Entries that are used are taken out of it.
        state: Objects and plain values by name.
        strict: Whether a name that is not in the content is an error; also given to modules.
        where: The file, for messages.

    Returns:
        What is left of the content.

    Raises:
        CheckpointError: Names are missing (all are named), or a state does not fit its object.
    """
    missing = [name for name in state if name not in content]
    if missing and strict:
        raise CheckpointError(
            f"{where} has no entries {missing}; it has {sorted(content)}.",
            fix="ask for what is in the file, or pass strict=False.",
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
        strategy.load_module_state_dict(inner, value, strict)
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
        raise ConfigError(
            f"Fabric.save was given filter={filter!r}.", fix="pass a dict from a key of state to a function."
        )
    unknown = [name for name in filter if name not in state]
    uncallable = [name for name, keep in filter.items() if not callable(keep)]
    if unknown or uncallable:
        raise ConfigError(
            f"Fabric.save was given a filter for {unknown or uncallable}, "
            f"{'which the state does not have' if unknown else 'which is no function'}.",
            fix="give each key of state that is to be filtered a function of (name, value).",
        )
