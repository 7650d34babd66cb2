"""The state of a DeepSpeed engine in Loopwright's own layout: whole float32 tensors by the names of parameters.

What every other strategy writes, this one reads, and the reverse, in every ZeRO stage and with any number of processes.

Reading adds up over ranks buffers that are zero where a rank has nothing; writing copies, and does not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ..distributed.shards import read_full
from .engine import EngineOptimizer, EngineRoot
from .fragments import (
    Fragment,
    flats_of,
    gathered,
    is_partitioned,
    is_stepped,
    lies_in_parts,
    own_fragment,
    settle,
    shape_of,
    state_of,
    swap_in,
    swap_out,
)

__all__ = [
    "Pending",
    "gather",
    "load_module",
    "load_optimizer",
    "module_state",
    "optimizer_state",
    "set_masters",
    "set_own_masters",
    "state_entry",
    "whole_parameters",
]

# Any in this file: deepspeed has no types; states are of the user's modules and optimizers.


class Pending:
    """In the place of a tensor that lies in parts on the ranks, until `gather` puts it together on rank 0.

    Attributes:
        root: Has the engine.
        parameter: Whose.
        key: Of the optimizer's state; None: the parameter itself, in float32.
    """

    # No dataclass: `has_parts` is to see it, not what is in it.
    def __init__(self, root: EngineRoot, parameter: Any, key: str | None = None) -> None:
        self.root = root
        self.parameter = parameter
        self.key = key

    @property
    def is_part(self) -> bool:
        """Whether other ranks have the rest: always."""
        return True

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return shape_of(self.parameter)

    @property
    def label(self) -> tuple[Any, ...]:
        """What is equal for the same tensor."""
        return (id(self.parameter), self.key)

    def whole(self) -> Any:
        """Return the whole tensor. On every rank: it communicates."""
        return _whole(self)


# --- out -----------------------------------------------------------------------------------------------------------


def module_state(root: EngineRoot, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state with `Pending` where a rank does not have the whole float32 tensor.

    Args:
        root: Around the module.
        state: What the module's own `state_dict` says.
    """
    parameters = dict(root.module.named_parameters(remove_duplicate=False))
    result = {}
    for name, value in state.items():
        one = parameters.get(name)
        if one is not None and lies_in_parts(root, one):
            value = Pending(root, one)
        elif one is not None and root.engine is not None:
            value = value.float()  # frozen ones have no masters; float32 ones are not copied
        result[name] = value
    return result


def optimizer_state(optimizer: EngineOptimizer) -> dict[str, Any]:
    """Return an optimizer's state in torch's layout, by the numbers of the user's parameters."""
    root, inner = optimizer.root, optimizer.optimizer
    numbers: dict[int, int] = {}
    groups = []
    for members, group in zip(optimizer.groups, inner.param_groups, strict=True):
        own = {key: value for key, value in group.items() if key != "params"}
        own["params"] = [numbers.setdefault(id(one), len(numbers)) for one in members]
        groups.append(own)
    state: dict[int, dict[str, Any]] = {}
    for members in optimizer.groups:
        for one in members:
            entry = state_entry(root, inner, one)
            if entry:
                state[numbers[id(one)]] = entry
    return {"state": state, "param_groups": groups}


