"""The state of a DeepSpeed engine in Loopwright's layout: full float32 tensors by the names of parameters.

Every other strategy writes and reads the same, in every ZeRO stage and with any number of processes. Reading sums
buffers over ranks that are zero where a rank has no elements; writing copies, and does not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import CheckpointError
from ...protocols import T
from ..distributed.shards import read_full
from .engine import EngineOptimizer, EngineRoot

if TYPE_CHECKING:
    from .engine_types import HalfOptimizer, State, ZeroParameter

# Any in this file: entries of states, of the user's modules and optimizers.


# --- where a parameter's elements are --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fragment:
    """Where elements of a parameter are on this rank: the engine keeps masters and state in flat, sharded tensors.

    Attributes:
        flat: The flat float32 tensor that the optimizer steps; None if this rank has none of the parameter.
        at: Offset of the elements in `flat`.
        start: Offset of the elements in the flattened parameter.
        size: Number of elements.
    """

    flat: Tensor | None
    at: int = 0
    start: int = 0
    size: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements in a tensor that is as long as `flat`."""
        return tensor.reshape(-1).narrow(0, self.at, self.size)


def is_partitioned(parameter: Tensor) -> TypeGuard[ZeroParameter]:
    """Return whether each rank has a shard of the parameter itself (ZeRO stage 3)."""
    return hasattr(parameter, "ds_id")


def _shape_of(parameter: Tensor) -> torch.Size:
    return torch.Size(parameter.ds_shape) if is_partitioned(parameter) else parameter.shape


def needs_gathering(root: EngineRoot, parameter: Tensor) -> bool:
    """Return whether this rank does not have the full float32 tensor: below stage 3, masters of 16-bit parameters."""
    if is_partitioned(parameter):
        return True
    return root.has_engine and parameter.dtype != torch.float32 and _is_stepped(root, parameter)


def _is_stepped(root: EngineRoot, parameter: Tensor) -> bool:
    """Return whether the engine's optimizer has the parameter: it is trained, and in one of the groups."""
    if not parameter.requires_grad or not root.has_optimizer:
        return False
    if root.stage == 3:
        return root.zero.get_param_id(parameter) in root.zero.grad_position
    return root.stage == 0 or any(one is parameter for group in root.zero.bit16_groups for one in group)


def state_of(root: EngineRoot, flat: Tensor) -> State:
    """Return the optimizer's state of a flat tensor."""
    inner = root.engine.basic_optimizer
    assert inner is not None
    state: State = inner.state[flat]
    return state


def _group_of(root: EngineRoot, parameter: Tensor) -> int:
    """Return the number of the parameter's group of flat tensors, in stages 1 to 3."""
    zero = root.zero
    if root.stage == 3:
        return zero.grad_position[zero.get_param_id(parameter)][0]
    return next(i for i, group in enumerate(zero.bit16_groups) if any(one is parameter for one in group))


def _flat_of(root: EngineRoot, parameter: Tensor) -> Tensor:
    """Return this rank's flat tensor of the parameter's group; there is one on every rank."""
    if root.stage == 0:
        flat = local_fragment(root, parameter).flat
        assert flat is not None
        return flat
    zero = root.zero
    flats = zero.fp32_partitioned_groups_flat if root.stage == 3 else zero.single_partition_of_fp32_groups
    return flats[_group_of(root, parameter)]


def local_fragment(root: EngineRoot, parameter: Tensor) -> Fragment:
    """Return where this rank has the parameter's float32 elements."""
    total = _shape_of(parameter).numel()
    if root.stage == 0:
        half = cast("HalfOptimizer", root.engine.optimizer)
        if hasattr(half, "fp32_groups"):
            for members, masters in zip(half.fp16_groups, half.fp32_groups, strict=True):
                for one, master in zip(members, masters, strict=True):
                    if one is parameter:
                        return Fragment(master, 0, 0, total)
        return Fragment(parameter, 0, 0, total)
    zero = root.zero
    if is_partitioned(parameter):
        _, at, _ = zero.grad_position[zero.get_param_id(parameter)]
        share = parameter.partition_numel()
        start = share * zero._get_param_partition_rank(parameter)
        return Fragment(_flat_of(root, parameter), at, start, max(0, min(share, total - start)))
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return Fragment(None)
    own, flat = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    return Fragment(_flat_of(root, parameter), flat.start, own.start, own.numel)


