"""Recording of the operations that create or change tensors without values.

Two torch modes intercept a program: `Operations` intercepts all operations below autograd, `Functions` the Python calls
that read values of a tensor. Both belong to a `DeferredInit`, which decides whether random numbers are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import ModuleError
from ...protocols import AnyFunction, Args
from .operator_replay import (
    CPU,
    META,
    Constant,
    Kwargs,
    Operation,
    View,
    constant_of,
    is_deferred,
    is_replaying,
    keep_constants,
    map_leaves,
    new_memory,
    next_time,
    replay,
    tensors_in,
    users_line,
    view_of,
    views_in,
    writes_needed,
)

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from .deferred import DeferredInit

# Any in this file: operations of torch, their arguments and results.

# Largest tensor whose values are kept after they are read, so that the next read does not compute them again.
_SMALL_BYTES = 2**16

_FILL_AT_RANDOM = frozenset(
    ["normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_"]
)
# Operations whose random numbers do not depend on the values of their only tensor.
_BLIND = _FILL_AT_RANDOM | {"rand_like", "randn_like", "randint_like"}
# Operations that overwrite the tensor, so that its previous values need not be computed.
_OVERWRITES = _FILL_AT_RANDOM | {"zero_", "fill_", "copy_"}
_UNWRITTEN = frozenset(["empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"])


class Operations(TorchDispatchMode):
    """Intercepts every operation below autograd."""

    def __init__(self, context: DeferredInit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run an operation, or record it if it creates a new tensor or has a deferred one as an argument."""
        kwargs = kwargs or {}
        if is_replaying():
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        device = kwargs.get("device")
        if self._context.is_inside and device is not None and device.type == "meta":
            kwargs = {**kwargs, "device": CPU}  # torch took it from the deferred tensor
            return self._defer(func, args, kwargs)
        if any(is_deferred(tensor) for tensor in tensors) or _makes_tensor(func, tensors, args, kwargs):
            return self._defer(func, args, kwargs)
        keep_constants(_written(func, args, kwargs))
        return func(*args, **kwargs)

    def _defer(self, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        written = _written(func, args, kwargs)
        if any(not is_deferred(tensor) for tensor in written):
            keep_constants(written)
            return func(*map_leaves(_read, args), **map_leaves(_read, kwargs))
        _refuse_storage(func, args)
        _refuse_plain_meta(func, (args, kwargs))
        meta_args, meta_kwargs = map_leaves(_on_meta, args), map_leaves(_on_meta, kwargs)
        if kwargs.get("device") is not None:
            meta_kwargs["device"], kwargs = META, {**kwargs, "device": CPU}
        views = (map_leaves(_view, meta_args), {**map_leaves(_view, meta_kwargs), **_device_of(kwargs)})
        is_random = torch.Tag.nondeterministic_seeded in func.tags and not self._context.empty
        rng_state = _rng_state(kwargs) if is_random else None
        try:
            result = func(*meta_args, **meta_kwargs)
        except RuntimeError:
            # No meta kernel, or the result depends on values. Errors in the user's code are raised again.
            real = func(*map_leaves(_read, args), **map_leaves(_read, kwargs))
            result = _result_like(func, real, args, kwargs)
        else:
            if any(tensor.layout is not torch.strided for tensor in tensors_in(result)):
                return func(*map_leaves(_read, args), **map_leaves(_read, kwargs))
            if rng_state is not None:
                _draw(func, views, args, kwargs)
        self._write_down(func, views, written, list(tensors_in(result)), rng_state)
        return result

    def _write_down(
        self,
        func: OpOverload,
        views: tuple[object, Kwargs],
        written: Sequence[Tensor],
        results: Sequence[Tensor],
        rng_state: Tensor | None,
    ) -> None:
        if _name(func) in _OVERWRITES and written:
            views = _without_past(views, written[0])
        made = []
        for index, tensor in enumerate(results):
            if not is_deferred(tensor):
                new_memory(tensor, empty=self._context.empty)
                made.append((index, view_of(tensor)))
        if torch.Tag.inplace_view in func.tags or _name(func) in _UNWRITTEN or not (made or written):
            return
        operation = Operation(
            time=next_time(),
            func=func,
            args=views[0],
            kwargs=views[1],
            made=tuple(made),
            read=tuple(views_in(views)),
            rng_state=rng_state,
            is_skipped=rng_state is None and torch.Tag.nondeterministic_seeded in func.tags,
            default_dtype=torch.get_default_dtype(),
        )
        for view in [*(view for _, view in made), *map(view_of, written)]:
            view.memory.last_write = operation


def _draw(func: OpOverload, views: tuple[Any, Kwargs], args: Args, kwargs: Kwargs) -> None:
    """Advance the random number generator as the operation does."""
    if _name(func) in _BLIND and len(list(views_in(views))) == 1:
        func(*map_leaves(_throwaway, views[0]), **map_leaves(_throwaway, views[1]))
    else:
        func(*map_leaves(_read, args), **map_leaves(_read, kwargs))


class Functions(TorchFunctionMode):
    """Intercepts Python calls that a mode below autograd does not intercept, or intercepts too late."""

    def __init__(self, context: DeferredInit) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(
        self,
        func: AnyFunction,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        """Handle a call for a deferred tensor as if the tensor were on the CPU."""
        kwargs = kwargs or {}
        if func in _ANSWERS and is_deferred(args[0]):
            # True without values, so that trunc_normal_ skips its loop over drawn values.
            return self._context.empty if func == _IS_META else _ANSWERS[func]
        if func in _READERS and not (func in _CONVERTERS and _is_given_tensor(args, kwargs)):
            return func(*map_leaves(_read, args), **map_leaves(_read, kwargs))
        if func == _SET_DATA and args[0].is_meta != args[1].is_meta:
            return func(args[0], constant_of(args[1]) if is_deferred(args[0]) else _read(args[1]))
        if func in _INDEXERS and is_deferred(args[0]):
            args = (args[0], _index_of(args[1]), *args[2:])
        before = self._context.is_inside
        self._context.is_inside = before or any(is_deferred(tensor) for tensor in tensors_in((args, kwargs)))
        try:
            return func(*args, **kwargs)
        finally:
            self._context.is_inside = before


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_ANSWERS: dict[Any, Any] = {
    Tensor.device.__get__: CPU,
    _IS_META: False,
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_CONVERTERS = {torch.as_tensor, torch.asarray}
_READERS = {
    *_CONVERTERS,
    torch.tensor,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.new_tensor,
}


_INDEXERS = {Tensor.__getitem__, Tensor.__setitem__}


def _index_of(index: object) -> object:
    """Return an index with lists and arrays replaced by tensors, which torch would put on the meta device."""
    if isinstance(index, tuple):
        return tuple(_index_of(one) for one in index)
    if hasattr(index, "__array__") and not isinstance(index, Tensor):
        return torch.as_tensor(index)
    if isinstance(index, (list, range)) and all(isinstance(one, (int, list)) for one in index):
        return torch.tensor(index, dtype=None if len(index) else torch.long)
    return index


def _is_given_tensor(args: Sequence[object], kwargs: Kwargs) -> bool:
    return isinstance(next(iter((*args, *kwargs.values())), None), Tensor)


def _read(value: object) -> object:
    """Return a deferred tensor's values, and any other object unchanged."""
    if not isinstance(value, Tensor) or not is_deferred(value):
        return value
    view = view_of(value)
    if any(isinstance(write, Operation) and write.is_skipped for write in writes_needed([view])):
        raise ModuleError(
            f"Expected a constructor that does not read random values with empty_init=True, which draws none, got a "
            f"read at {users_line()}.",
            fix="build the module with empty_init=False, or do not use torch's random numbers to decide its structure.",
        )
    everything = View(view.memory, view.write, torch.uint8, torch.Size([view.memory.num_bytes]), (1,), 0, False, False)
    real, all_bytes = replay([view, everything], CPU)
    if view.memory.num_bytes <= _SMALL_BYTES:
        known = all_bytes.clone()
        constant = Constant(next_time(), view.memory, known, known, (1,), known._version, "")
        view.memory.last_write = constant
    return real


def _on_meta(value: object) -> object:
    if isinstance(value, Tensor) and not is_deferred(value) and not _is_plain_meta(value):
        return constant_of(value)
    return value


def _view(value: object) -> object:
    return view_of(value) if isinstance(value, Tensor) and is_deferred(value) else value


def _throwaway(value: object) -> object:
    if not isinstance(value, View):
        return value
    return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=CPU)


def _without_past(views: tuple[object, Kwargs], target: Tensor) -> tuple[Any, Kwargs]:
    """Drop the recorded writes of the written tensor if all of its memory is overwritten and no argument reads it."""
    written = view_of(target)
    covers = target.is_contiguous() and target.numel() * target.element_size() == written.memory.num_bytes
    if not covers or sum(view.memory is written.memory for view in views_in(views)) > 1:
        return views
    fresh = replace(written, write=None)

    def forget(value: object) -> object:
        return fresh if isinstance(value, View) and value.memory is written.memory else value

    return map_leaves(forget, views[0]), map_leaves(forget, views[1])


def _result_like(func: OpOverload, real: object, args: Args, kwargs: Kwargs) -> object:
    """Return deferred tensors with the shapes of computed results; a result that is an argument stays that argument."""
    if not isinstance(real, (Tensor, list, tuple)):
        return real
    written = iter(_written(func, args, kwargs))
    results = [real] if isinstance(real, Tensor) else list(real)
    returns = func._schema.returns
    of_arguments = [len(returns) == len(results) and one.alias_info is not None for one in returns]
    of_arguments += [False] * (len(results) - len(of_arguments))
    like = [
        next(written) if is_argument else torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=META)
        for one, is_argument in zip(results, of_arguments, strict=True)
    ]
    return like[0] if isinstance(real, Tensor) else type(real)(like)


def _rng_state(kwargs: Kwargs) -> Tensor:
    generator = kwargs.get("generator")
    return torch.get_rng_state() if generator is None else generator.get_state()


def _device_of(kwargs: Kwargs) -> Kwargs:
    return {"device": kwargs["device"]} if "device" in kwargs else {}


# --- about operations -------------------------------------------------------------------------------------------------


def _makes_tensor(func: OpOverload, tensors: Sequence[Tensor], args: Args, kwargs: Kwargs) -> bool:
    """Return whether this creates a tensor without tensor arguments, or one like a tensor that has no values."""
    device = kwargs.get("device")
    if not _takes_device(func) or (device is not None and device.type == "meta"):
        return False
    if not tensors:
        # torch.load and deepcopy create an empty tensor first, and then set its storage to one with values.
        return not (_name(func) == "empty" and 0 in args[0])
    return device is not None and _is_like(_name(func)) and all(_is_plain_meta(tensor) for tensor in tensors)


def _is_like(name: str) -> bool:
    return name.endswith("_like") or name.startswith("new_")


def _is_plain_meta(tensor: Tensor) -> bool:
    # For deferred tensors, Functions replaces the device of an operation's argument.
    return tensor.is_meta and not is_deferred(tensor)


def _refuse_plain_meta(func: object, values: object) -> None:
    if not _is_like(_name(func)) and any(_is_plain_meta(tensor) for tensor in tensors_in(values)):
        raise ModuleError(
            f"Expected a tensor with values for {_name(func)} at {users_line()}, got one on the meta device.",
            fix="remove device='meta' within init_module and configure_model; modules built there take no memory.",
        )


def _refuse_storage(func: object, args: Args) -> None:
    if any(isinstance(value, torch.UntypedStorage) and value.device.type != "meta" for value in args):
        raise ModuleError(
            f"{_name(func)} at {users_line()} sets a storage with values on a new tensor without values, which is not "
            "supported within init_module and configure_model.",
            fix="use tensor.copy_(), or build this part of the model outside of init_module and configure_model.",
        )


@cache
def _name(func: OpOverload) -> str:
    name: str = func._schema.name.rpartition("::")[2]
    return name


@cache
def _takes_device(func: OpOverload) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


@cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write)


def _written(func: OpOverload, args: Args, kwargs: Kwargs) -> list[Tensor]:
    values = [args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(func)]
    return list(tensors_in(values))
