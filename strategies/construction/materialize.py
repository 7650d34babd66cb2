"""Materialization of a module that was built on the meta device, unit by unit.

Values come from the operations that deferred.py recorded, from the module's `reset_parameters`, or from rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...errors import ModuleError
from ..distributed.collectives import broadcast_tensors, gather_objects
from ..distributed.shards import is_sharded
from .deferred import changed_names, forget_marks, own_tensors
from .operator_replay import is_deferred, is_empty, replay, view_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Any in this file: process groups, and attributes of modules.

# The attribute of a deferred tensor for its replacement, for other modules that also refer to it.
_MADE = "_loopwright_made"
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


def modules_of_unit(unit: nn.Module, inner: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Return a module and its descendants, parents first, without the modules of `inner` and their descendants.

    A module that is also used outside of `inner` is part of the unit.
    """
    left_out = {id(module) for module in inner}
    found: dict[int, nn.Module] = {}
    todo = [unit]
    while todo:
        module = todo.pop()
        if id(module) not in found and id(module) not in left_out:
            found[id(module)] = module
            todo.extend(reversed(list(module.children())))
    return list(found.values())


def check_materializable(
    root: nn.Module, *, param_init_fn: Callable[[nn.Module], object] | None = None, empty: bool = False
) -> None:
    """Check that every module of a model can be materialized. Call it before the first one is.

    Args:
        root: The full model.
        param_init_fn: As for `materialize`.
        empty: As for `materialize`.

    Raises:
        ModuleError: Some modules cannot; lists them.
    """
    _check(root, list(root.modules()), param_init_fn, empty=empty)


def empty_names(root: nn.Module, *, param_init_fn: Callable[[nn.Module], object] | None = None) -> list[str]:
    """Return the names of parameters that only a checkpoint fills, because they were built with `empty=True`.

    Args:
        root: The full model, before `materialize`.
        param_init_fn: As for `materialize`.
    """
    left: dict[int, str] = {}
    filled: set[int] = set()
    for path, module in root.named_modules():
        for name in _empty(module):
            key = id(module._parameters[name])
            left.setdefault(key, f"{path}.{name}".lstrip("."))
            if param_init_fn is not None or _fills_itself(module):
                filled.add(key)
    return [name for key, name in left.items() if key not in filled]


def materialize(
    module: nn.Module,
    *,
    device: torch.device,
    recurse: bool = True,
    inner: Collection[nn.Module] = (),
    root: nn.Module | None = None,
    param_init_fn: Callable[[nn.Module], object] | None = None,
    seeds_by_name: bool = False,
    empty: bool = False,
) -> None:
    """Replace a module's parameters and buffers on the meta device with tensors that have values.

    - Tensors built under `DeferredInit`, including those in attributes of the module and in lists, tuples and dicts
      there, get the values that they would have without it, computed on the CPU. They are bitwise equal if torch's
      operations are deterministic.
    - Other tensors are allocated; then `param_init_fn`, or the `reset_parameters` of the module that owns them, is
      called once per module, parents first, without gradients. This also applies to parameters built with
      `empty=True`, if the user defined `reset_parameters`.
    - Tensors that have values are moved to the device.

    A parameter keeps its class, its `requires_grad` and its attributes. It is a new object, so hooks of the old one are
    lost. A tied parameter is created once, even if the modules that share it are materialized separately.

    Args:
        module: The module, or unit.
        device: Device of the new tensors.
        recurse: Whether to include the module's descendants.
        inner: Modules to skip with their descendants: units that are already materialized.
        root: The full model, whose names appear in errors; None for `module`.
        param_init_fn: Fills the tensors of one module, not of its children. It may replace them (`module.to_empty`).
        seeds_by_name: Whether each module that is filled draws from generators that are seeded with its name, so that
            its values do not depend on which other modules there are. The generators then stay as they were.
        empty: Whether tensors not built under `DeferredInit` stay without values, for a checkpoint that is loaded next.

    Raises:
        ModuleError: Modules have no source of values, or were changed where changes are lost; lists them.
    """
    modules = modules_of_unit(module, inner) if recurse else [module]
    _check(module if root is None else root, modules, param_init_fn, empty=empty)
    unfilled = _make(modules, device, param_init_fn, with_values=True)
    if not empty:
        _fill(module if root is None else root, unfilled, device, param_init_fn, seeds_by_name=seeds_by_name)