def _swap_in(root: EngineRoot, parameter: Tensor, *, writes: bool = False) -> None:
    """Load the optimizer's tensors of a parameter's group from disk, until `_swap_out`.

    One group at a time: the engine's buffers have room for one. `writes` as in `_swap_out`.
    """
    if not root.swaps_gradients:
        return
    number = _group_of(root, parameter)
    if root.__dict__.get("_swapped_in") == number:
        return
    _swap_out(root, writes=writes)
    if root.zero._swappable_optimizer_subgroup(number):
        root.zero._optimizer_states_and_gradient_swap_in(number)
        root.__dict__["_swapped_in"] = number


def _swap_out(root: EngineRoot, *, writes: bool = False) -> None:
    """Release the engine's buffers; with `writes`, their content goes to the disk."""
    number = root.__dict__.pop("_swapped_in", None)
    if number is not None:
        zero = root.zero
        (zero._optimizer_states_and_gradient_swap_out if writes else zero._release_swap_buffers)(number)


@contextmanager
def _gathered(parameter: Tensor, *, writes: bool = False) -> Iterator[None]:
    """Return a context in which a partitioned parameter is full; with `writes`, rank 0's changes are kept."""
    if not is_partitioned(parameter):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if writes else None):
        yield


# --- saving ----------------------------------------------------------------------------------------------------------


class PendingTensor:
    """Placeholder of a tensor that is sharded over ranks, until `gather` makes it on rank 0.

    Attributes:
        root: The module with the engine.
        parameter: The parameter; None where this rank does not have it.
        key: Key of the optimizer's state; None: the parameter itself, in float32.
    """

    is_part = True  # other ranks have the rest

    # Not a dataclass: `has_parts` must see it, not its fields.
    def __init__(self, root: EngineRoot, parameter: Any, key: str | None = None) -> None:
        self.root = root
        self.parameter = parameter
        self.key = key

    @property
    def shape(self) -> torch.Size:
        """The shape of the full tensor."""
        return _shape_of(self.parameter)

    @property
    def label(self) -> tuple[object, ...]:
        """A value that is equal for the same tensor."""
        return (id(self.parameter), self.key)

    def full(self) -> Any:
        """Return the full tensor. On every rank: it communicates."""
        root, parameter = self.root, self.parameter
        if not root.has_engine or not _is_stepped(root, parameter):
            with _gathered(parameter):
                return parameter.detach().float().clone()
        _swap_in(root, parameter)
        if root.stage == 0:
            source = self.source(local_fragment(root, parameter))
            assert source is not None
            return source.float().reshape(self.shape).clone()
        buffer = torch.zeros(self.shape, dtype=torch.float32, device=root.engine.device)
        self.fill(buffer, local_fragment(root, parameter))
        dist.all_reduce(buffer)
        return buffer

    def source(self, fragment: Fragment) -> Tensor | None:
        """Return the flat tensor with this rank's elements; None without any."""
        if fragment.flat is None or not fragment.size:
            return None
        source: Tensor = fragment.flat if self.key is None else state_of(self.root, fragment.flat)[self.key]
        return source.detach()

    def fill(self, buffer: Tensor, fragment: Fragment) -> None:
        """Copy this rank's elements into a full tensor."""
        source = self.source(fragment)
        if source is not None:
            buffer.reshape(-1).narrow(0, fragment.start, fragment.size).copy_(fragment.of(source))


def module_state(root: EngineRoot, state: Mapping[str, Any]) -> State:
    """Return a module's state with `PendingTensor` where this rank does not have the full float32 tensor.

    Args:
        root: The root of the module.
        state: What the module's own `state_dict` returns.
    """
    parameters = dict(root.module.named_parameters(remove_duplicate=False))
    result = {}
    for name, value in state.items():
        one = parameters.get(name)
        if one is not None and needs_gathering(root, one):
            value = PendingTensor(root, one)
        elif one is not None and root.has_engine:
            value = value.float()  # frozen ones have no masters; float32 ones are not copied
        result[name] = value
    return result


