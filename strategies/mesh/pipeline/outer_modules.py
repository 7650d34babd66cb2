"""Modules beside the blocks: which stage has them, and what runs in their place on the others.

What forward calls before the blocks belongs to the first stage, and what it calls after them to the last one. A module
before the blocks returns NaN of the right shape on all stages but the first, so that a value that bypasses the
split becomes a loss of NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ....errors import ModuleError
from ....protocols import AnyOutput, Args, Kwargs, Tree
from ...tree import leaves, map_leaves
from .call_order import called_before

if TYPE_CHECKING:
    from .block_calls import Position
    from .blocks import StagePlan

# Any in this file: arguments and results of the user's modules.

_PLAIN = (bool, int, float, str, type(None))
_MOST_RESULTS = 64  # of one module: shapes of batches may never repeat


def outer_modules_of(module: nn.Module, plan: StagePlan) -> Iterator[tuple[str, tuple[nn.Module, bool]]]:
    """Yield modules beside the blocks that have parameters, and whether they belong before the blocks.

    The source of forward says whether it calls a module before or after them; where it does not, the order of
    registration does.
    """
    path = plan.list.split(".") if plan.list else []
    start = len(plan.child.split(".")) if plan.child else 0
    for depth in range(start, len(path)):
        prefix = ".".join(path[:depth])
        is_before = True
        parent = module.get_submodule(prefix)
        called = called_before(type(parent), path[depth])
        for key, child in parent.named_children():
            if key == path[depth]:
                is_before = False
            elif any(True for _ in child.parameters()):
                name = f"{prefix}.{key}" if prefix else key
                yield from _callable(name, child, is_before=called.get(key, is_before))


def _callable(name: str, module: nn.Module, *, is_before: bool) -> Iterator[tuple[str, tuple[nn.Module, bool]]]:
    """Yield a module, or in place of a container that is never called, its elements."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for key, child in module.named_children():
            if any(True for _ in child.parameters()):
                yield from _callable(f"{name}.{key}", child, is_before=is_before)
    else:
        yield name, (module, is_before)


def place(
    outer: nn.Module,
    name: str,
    *,
    is_before: bool,
    is_own: bool,
    at: Position,
    twin: tuple[nn.Module, Any] | None,
) -> None:
    """Put a `OuterCall` into a module and into those in it, which may be called on their own."""
    for inner, one in outer.named_modules():
        if not any(True for _ in one.parameters()) or "_call_impl" in one.__dict__:
            continue
        path = f"{name}.{inner}" if inner else name
        call = OuterCall(one, path, is_before, is_own, at)
        if twin is not None:
            call.twin, call.mode = twin[0].get_submodule(inner), twin[1]
        one.__dict__["_call_impl"] = call