def materialize_from_rank_zero(
    module: nn.Module,
    *,
    device: torch.device,
    inner: Collection[nn.Module] = (),
    root: nn.Module | None = None,
    group: ProcessGroup | None = None,
    param_init_fn: Callable[[nn.Module], object] | None = None,
    seeds_by_name: bool = False,
) -> None:
    """Materialize on the group's first rank, and broadcast parameters and buffers to the other ranks.

    Call it on all ranks: it communicates. On the other ranks, tensors may have values or be on the meta device.

    Args:
        module: As for `materialize`; the same on all ranks.
        device: As for `materialize`; the group's backend must support it.
        inner: As for `materialize`.
        root: As for `materialize`.
        group: Ranks that take part; None for all.
        param_init_fn: As for `materialize`, on the first rank.
        seeds_by_name: As for `materialize`.

    Raises:
        ModuleError: On all ranks: the modules differ, or the first rank has no source of values.
    """
    root = module if root is None else root
    modules = modules_of_unit(module, inner)
    is_first = dist.get_rank(group) == 0
    problems = _problems(root, modules, param_init_fn, empty=False) if is_first else []
    _check_alike(root, modules, problems, group)
    unfilled = _make(modules, device, param_init_fn, with_values=is_first)
    if is_first:
        _fill(root, unfilled, device, param_init_fn, seeds_by_name=seeds_by_name)
    first = 0 if group is None else dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in _distinct(modules):
            if is_sharded(tensor):
                continue  # sharded by the user: the ranks have different shards
            if tensor.layout is not torch.strided:
                broadcast_tensors([tensor], group)
                continue
            # As bytes, because a backend may not support the dtype.
            dense = tensor.detach().resolve_conj().contiguous()
            if dense.numel():
                dist.broadcast(dense.reshape(-1).view(torch.uint8), first, group=group)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)


def made_of(tensor: Tensor) -> Tensor:
    """Return the replacement of a deferred tensor; the tensor itself if it was not replaced."""
    made: Tensor = tensor.__dict__.get(_MADE, tensor)
    return made


def update_attributes(module: nn.Module) -> None:
    """Replace deferred tensors in the attributes of all modules by their materialized replacements.

    Needed for parameters of a submodule that was materialized after the module whose attribute refers to them.
    """
    _put({}, list(module.modules()))


# --- checks -------------------------------------------------------------------------------------------------


def _check(
    root: nn.Module, modules: Sequence[nn.Module], param_init_fn: Callable[[nn.Module], object] | None, *, empty: bool
) -> None:
    problems = _problems(root, modules, param_init_fn, empty=empty)
    if problems:
        _refuse(problems)


def _refuse(problems: Sequence[str]) -> None:
    raise ModuleError(
        "Expected initial values for all tensors of the model, found none for:\n"
        + "\n".join(f"  - {line}" for line in problems),
        fix="build and change the model within configure_model or fabric.init_module(), or define reset_parameters() "
        "in the modules that own these tensors, or pass param_init_fn= to the strategy.",
    )


def _problems(
    root: nn.Module, modules: Iterable[nn.Module], param_init_fn: Callable[[nn.Module], object] | None, *, empty: bool
) -> list[str]:
    """Return one line for each module that has a problem."""
    names = {id(module): name or "(the model)" for name, module in root.named_modules()}
    lines = []
    for module in modules:
        who = f"{names.get(id(module), '(a module)')} ({type(module).__name__})"
        changed = changed_names(module)
        if changed:
            lines.append(
                f"{who}: {', '.join(sorted(changed))} changed, moved or copied after init_module() ended, which has "
                "no effect"
            )
        unknown = sorted(name for name in _unknown(module) if name not in changed)
        if unknown and not (empty or param_init_fn is not None or hasattr(module, "reset_parameters")):
            lines.append(f"{who}: {', '.join(unknown)} on the meta device, and there is no reset_parameters()")
    return lines


