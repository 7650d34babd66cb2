"""Sequence parallelism: between its split layers, a block computes on this rank's part of the sequence.

The first of a list of blocks takes a part of its input along dimension 1, and the last one gathers its output. Within a
block, norms and dropouts see parts. A group of split layers (attention, MLP) gathers its input, and its sum over ranks
leaves each rank its part. Any other module of a block sees the full sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from ....protocols import AnyOutput, Args, Call, Kwargs
from .layouts import convert, split, unviewed
from .style import map_first, map_output
from .styles import Rowwise

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from .plan import TensorPlan

# Any in this file: arguments and results of the user's modules.

_TOKEN_WISE = ("norm", "dropout", "droppath", "identity")
_NOT_TOKEN_WISE = ("batchnorm", "instancenorm", "groupnorm")


def set_sequence_parallel(module: nn.Module, plan: TensorPlan) -> list[tuple[str, str]]:
    """Note in a plan which modules see a part of the sequence, and return what is wrong.

    Args:
        module: The user's module.
        plan: With its styles and groups; gets `sequence`, `partial`, `takes_shards` and `gives_shards`.
    """
    takes: set[str] = set()
    gives: set[str] = set()
    found: list[str] = []
    for name, blocks in module.named_modules():
        if not isinstance(blocks, nn.ModuleList) or any(_is_in(name, one) for one in found):
            continue
        names = [f"{name}.{index}".lstrip(".") for index in range(len(blocks))]
        if not names or not all(any(_is_in(group, one) for group in plan.groups) for one in names):
            continue
        found += names
        for one in names:
            _walk(module, plan, one, takes, gives)
            if one != names[0]:
                takes.add(one)
            if one != names[-1]:
                gives.add(one)
        plan.sequence[names[0]] = ("split", plan.sequence.get(names[0], ("", ""))[1])
        plan.sequence[names[-1]] = (plan.sequence.get(names[-1], ("", ""))[0], "gather")
    if not found:
        what = (
            "sequence_parallel=True needs blocks in a ModuleList, each with split layers in submodules; there are none"
        )
        return [(what, "leave it out, or split the attention and MLP of each block")]
    plan.groups = (*plan.groups, *found)
    plan.takes_shards, plan.gives_shards = frozenset(takes), frozenset(gives)
    return []


def _walk(module: nn.Module, plan: TensorPlan, name: str, takes: set[str], gives: set[str]) -> None:
    """Note what the children of a module that sees a part of the sequence do with it."""
    plan.partial.add(name)
    for short, child in module.get_submodule(name).named_children():
        one = f"{name}.{short}"
        if one in plan.groups and one not in plan.styles:
            plan.sequence[one] = ("gather", "")
            takes.add(one)
            gives.add(one)
            for layer, style in plan.styles.items():
                if isinstance(style, Rowwise) and _is_in(layer, one):
                    plan.styles[layer] = replace(style, scatters=True)
        elif any(_is_in(group, one) for group in plan.groups) and one not in plan.styles:
            _walk(module, plan, one, takes, gives)
        elif _is_token_wise(child) and one not in plan.styles:
            plan.partial.update(f"{one}.{inner}".rstrip(".") for inner, _ in child.named_modules())
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
            plan.sequence[one] = ("gather", "split")


def _is_token_wise(module: nn.Module) -> bool:
    if type(module).__module__ == "torch.nn.modules.activation":
        return not isinstance(module, nn.MultiheadAttention)
    name = type(module).__name__.lower()
    return any(one in name for one in _TOKEN_WISE) and not any(one in name for one in _NOT_TOKEN_WISE)


def _is_in(name: str, above: str) -> bool:
    return name.startswith(f"{above}.")


class OnSequence:
    """The hooks of a module whose input or output changes between the full sequence and this rank's part.

    Args:
        change: What happens to the first tensor of the input, and of the output: "split", "gather", or "".
        mesh: The ranks.
    """

    def __init__(self, change: tuple[str, str], mesh: DeviceMesh) -> None:
        self.change = change
        self.mesh = mesh

    def __deepcopy__(self, memo: dict[int, object]) -> OnSequence:
        return self  # process groups cannot be copied

    def before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Call:
        """Change the input."""
        return map_first(args, kwargs, lambda x: self._changed(x, self.change[0]))

    def after(self, module: nn.Module, args: Args, output: AnyOutput) -> AnyOutput:
        """Change the output."""
        return map_output(output, lambda x: unviewed(self._changed(x, self.change[1]), module))

    def _changed(self, x: Tensor, how: str) -> Tensor:
        if how == "split":
            return split(x, self.mesh, 1)
        return convert(x, self.mesh, Shard(1), Replicate()) if how else x