def make_twins(
    outer_modules: dict[str, tuple[nn.Module, bool]], device: torch.device | None
) -> dict[str, tuple[nn.Module, Any]]:
    """Return copies of the modules before the blocks whose tensors are fake: they have shapes and no memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    made = {}
    for name, (outer, is_before) in outer_modules.items():
        if not is_before:
            continue
        for one in [*outer.parameters(), *outer.buffers()]:
            if id(one) not in memo:
                with mode:
                    where = device if device is not None else one.device
                    fake = torch.empty(one.shape, dtype=one.dtype, device=where)
                memo[id(one)] = nn.Parameter(fake, one.requires_grad) if isinstance(one, nn.Parameter) else fake
        try:
            made[name] = (copy.deepcopy(outer, memo), mode)
        except Exception as error:
            raise ModuleError(
                f"{name} cannot be copied, which stages after the first need to know its shapes: "
                f"{type(error).__name__}: {error}.",
                fix="keep what cannot be copied outside of modules before the blocks.",
            ) from error
    return made


@dataclass(eq=False)
class OuterCall:
    """The place of a module beside the blocks: `module._call_impl`.

    Attributes:
        module: The module.
        name: Its name in the user's module.
        is_before: Whether it belongs before the blocks, and so to the first stage; else to the last.
        is_own: Whether this rank has its parameters.
        at: Where the present step is.
        twin: A copy with fake tensors, which knows the shapes of results; None after the blocks.
        mode: The mode of these tensors.
        results: Results of the twin, by the shapes of its arguments: they are computed once, not in each step.
    """

    module: nn.Module
    name: str
    is_before: bool
    is_own: bool
    at: Position
    twin: nn.Module | None = field(default=None, repr=False)
    mode: FakeTensorMode | None = field(default=None, repr=False)
    results: dict[object, Any] = field(default_factory=dict, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Run the module on its stage; elsewhere return NaN of the right shapes.

        Raises:
            ModuleError: It is called on the other side of the blocks than where it was placed.
        """
        at = self.at
        if at.unsplit is not None:
            return at.unsplit.outer(self, args, kwargs)
        if at.stage is None:
            if self.is_own:
                return nn.Module._call_impl(self.module, *args, **kwargs)
            raise at.outside(self.name)
        if self.is_before == at.is_past:
            placed, called = ("before", "after") if self.is_before else ("after", "before")
            raise ModuleError(
                f"{self.name} was placed {placed} the blocks of the pipeline, as forward's source or the order of "
                f"registration says, and is called {called} the first of them that stage {at.stage} has.",
                fix=f"register modules in the order in which forward calls them, and call {at.called} once in a step; "
                "or name the submodule that has the blocks in Pipeline(module=...): what is outside of it is on every "
                "stage.",
            )
        if not self.is_before or at.received is None:
            assert at.states is not None
            with nullcontext() if at.numbers is None else at.numbers.beside(self.name):
                return at.states.run_once(self.module, lambda: nn.Module._call_impl(self.module, *args, **kwargs))
        return self._shaped(args, kwargs)

    def _shaped(self, args: Args, kwargs: Kwargs) -> AnyOutput:
        """Return NaN in the shapes of what the module would return."""
        key = _shapes_of(args, kwargs)
        known = None if key is None else self.results.get(key)
        if known is None:
            known = map_leaves(self._output_of_twin(args, kwargs), self._absent)
            if key is not None and all(one.__class__ in (_Absent, *_PLAIN) for _, one in leaves(known)):
                if len(self.results) >= _MOST_RESULTS:
                    self.results.clear()
                self.results[key] = known
        return map_leaves(known, _nan)

    def _output_of_twin(self, args: Args, kwargs: Kwargs) -> AnyOutput:
        mode, twin = self.mode, self.twin
        assert mode is not None
        assert twin is not None

        def fake(value: Tree) -> Tree:
            return mode.from_tensor(value.detach()) if isinstance(value, Tensor) else value

        with mode, torch.no_grad():
            return twin(*map_leaves(args, fake), **map_leaves(kwargs, fake))

    def _absent(self, value: Tree) -> Tree:
        if not isinstance(value, Tensor):
            return value
        if not (value.is_floating_point() or value.is_complex()):
            raise ModuleError(
                f"{self.name} returns a tensor of {value.dtype}, which stages after the first do not have: only "
                "floating-point values can be marked as absent.",
                fix="compute it from the batch without this module's parameters, or after the blocks; or name a "
                "smaller part of the model in Pipeline(module=...): what is outside of it runs on every stage.",
            )
        return _Absent(value)


class _Absent:
    """Shape, dtype and device of a tensor that another stage has."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device


def _nan(value: Tree) -> Tree:
    if value.__class__ is not _Absent:
        return value
    return torch.full(value.shape, torch.nan, dtype=value.dtype, device=value.device)


def _shapes_of(args: Args, kwargs: Kwargs) -> object:
    """Return what the shapes of a module's results follow from; None where its arguments do not say.

    Under autocast, the dtypes of results also depend on autocast's.
    """
    found: list[object] = []
    kinds = set()
    # Most modules get tensors only: `leaves` would add nothing.
    is_flat = not kwargs and all(value.__class__ is Tensor for value in args)
    for path, value in enumerate(args) if is_flat else leaves((args, kwargs)):
        if isinstance(value, Tensor):
            kinds.add(value.device.type)
            found.append((path, type(value), value.shape, value.dtype, value.device))
        elif value.__class__ in _PLAIN:
            found.append((path, type(value), value))
        else:
            return None
    if not kinds:
        return None
    found += [(kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]
    return tuple(found)