def optimizer_state(optimizer: EngineOptimizer) -> State:
    """Return an optimizer's state in torch's layout, by the numbers of the user's parameters."""
    root, inner = optimizer.root, optimizer.optimizer
    numbers: dict[int, int] = {}
    groups = []
    state: dict[int, State] = {}
    for members, group in zip(optimizer.groups, inner.param_groups, strict=True):
        groups.append({**group, "params": [numbers.setdefault(id(one), len(numbers)) for one in members]})
        for one in members:
            entry = state_entry(root, inner, one)
            if entry:
                state[numbers[id(one)]] = entry
    return {"state": state, "param_groups": groups}


def state_entry(root: EngineRoot, inner: Optimizer, parameter: nn.Parameter) -> State:
    """Return an optimizer's state of one parameter, with a `PendingTensor` for each tensor of its length."""
    if not parameter.requires_grad:
        return {}
    flat = _flat_of(root, parameter)
    return {
        key: PendingTensor(root, parameter, key)
        if isinstance(value, Tensor) and value.ndim > 0 and value.numel() == flat.numel()
        else _copied(value)
        for key, value in dict.get(inner.state, flat, {}).items()
    }


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def gather(state: T, *, keep: bool) -> T:
    """Return a state with full tensors instead of `PendingTensor`, on rank 0's CPU; None elsewhere. On every rank.

    Args:
        state: The content of a checkpoint, the same on all ranks except for the values of its tensors.
        keep: Whether this is rank 0.
    """
    made: dict[tuple[object, ...], Any] = {}
    settled: dict[int, EngineRoot] = {}

    def full(pending: PendingTensor) -> Any:
        if pending.label not in made:
            if id(pending.root) not in settled:
                settled[id(pending.root)] = pending.root
                pending.root.settle()
            value = pending.full()
            made[pending.label] = (value.cpu() if isinstance(value, Tensor) else value) if keep else None
        return made[pending.label]

    def resolve(value: Any) -> Any:
        if isinstance(value, PendingTensor):
            return full(value)
        if isinstance(value, Mapping):
            found = {key: resolve(one) for key, one in value.items()}
            return found if any(found[key] is not value[key] for key in found) else value
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            items = [resolve(one) for one in value]
            return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
        return value

    try:
        resolved: T = resolve(state)
        return resolved
    finally:
        for root in settled.values():
            _swap_out(root)


# --- loading ---------------------------------------------------------------------------------------------------------


def load_module(root: EngineRoot, state: Mapping[str, Any], targets: Mapping[str, str]) -> State:
    """Copy full tensors into partitioned parameters, and into masters. On every rank.

    Args:
        root: The root of the module.
        state: By the names of the checkpoint.
        targets: Name in the module -> name in the checkpoint, for the names in both.

    Returns:
        The state for the module's own `load_state_dict`, in which partitioned parameters stay as they are.
    """
    root.settle()
    parameters = dict(root.module.named_parameters(remove_duplicate=False))
    result = {name: read_full(value) for name, value in state.items()}
    masters: dict[str, Tensor] = {}
    seen: set[int] = set()
    for own, name in targets.items():
        one = parameters.get(own)
        value = result[name]
        if one is None or not isinstance(value, Tensor):
            continue
        shape = _shape_of(one)
        if value.shape != shape:
            if is_partitioned(one):
                raise CheckpointError(
                    f"Expected {own} of shape {tuple(shape)} in the checkpoint, as in the module, got "
                    f"{tuple(value.shape)}.",
                    fix="build the module with the arguments that it was saved with.",
                )
            continue  # torch names it with every other misfit
        masters[own] = value
        if is_partitioned(one):
            if id(one) not in seen:
                with _gathered(one, writes=True):
                    if _is_first():
                        one.data.copy_(value)
            result[name] = one.data
        seen.add(id(one))
    if root.has_engine:
        set_masters(root, masters)
    else:
        root.__dict__["loaded"] = masters
    return result


def _is_first() -> bool:
    return dist.get_rank() == 0


def set_masters(root: EngineRoot, values: Mapping[str, Tensor]) -> None:
    """Copy full tensors, by names of parameters, into the engine's float32 masters."""
    _set_masters(root, values, lambda fragment: fragment.start)


def set_local_masters(root: EngineRoot, shards: Mapping[str, Tensor]) -> None:
    """Copy local shards, by names of parameters, into the engine's float32 masters (ZeRO stage 3)."""
    _set_masters(root, shards, lambda _: 0)