def _unknown(module: nn.Module) -> dict[str, Tensor]:
    tensors = own_tensors(module)
    unknown = {name: tensor for name, tensor in tensors.items() if tensor.is_meta and not is_deferred(tensor)}
    return {name: tensor for name, tensor in unknown.items() if _MADE not in tensor.__dict__}


def _empty(module: nn.Module) -> list[str]:
    """Return the module's own parameters that were built with `empty=True` and are not materialized yet."""
    own = module._parameters.items()
    return [name for name, one in own if one is not None and is_empty(one) and _MADE not in one.__dict__]


def _fills_itself(module: nn.Module) -> bool:
    """Return whether the user defined the module's `reset_parameters`, in its class or on the object."""
    own = getattr(module, "reset_parameters", None)
    is_torchs = str(getattr(own, "__module__", "")).partition(".")[0] == "torch"
    return own is not None and ("reset_parameters" in module.__dict__ or not is_torchs)


def _check_alike(
    root: nn.Module, modules: Sequence[nn.Module], problems: Sequence[str], group: ProcessGroup | None
) -> None:
    layout = _layout(root, modules)
    everyone = gather_objects((layout, list(problems)), group)
    first, found = everyone[0]
    if found:
        _refuse(found)
    unlike = {
        rank: sorted(set(first) ^ set(other)) for rank, (other, _) in enumerate(everyone) if list(other) != list(first)
    }
    if unlike:
        shown = "; ".join(f"rank {rank}: {_shown(entries)}" for rank, entries in unlike.items())
        raise ModuleError(
            f"Expected the same model on all ranks, got differences from rank 0: {shown}.",
            fix="build the same model on every rank.",
        )


def _layout(root: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[str, tuple[int, ...], str]]:
    """Return name, shape and dtype of the modules' tensors; for a tied tensor, the name of the other instead of
    dtype."""
    names = {id(module): name for name, module in root.named_modules()}
    first: dict[int, str] = {}
    layout = []
    for module in modules:
        for short, tensor in own_tensors(module).items():
            name = f"{names.get(id(module), '')}.{short}".lstrip(".")
            is_tied = id(tensor) in first
            layout.append((name, tuple(tensor.shape), f"tied to {first[id(tensor)]}" if is_tied else str(tensor.dtype)))
            first.setdefault(id(tensor), name)
    return layout


def _shown(entries: Sequence[tuple[str, tuple[int, ...], str]]) -> str:
    if not entries:
        return "the order of its tensors"
    some = ", ".join(f"{name} {shape} {dtype}" for name, shape, dtype in entries[:8])
    return some if len(entries) <= 8 else f"{some} and {len(entries) - 8} more"


# --- new tensors ------------------------------------------------------------------------------------------------------


def _make(
    modules: Sequence[nn.Module],
    device: torch.device,
    param_init_fn: Callable[[nn.Module], object] | None,
    *,
    with_values: bool,
) -> list[nn.Module]:
    """Put tensors on the device into the modules, and return the modules whose tensors have no values yet."""
    unfilled = [
        module
        for module in modules
        if _unknown(module) or (_empty(module) and (param_init_fn is not None or _fills_itself(module)))
    ]
    old = {id(tensor): tensor for tensor in _distinct(modules)}
    attributes = {id(tensor): tensor for module in modules for tensor in _deferred_attributes(module)}
    deferred = {key: tensor for key, tensor in {**attributes, **old}.items() if is_deferred(tensor)}
    todo = {key: tensor for key, tensor in deferred.items() if _MADE not in tensor.__dict__}
    views = [
        view_of(tensor, with_values=_gets_values(tensor, is_own=key in old, with_values=with_values))
        for key, tensor in todo.items()
    ]
    values = dict(zip(todo, replay(views, device), strict=True))
    everything = {**attributes, **old}
    new: dict[int, Tensor] = {}
    for key, tensor in everything.items():
        if _MADE in tensor.__dict__:
            new[key] = tensor.__dict__[_MADE]
        elif key in values:
            new[key] = _in_place_of(tensor, values[key])
        elif tensor.is_meta:
            new[key] = _in_place_of(tensor, torch.empty_like(tensor, device=device))
        elif not (is_lazy(tensor) or _is_on(tensor, device)):
            new[key] = _in_place_of(tensor, tensor.detach().to(device))
    for key, tensor in new.items():
        everything[key].__dict__[_MADE] = tensor
    _put(new, modules)
    for module in modules:
        forget_marks(module)
    return unfilled


