"""Attributes and buffers of modules that a step changes: restored after a rehearsal, and separate for stages of a rank.

A rank with two stages runs the step once for each. What the step changes would change twice: counters, running means,
metrics. The last of the stages, whose step goes furthest, changes the module; each other one has its copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....protocols import AnyOutput, Tree

if TYPE_CHECKING:
    from collections.abc import Callable

# Any in this file: attributes of the user's modules.

Bindings = dict[nn.Module, tuple[dict[str, Any], dict[str, Tensor | None]]]
"""Attributes and buffers by module."""

_OF_TORCH = frozenset(nn.Module().__dict__)
_OWN = ("_lw_", "_loopwright_")
"""Beginnings of attributes that are ours."""


class StageStates:
    """What steps of the stages of one rank change beside their results; nothing happens where there is one stage.

    Tensors, numbers, strings and generators in attributes are copied, and lists, dicts and sets with the tensors in
    dicts. Blocks are not: each runs in one stage only.

    Args:
        module: The user's module.
        blocks: The blocks of all stages.
    """

    def __init__(self, module: nn.Module, blocks: Iterable[nn.Module]) -> None:
        inner = {one for block in blocks for one in block.modules()}
        self._modules = [one for one in module.modules() if one not in inner]
        self._copies: dict[int, Bindings] = {}  # by stage, between its runs
        self._replaced: Bindings = {}  # what the running stage has copies of

    @contextmanager
    def window(self, stages: Sequence[int]) -> Iterator[None]:
        """Return a context in which these stages run, the last of them on the module as it is."""
        if len(stages) > 1:
            self._copies = {stage: _copies_of(_bindings_of(self._modules)) for stage in stages[:-1]}
        try:
            yield
        finally:
            self._copies = {}

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """Return a context in which the module has what this stage has left."""
        if stage not in self._copies:
            yield
            return
        self._replaced = _bindings_of(self._modules)
        _bind(self._copies[stage])
        try:
            yield
        finally:
            self._copies[stage] = _bindings_of(self._modules)
            _bind(self._replaced)
            self._replaced = {}

    def run_once(self, module: nn.Module, run: Callable[[], Any]) -> AnyOutput:
        """Run a module beside the blocks that no other stage runs: it changes the module itself."""
        if not self._replaced:
            return run()
        inner = list(module.modules())
        mine = _bindings_of(inner)
        _bind({one: self._replaced[one] for one in inner})
        try:
            return run()
        finally:
            self._replaced.update(_bindings_of(inner))
            _bind(mine)


def _bindings_of(modules: Iterable[nn.Module]) -> Bindings:
    return {
        one: ({key: value for key, value in one.__dict__.items() if _can_change(key, value)}, dict(one._buffers))
        for one in modules
    }


def _bind(bindings: Bindings) -> None:
    for one, (values, buffers) in bindings.items():
        for key, value in list(one.__dict__.items()):
            if key not in values and _can_change(key, value):
                del one.__dict__[key]
        one.__dict__.update(values)
        one._buffers.clear()
        one._buffers.update(buffers)


def _copies_of(bindings: Bindings) -> Bindings:
    """Return copies; what is bound twice is one copy."""
    known: dict[int, Any] = {}

    def copied(value: Tree) -> Any:
        if id(value) not in known:
            known[id(value)] = _copied(value)
        return known[id(value)]

    return {
        one: (
            {key: copied(value) for key, value in values.items()},
            {key: copied(value) for key, value in buffers.items()},
        )
        for one, (values, buffers) in bindings.items()
    }


def _copied(value: Tree) -> Tree:
    if isinstance(value, Tensor):
        return value if value.is_meta or value.requires_grad else value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, dict):
        copy = value.copy()
        copy.update({key: _copied(item) for key, item in value.items() if isinstance(item, Tensor)})
        return copy
    return value.copy() if isinstance(value, list | set) else value


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Return a context after which attributes and buffers of all submodules are as before: metrics, counts, norms."""
    before = _bindings_of(module.modules())
    contents = [
        (value, _content(value))
        for values, buffers in before.values()
        for value in (*values.values(), *(one for one in buffers.values() if one is not None))
    ]
    try:
        yield
    finally:
        _bind(before)
        for value, content in contents:
            _put_back(value, content)


def _can_change(key: str, value: object) -> bool:
    """Return whether an attribute has a value that can be copied, and is the user's."""
    return (
        key not in _OF_TORCH
        and not key.startswith(_OWN)
        and (
            value is None
            or isinstance(value, Tensor | bool | int | float | str | list | dict | set | tuple | torch.Generator)
        )
    )


def _content(value: Tree) -> Tree:
    if isinstance(value, Tensor):
        return None if value.is_meta else value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.copy() if isinstance(value, list | dict | set) else None


def _put_back(value: Tree, content: Any) -> None:
    if content is None:
        return
    if isinstance(value, Tensor):
        with torch.no_grad():
            if not torch.equal(value, content):  # else a backward pass may need it untouched
                value.copy_(content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, list):
        value[:] = content
    elif isinstance(value, dict | set):
        value.clear()
        value.update(content)
