"""A split of one group of layers, computed in one process rank by rank and compared with the full module.

All ranks but the first run until the layer that sums. The first one gets the sum there, and runs to the end. Gradients
meet in one graph, so that they are those of real ranks.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ....protocols import AnyOutput, Args, Kwargs
from ...tree import leaves
from .copies import copy_with, make_arguments
from .graph import LinearGroup
from .heads import copies_of, local_counts
from .styles import features, is_linear

# Any in this file: results of the user's modules.

_TOLERANCE = 1e-8  # as a share of the largest value, in float64


class _Stop(Exception):
    """Ends the pass of a rank at the layer that sums."""


def group_problem(module: nn.Module, group: LinearGroup, tp: int) -> str | None:
    """Return why a group cannot be split over `tp` ranks, as the end of a sentence; None if it can.

    Args:
        module: The module that holds the group; nothing of it is changed.
        group: Names of its layers.
        tp: Number of ranks.
    """
    values = _Values()
    whole = copy_with(module, values)
    sizes = {name: _weight(whole, name).shape[_dim(whole, name, group)] for name in (*group.sources, group.sink)}
    parts = {name: tp // _copies(module, name, tp) if name in group.sources else tp for name in sizes}
    uneven = [f"{name} has {size} features" for name, size in sizes.items() if size % parts[name]]
    if uneven:
        return f"{uneven[0]}, which tp={tp} does not divide"
    made = make_arguments(module, "cpu", torch.float64)
    assert made is not None
    args, kwargs = made
    try:
        wanted, wanted_x = _gradients(whole, whole(*args, **kwargs), args[0])
        own, own_x = _simulate(module, group, tp, values, args, kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
        return f"its forward fails on a part: {str(error).splitlines()[0][:120]}"
    of_input = "the gradient of its input"
    pairs = {name: (one, own.get(name)) for name, one in wanted.items()}
    if wanted_x is not None:
        pairs[of_input] = (wanted_x, own_x)
    # A gradient that is 0 but for rounding (of a bias of keys, say) is compared with the largest.
    scale = max(float(one.detach().abs().max()) for one, _ in pairs.values() if one.numel())
    wrong = [name for name, (one, other) in pairs.items() if other is None or _differs(one, other, scale)]
    return f"it computes something else in parts (seen in {wrong[0]})" if wrong else None


class _Values:
    """Random parameters in float64, the same for the same name."""

    def __init__(self) -> None:
        self.made: dict[str, Tensor] = {}

    def __call__(self, name: str, like: Tensor) -> Tensor:
        if name not in self.made:
            generator = torch.Generator().manual_seed(len(self.made))
            if not isinstance(like, nn.Parameter):
                is_empty = like.is_meta or isinstance(like, FakeTensor)
                self.made[name] = torch.ones(like.shape, dtype=like.dtype) if is_empty else like.detach().cpu()
                if like.is_floating_point():
                    self.made[name] = self.made[name].double()
            else:
                width = like.shape[-1] if like.ndim else 1
                self.made[name] = torch.randn(like.shape, generator=generator, dtype=torch.float64) / width**0.5
        return self.made[name].clone()


def _simulate(
    module: nn.Module, group: LinearGroup, tp: int, values: _Values, args: Args, kwargs: Kwargs
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return outputs and gradients of a split module, under full names."""
    partial: list[Tensor] = []
    ranks = [_rank(module, group, tp, rank, values) for rank in range(tp)]
    for copied in ranks[1:]:

        def stop(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            partial.append(output)
            raise _Stop

        copied.get_submodule(group.sink).register_forward_hook(stop)
        with suppress(_Stop):
            copied(*args, **kwargs)
    bias = None
    if getattr(module.get_submodule(group.sink), "bias", None) is not None:
        name = f"{group.sink}.bias"
        bias = values(name, module.get_parameter(name)).requires_grad_()

    sums: list[Tensor] = []

    def total(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        result = sum(partial, start=output)
        sums.append(result if bias is None else result + bias)
        return sums[0]

    ranks[0].get_submodule(group.sink).register_forward_hook(total)
    output = ranks[0](*args, **kwargs)
    for copied in ranks[1:]:  # each rank must have the full result
        sink = copied.get_submodule(group.sink)
        sink._forward_hooks.clear()
        sink.register_forward_hook(lambda layer, inputs, own: sums[0])
        for one, other in zip(_outputs(output).values(), _outputs(copied(*args, **kwargs)).values(), strict=True):
            if _differs(one, other, float(one.detach().abs().max())):
                raise ValueError("ranks get different outputs")
    named = [dict(one.named_parameters()) for one in ranks]
    flat = [one for each in named for one in each.values()] + ([bias] if bias is not None else [])
    found, of_x = _outputs(output), args[0]
    gradients = torch.autograd.grad(_score(found), [of_x, *flat], allow_unused=True)
    result: dict[str, Tensor] = dict(found)
    for one, gradient in zip(flat, gradients[1:], strict=True):
        if gradient is None:
            continue
        rank, name = next(
            ((rank, name) for rank, each in enumerate(named) for name, two in each.items() if two is one),
            (0, f"{group.sink}.bias"),
        )
        owner, _, short = name.rpartition(".")
        dim = _dim(module, owner, group) if owner in (*group.sources, group.sink) else None
        if owner == group.sink and short == "bias" and one is not bias:
            continue  # it stands for none
        if dim is None or (short == "bias" and owner == group.sink):
            result[name] = result[name] + gradient if name in result else gradient
            continue
        full = result.setdefault(name, torch.zeros(module.get_parameter(name).shape, dtype=torch.float64))
        copies = _copies(module, owner, tp) if owner in group.sources else 1
        full.chunk(tp // copies, dim if short == "weight" else 0)[rank // copies].add_(gradient)
    return result, gradients[0]


def _rank(module: nn.Module, group: LinearGroup, tp: int, rank: int, values: _Values) -> nn.Module:
    """Return a copy of the module with one rank's parts."""

    def part(name: str, like: Tensor) -> Tensor:
        value = values(name, like)
        owner, _, short = name.rpartition(".")
        if owner in group.sources:
            copies = _copies(module, owner, tp)
            return value.chunk(tp // copies, _dim(module, owner, group) if short == "weight" else 0)[
                rank // copies
            ].clone()
        if owner == group.sink:
            return value.chunk(tp, _dim(module, owner, group))[rank].clone() if short == "weight" else value * 0
        return value

    copied = copy_with(module, part)
    layers: dict[str, list[str]] = {}
    for name in group.sources:
        layers.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
    for owner, split in layers.items():
        for count, local in local_counts(copied.get_submodule(owner), split, tp).items():
            setattr(copied.get_submodule(owner), count, local)
    for name in group.sources:
        layer: Any = copied.get_submodule(name)
        if hasattr(layer, "nf"):
            layer.nf //= tp // _copies(module, name, tp)
    return copied


def _dim(module: nn.Module, name: str, group: LinearGroup) -> int:
    layer = module.get_submodule(name)
    assert is_linear(layer)
    out = 0 if isinstance(layer, nn.Linear) else 1
    return 1 - out if name == group.sink else out


def _copies(module: nn.Module, name: str, tp: int) -> int:
    owner, _, short = name.rpartition(".")
    return copies_of(module.get_submodule(owner), short, features(module.get_submodule(name))[0], tp)


def _weight(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(f"{name}.weight")


def _gradients(module: nn.Module, output: AnyOutput, x: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    found, named = _outputs(output), dict(module.named_parameters())
    gradients = torch.autograd.grad(_score(found), [x, *named.values()], allow_unused=True)
    result = dict(found)
    result.update({name: one for name, one in zip(named, gradients[1:], strict=True) if one is not None})
    return result, gradients[0]


def _outputs(output: AnyOutput) -> dict[str, Tensor]:
    tensors = [one for _, one in leaves(output) if isinstance(one, Tensor) and one.is_floating_point()]
    return {f"output {at}": one for at, one in enumerate(tensors)}


def _score(outputs: dict[str, Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    parts = [(one * torch.randn(one.shape, generator=generator, dtype=one.dtype)).sum() for one in outputs.values()]
    return torch.stack(parts).sum()


def _differs(one: Tensor, other: Tensor, scale: float) -> bool:
    if one.shape != other.shape:
        return True
    return bool(one.numel()) and not float((one - other).detach().abs().max()) <= _TOLERANCE * scale
