"""Which Linear layers of a module feed which others, read from the autograd graph of one pass on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....protocols import AnyFunction, Args, Kwargs
from .copies import copy_with, make_arguments
from .styles import is_linear

if TYPE_CHECKING:
    from ...autograd import AutogradContext

# Any in this file: nodes of the graph, and what functions of torch take and return.

# What values that are split by features, or by heads, may pass through; numbers decide afterwards.
_PASSES = (
    "Gelu", "Silu", "Relu", "Mul", "Add", "Sub", "Neg", "View", "UnsafeView", "Transpose", "Reshape", "Clone", "Expand",
    "Permute", "ScaledDotProduct", "Cat", "Split", "Slice", "Sigmoid", "Tanh", "Dropout", "NativeDropout", "Pow",
    "ToCopy", "Unsqueeze", "Squeeze", "Alias", "Hardswish", "Hardtanh", "LeakyRelu", "Elu", "Select", "Unbind", "T",
    "_Attention", "Softplus", "Mish",
)  # fmt: skip


@dataclass(frozen=True)
class LinearGroup:
    """Layers whose output features can be split, since they meet in one layer, whose input features are split.

    Attributes:
        sources: Names of the former.
        sink: Name of the latter.
    """

    sources: tuple[str, ...]
    sink: str


def linear_groups(module: nn.Module) -> list[LinearGroup]:
    """Return the groups of Linear layers of a module that one pass shows.

    Raises:
        Exception: Whatever the module's forward raises on arguments that were made up, or on the meta device.
    """
    made = make_arguments(module, "meta", torch.float32)
    if made is None:
        return []
    shell = copy_with(module, lambda _, one: torch.empty(one.shape, dtype=one.dtype, device="meta"))
    feeds, dirty = _edges(shell.float(), *made)
    sinks: dict[str, list[str]] = {}
    for source, targets in feeds.items():
        if len(targets) == 1 and not dirty[source]:
            sinks.setdefault(next(iter(targets)), []).append(source)
    groups: list[LinearGroup] = []
    used: set[str] = set()
    for sink, sources in sinks.items():
        if sink not in used and not used & set(sources):
            groups.append(LinearGroup(tuple(sources), sink))
            used |= {sink, *sources}
    return groups


def _edges(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return which layers each Linear layer reaches through what splits pass, and through anything else."""
    names = {one: name for name, one in module.named_modules() if is_linear(one)}
    feeds: dict[str, set[str]] = {name: set() for name in names.values()}
    dirty: dict[str, set[str]] = {name: set() for name in names.values()}
    made: dict[Any, str] = {}
    kept: list[Tensor] = []  # so that no other node gets the id of one

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen: set[Any] = set()
        todo: list[tuple[Any, bool]] = [(inputs[0].grad_fn, False)]
        while todo:
            node, is_dirty = todo.pop()
            if node is None or (node, is_dirty) in seen:
                continue
            seen.add((node, is_dirty))
            if node in made:
                (dirty if is_dirty else feeds)[made[node]].add(names[layer])
                continue
            blocks = is_dirty or not node.name().startswith(_PASSES)
            todo += [(further, blocks) for further, _ in node.next_functions]

    def after(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        marked: Tensor = _Mark.apply(output)  # type: ignore[no-untyped-call]
        made[marked.grad_fn] = names[layer]
        kept.append(marked)
        return marked

    for layer in names:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
    with torch.enable_grad(), _FusedAttention():
        module(*args, **kwargs)
    return feeds, dirty


class _Mark(torch.autograd.Function):
    """Its own node for each layer's output."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> Tensor:
        return gradient


class _Attention(torch.autograd.Function):
    """Attention as one node, with the shape of its result."""

    @staticmethod
    def forward(ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> Any:
        raise AssertionError("only the graph is read")


class _FusedAttention(TorchFunctionMode):
    """Lets attention be one node of the graph: on the meta device it is made of products and a softmax."""

    def __torch_function__(
        self, func: AnyFunction, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            return _Attention.apply(named["query"], named["key"], named["value"])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))