def state_entry(root: EngineRoot, inner: Any, parameter: Any) -> dict[str, Any]:
    """Return an optimizer's state of one parameter, with `Pending` for what is as long as it; empty without any."""
    if not parameter.requires_grad:
        return {}
    flats = flats_of(root, parameter)
    known = next((inner.state[flat] for flat in flats if flat in inner.state), None)
    if known is None:
        return {}
    return {
        key: Pending(root, parameter, key) if _is_elementwise(value, flats[0]) else _copied(value)
        for key, value in known.items()
    }


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_elementwise(value: Any, flat: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and (value.numel() == flat.numel() or value.shape == flat.shape)


def gather(state: Any, *, keep: bool) -> Any:
    """Return a state with whole tensors in the place of `Pending`, on rank 0's CPU; None elsewhere. On every rank.

    Args:
        state: The content of a checkpoint, the same on all ranks but for what is in its tensors.
        keep: Whether this is rank 0.
    """
    made: dict[tuple[Any, ...], Any] = {}
    settled: dict[int, EngineRoot] = {}

    def resolve(value: Any) -> Any:
        if isinstance(value, Pending):
            label = value.label
            if label not in made:
                if id(value.root) not in settled:
                    settled[id(value.root)] = value.root
                    settle(value.root)
                whole = value.whole()
                made[label] = (whole.cpu() if isinstance(whole, Tensor) else whole) if keep else None
            return made[label]
        if isinstance(value, Mapping):
            found = {key: resolve(one) for key, one in value.items()}
            return found if any(found[key] is not value[key] for key in found) else value
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            items = [resolve(one) for one in value]
            return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
        return value

    try:
        return resolve(state)
    finally:
        for root in settled.values():
            swap_out(root)


def _whole(pending: Pending) -> Tensor:
    import torch.distributed as dist

    root, parameter, key = pending.root, pending.parameter, pending.key
    shape = pending.shape
    if root.engine is None or not is_stepped(root, parameter):
        with gathered([parameter]):
            copied: Tensor = parameter.detach().float().clone()
            return copied
    whole: Tensor
    swap_in(root, parameter)
    if root.stage == 0:
        fragment = own_fragment(root, parameter)
        source = fragment.flat if key is None else state_of(root, fragment.flat)[key]
        whole = source.detach().float().reshape(shape).clone()
        return whole
    buffer = torch.zeros(shape.numel(), dtype=torch.float32, device=root.engine.device)
    fragment = own_fragment(root, parameter)
    if fragment.flat is not None and fragment.size:
        source = fragment.flat if key is None else state_of(root, fragment.flat)[key]
        buffer.narrow(0, fragment.start, fragment.size).copy_(fragment.of(source.detach()))
    dist.all_reduce(buffer)
    return buffer.reshape(shape)


# --- in ------------------------------------------------------------------------------------------------------------


def load_module(root: EngineRoot, state: Mapping[str, Any], targets: Mapping[str, str]) -> dict[str, Any]:
    """Put whole tensors into parameters that lie in parts, and into masters. On every rank.

    Args:
        root: Around the module.
        state: By the names of the checkpoint.
        targets: Name in the module -> name in the checkpoint, of those that are in both.

    Returns:
        The state with what the module's own `load_state_dict` cannot take replaced by the module's present tensors.
    """
    settle(root)
    parameters = dict(root.module.named_parameters(remove_duplicate=False))
    result = {name: read_full(value) for name, value in state.items()}
    masters: dict[str, Any] = {}
    seen: set[int] = set()
    for own, name in targets.items():
        one = parameters.get(own)
        if one is None:
            continue
        value = result[name]
        if not isinstance(value, Tensor) or value.shape != shape_of(one):
            # Torch names it with all else that does not fit, if it sees the shape.
            if is_partitioned(one) and isinstance(value, Tensor):
                raise CheckpointError(
                    f"the checkpoint does not fit the module: {own} is {tuple(value.shape)} there, and "
                    f"{tuple(shape_of(one))} in the module.",
                    fix="build the module with the arguments it was saved with.",
                )
            continue
        masters[own] = value
        if is_partitioned(one):
            if id(one) not in seen:
                with gathered([one], writes=True):
                    if _is_first():
                        one.data.copy_(value)
            result[name] = one.data
        seen.add(id(one))
    if root.engine is None:
        root.__dict__["loaded"] = masters
    else:
        set_masters(root, masters)
    return result


def _is_first() -> bool:
    import torch.distributed as dist

    return dist.get_rank() == 0


def set_masters(root: EngineRoot, values: Mapping[str, Tensor]) -> None:
    """Let the engine's float32 masters have these values, by names of parameters."""
    _set_masters(root, values, lambda value, fragment: value.narrow(0, fragment.start, fragment.size))


def set_own_masters(root: EngineRoot, parts: Mapping[str, Tensor]) -> None:
    """Let the engine's float32 masters have these values, of which each rank gives its own part (stage 3)."""
    _set_masters(root, parts, lambda part, fragment: part.narrow(0, 0, fragment.size))


def _set_masters(root: EngineRoot, values: Mapping[str, Tensor], cut: Callable[[Tensor, Fragment], Tensor]) -> None:
    parameters = dict(root.module.named_parameters(remove_duplicate=False))
    for name, value in values.items():
        one = parameters.get(name)
        if one is None or not is_stepped(root, one):
            continue
        swap_in(root, one, writes=True)
        fragment = own_fragment(root, one)
        if fragment.flat is None or fragment.flat is one or not fragment.size:
            continue
        with torch.no_grad():
            fragment.of(fragment.flat.data).copy_(cut(value.detach().reshape(-1), fragment))
    swap_out(root, writes=True)


def load_optimizer(optimizer: EngineOptimizer, state: Mapping[str, Any]) -> None:
    """Put back a state in torch's layout.

    Raises:
        CheckpointError: Groups differ in number or size; or parameters of one group were stepped unequally often,
            which flat tensors cannot say.
    """
    root, inner = optimizer.root, optimizer.optimizer
    saved, own = state["param_groups"], optimizer.groups
    if [len(group["params"]) for group in saved] != [len(group) for group in own]:
        raise CheckpointError(
            f"the checkpoint's state of {type(inner).__name__} does not fit: it has groups of "
            f"{[len(group['params']) for group in saved]} parameters, and the optimizer of "
            f"{[len(one) for one in own]}.",
            fix="configure the optimizer with the parameter groups it was saved with.",
        )
    for group, target in zip(saved, inner.param_groups, strict=True):
        target.update({key: value for key, value in group.items() if key != "params"})
    for flat in [flat for flat in inner.state if not root.swaps_gradients]:
        del inner.state[flat]
    if root.swaps_gradients:
        # The tensors stay, for the engine has their places on the disk.
        for entry in inner.state.values():
            for key in [key for key, value in entry.items() if not isinstance(value, Tensor) or not value.ndim]:
                del entry[key]
    for group, members in zip(saved, own, strict=True):
        for number, one in zip(group["params"], members, strict=True):
            entry = state["state"].get(number, state["state"].get(str(number)))
            if entry and one.requires_grad:
                _put_entry(root, inner, one, entry)
    swap_out(root, writes=True)
    relink = getattr(root.zero, "_lazy_init_hp_params_optimizer_state", None)
    if relink is not None and not root.swaps_gradients and inner.state:
        root.zero._hp_optimizer_states_linked = False
        relink()


def _put_entry(root: EngineRoot, inner: Any, parameter: Any, entry: Mapping[str, Any]) -> None:
    shape = shape_of(parameter)
    swap_in(root, parameter, writes=True)
    fragment = own_fragment(root, parameter)
    flat = flats_of(root, parameter)[0]
    target = inner.state[flat]
    for key, value in entry.items():
        whole = read_full(value)
        if not (isinstance(whole, Tensor) and whole.ndim and whole.shape == shape):
            before = target.get(key)
            if before is not None and _number(before) != _number(whole):
                raise CheckpointError(
                    f"the checkpoint's optimizer state has {key}={_number(before)} for one parameter and "
                    f"{_number(whole)} for another of the same group, and DeepSpeed keeps one for all.",
                    fix="resume with another strategy, or start from the weights with load_from_checkpoint.",
                )
            target[key] = _count(inner, whole) if key == "step" else _copied(whole)
            continue
        if key not in target:
            target[key] = torch.zeros_like(flat.data)
        if fragment.size:
            part = whole.reshape(-1).narrow(0, fragment.start, fragment.size)
            fragment.of(target[key]).copy_(part)


def _count(inner: Any, value: Any) -> Any:
    """Return a count of steps as an optimizer keeps it: DeepSpeed's Adam as a number, torch's as a tensor."""
    if type(inner).__module__.startswith("deepspeed."):
        return int(_number(value))
    if isinstance(inner, torch.optim.Adam) and not isinstance(value, Tensor):
        return torch.tensor(float(value))
    return _copied(value)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of parameters in float32 on the CPU, whole ones only; for masters."""
    return {
        name: one.detach().float().cpu().clone() for name, one in module.named_parameters() if not is_partitioned(one)
    }