def _gets_values(tensor: Tensor, *, is_own: bool, with_values: bool) -> bool:
    """Return whether a deferred tensor is computed; otherwise its values come from a checkpoint or another rank."""
    if isinstance(tensor, nn.Parameter):
        return with_values and not is_empty(tensor)
    return with_values or not is_own


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _in_place_of(old: Tensor, value: Tensor) -> Tensor:
    """Return a value with the class, the attributes and the `requires_grad` of a tensor."""
    # As nn.Parameter does; as_subclass would make a view, whose base stays alive when partitioning replaces `new.data`.
    new: Tensor = torch.Tensor._make_subclass(type(old), value.detach(), old.requires_grad and old.is_leaf)
    new.__dict__.update(old.__dict__)
    return new


def _put(new: dict[int, Tensor], modules: Sequence[nn.Module]) -> None:
    for owner in modules:
        for place in (owner._parameters, owner._buffers):
            for name, tensor in place.items():
                if id(tensor) in new:
                    place[name] = new[id(tensor)]  # type: ignore[assignment]
    for module in modules:
        seen: set[int] = set()
        for name, value in list(_attributes(module)):
            module.__dict__[name] = _replaced(value, new, seen)


def _fill(
    root: nn.Module,
    modules: Sequence[nn.Module],
    device: torch.device,
    param_init_fn: Callable[[nn.Module], object] | None,
    *,
    seeds_by_name: bool,
) -> None:
    """Fill tensors without values with the user's function, or with the modules' `reset_parameters`."""
    names = {id(module): name for name, module in root.named_modules()} if seeds_by_name else {}
    for module in modules:
        with torch.no_grad(), device, _seeded_by(names[id(module)], device) if seeds_by_name else nullcontext():
            if param_init_fn is not None:
                param_init_fn(module)
            else:
                module.reset_parameters()  # type: ignore[operator]
    left = [module for module in modules if _unknown(module)]
    if left:
        _refuse([f"{type(module).__name__}: still on the meta device after it was filled" for module in left])


@contextmanager
def _seeded_by(name: str, device: torch.device) -> Iterator[None]:
    """Return a context in which torch's generators depend on a name and on their state, and after which they do not."""
    digest = hashlib.blake2b(name.encode(), digest_size=8)
    digest.update(torch.get_rng_state().numpy().tobytes())
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=_kind(device)):
        torch.manual_seed(int.from_bytes(digest.digest(), "little") >> 1)
        yield


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # torch looks for a module of that name


def _distinct(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the modules' own parameters and buffers; a tied one once, at its first occurrence."""
    return list({id(tensor): tensor for module in modules for tensor in own_tensors(module).values()}.values())


# --- tensors in attributes --------------------------------------------------------------------------------------------


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in module.__dict__.items() if name not in _OF_EVERY_MODULE)


def _deferred_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Yield deferred tensors in attributes, except parameters, which belong to the modules that own them."""
    seen: set[int] = set()
    for _, value in _attributes(module):
        for tensor in _tensors(value, seen):
            if not isinstance(tensor, nn.Parameter) and is_deferred(tensor):
                yield tensor


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
        seen.add(id(value))  # a list may hold itself
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, seen)


def _replaced(value: object, new: dict[int, Tensor], seen: set[int]) -> Any:
    """Return a value with old tensors replaced by new ones; lists and dicts are changed in place."""
    if isinstance(value, Tensor):
        return new.get(id(value), made_of(value))
    if not isinstance(value, (list, tuple, dict)) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, tuple):
        items = [_replaced(item, new, seen) for item in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        other = _replaced(item, new, seen)
        if other is not item:
            value[key] = other
    return value