def _set_masters(root: EngineRoot, values: Mapping[str, Tensor], start: Callable[[Fragment], int]) -> None:
    parameters = dict(root.module.named_parameters(remove_duplicate=False))
    for name, value in values.items():
        one = parameters.get(name)
        if one is None or not _is_stepped(root, one):
            continue
        _swap_in(root, one, writes=True)
        fragment = local_fragment(root, one)
        if fragment.flat is not None and fragment.flat is not one and fragment.size:
            source = value.detach().reshape(-1).narrow(0, start(fragment), fragment.size)
            fragment.of(fragment.flat.data).copy_(source)
    _swap_out(root, writes=True)


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return float32 copies on the CPU of the parameters that are not partitioned, for masters."""
    return {
        name: one.detach().float().cpu().clone() for name, one in module.named_parameters() if not is_partitioned(one)
    }


def load_optimizer(optimizer: EngineOptimizer, state: Mapping[str, Any]) -> None:
    """Load a state in torch's layout.

    Raises:
        CheckpointError: Groups differ in number or size; or parameters of one group have different step counts,
            which flat tensors cannot represent.
    """
    root, inner = optimizer.root, optimizer.optimizer
    saved, own = state["param_groups"], optimizer.groups
    check_groups(inner, saved, [len(group) for group in own])
    for group, target in zip(saved, inner.param_groups, strict=True):
        target.update({key: value for key, value in group.items() if key != "params"})
    if root.swaps_gradients:  # the tensors stay: the engine has their places on the disk
        for entry in inner.state.values():
            for key in [key for key, value in entry.items() if not isinstance(value, Tensor) or not value.ndim]:
                del entry[key]
    else:
        inner.state.clear()
    for group, members in zip(saved, own, strict=True):
        for number, one in zip(group["params"], members, strict=True):
            entry = entry_of(state, number)
            if entry and one.requires_grad:
                _load_entry(root, inner, one, entry)
    _swap_out(root, writes=True)
    relink = getattr(root.zero, "_lazy_init_hp_params_optimizer_state", None)
    if root.stage and relink is not None and not root.swaps_gradients and inner.state:
        root.zero._hp_optimizer_states_linked = False
        relink()


def check_groups(inner: Optimizer, saved: list[State], expected: list[int]) -> None:
    """Refuse a saved state whose parameter groups have other sizes.

    Raises:
        CheckpointError: With the sizes of both.
    """
    sizes = [len(group["params"]) for group in saved]
    if sizes != expected:
        raise CheckpointError(
            f"Expected a state of {type(inner).__name__} with parameter groups of the sizes {expected}, got {sizes}.",
            fix="configure the optimizer with the parameter groups that it was saved with.",
        )


def entry_of(state: Mapping[str, Any], number: int) -> State | None:
    """Return the saved state of a parameter; numbers may be strings."""
    entry: State | None = state["state"].get(number, state["state"].get(str(number)))
    return entry


def _load_entry(root: EngineRoot, inner: Optimizer, parameter: nn.Parameter, entry: State) -> None:
    shape = _shape_of(parameter)
    _swap_in(root, parameter, writes=True)
    fragment = local_fragment(root, parameter)
    flat = _flat_of(root, parameter)
    target = inner.state[flat]
    for key, value in entry.items():
        full = read_full(value)
        if not (isinstance(full, Tensor) and full.ndim and full.shape == shape):
            before = target.get(key)
            if before is not None and _number(before) != _number(full):
                raise CheckpointError(
                    f"Expected one value of {key} for each parameter group in the checkpoint's optimizer state, as "
                    f"DeepSpeed stores it, got {_number(before)} and {_number(full)} in one group.",
                    fix="resume with another strategy, or load only the weights with load_from_checkpoint.",
                )
            target[key] = _count(inner, full) if key == "step" else _copied(full)
            continue
        if key not in target:
            target[key] = torch.zeros_like(flat.data)
        if fragment.size:
            fragment.of(target[key]).copy_(full.reshape(-1).narrow(0, fragment.start, fragment.size))


def _count(inner: Optimizer, value: Tensor | float) -> Tensor | float:
    """Return a step count as the optimizer keeps it: DeepSpeed's Adam as a number, torch's as a tensor."""
    if type(inner).__module__.startswith("deepspeed."):
        return int(_number(value))
    if isinstance(inner, torch.optim.Adam) and not isinstance(value, Tensor):
        return torch.tensor(float(value))
    copy: Tensor | float = _copied(value)
    return copy


def _number(value: Tensor | float) -> Tensor | float:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
