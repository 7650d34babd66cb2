"""`TensorPlan`: which module is computed in which style on the ranks of tensor parallelism."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel.style import ParallelStyle

from ....errors import Clauses
from .adapters import base_of, called_as, expand_adapters
from .heads import copies_of, head_problem, is_query, key_layers, local_counts, packed_parts
from .names import STYLES
from .sequence import set_sequence_parallel
from .sources import find_styles, names_styles
from .style import Style
from .styles import Colwise, Embedding, PackedColwise, features, is_linear
from .tied import Tied, find_tied

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

logger = logging.getLogger(__name__)


@dataclass
class TensorPlan:
    """The result of `resolve_plan`. Names are relative to the root module.

    Attributes:
        tp: Number of ranks.
        source: Where the styles come from, for messages.
        styles: The style of each module that has one.
        tied: Parameters with several names.
        counts: By module: attributes that count heads, each as (full number, number on a rank).
        groups: Modules whose outputs must be those of one process: each holds layers that are split by output features
            and the one that sums them; or it is a layer whose output is full.
        loss_parallel: Whether the loss is computed from a part of the logits on each rank.
        notes: What the user should know, as sentences.
        mesh: The ranks, after `apply`.
        takes_shards: Groups whose input is this rank's part of the sequence.
        gives_shards: Groups whose output is.
        sequence: By module: what happens along the sequence to its input, and to its output.
        partial: Modules whose own parameters each rank uses with its part of the sequence.
    """

    tp: int
    source: str = "tensor_plan"
    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    tied: Tied = field(default_factory=Tied)
    counts: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    loss_parallel: bool = False
    notes: list[str] = field(default_factory=list)
    mesh: DeviceMesh | None = None
    takes_shards: frozenset[str] = frozenset()
    gives_shards: frozenset[str] = frozenset()
    sequence: dict[str, tuple[str, str]] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)

    def placement(self, root: nn.Module, name: str) -> Placement:
        """Return the placement of a parameter, by its full name, over the ranks of this plan."""
        owner, _, short = name.rpartition(".")
        style = self.styles.get(owner)
        if not isinstance(style, Style):
            return Replicate()
        return style.placements(root.get_submodule(owner)).get(short, Replicate())

    def __str__(self) -> str:
        lines = [f"  {name}: {shown(style)}" for name, style in self.styles.items()]
        return "\n".join([f"tensor plan of {self.source}, tp={self.tp}:", *lines])


def resolve_plan(
    module: nn.Module,
    wanted: object = "auto",
    *,
    tp: int,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> TensorPlan:
    """Return the plan of a module, from names and shapes. Does not communicate; equal on all ranks.

    Args:
        module: The user's module, on any device.
        wanted: `tensor_plan=`: a dict of patterns and styles, or "auto".
        tp: Number of ranks.
        sequence_parallel: Whether norms and sums between blocks are computed on a part of the sequence.
        loss_parallel: Whether the loss is computed from a part of the logits.

    Raises:
        ConfigError: The plan does not fit the module; names every problem.
    """
    found = find_styles(module, wanted, tp)
    plan = TensorPlan(tp, found.source, found.styles, notes=found.notes)
    problems = Clauses([*found.problems, *expand_adapters(module, plan.styles)])
    plan.tied = find_tied(module, plan.styles, plan.notes, problems, tp)
    problems += _set_heads(module, plan)
    problems += _misfits(module, plan)
    plan.groups = tuple(_groups(plan, problems))
    if sequence_parallel:
        problems += set_sequence_parallel(module, plan)
    if loss_parallel:
        problems += _keep_parts_of_logits(plan)
    problems.refuse()
    return plan


def check_plan(module: nn.Module, wanted: object = "auto", *, tp: int, **options: bool) -> None:
    """Refuse a plan that does not fit a module, where names and shapes say so. Does not communicate.

    A plan of the graph is not searched for: that takes as long as passes through all kinds of blocks.

    Args:
        module: See `resolve_plan`.
        wanted: See there.
        tp: See there.
        options: Its further arguments.

    Raises:
        ConfigError: As `resolve_plan`.
    """
    if names_styles(module, wanted):
        resolve_plan(module, wanted, tp=tp, **options)


def _misfits(module: nn.Module, plan: TensorPlan) -> Clauses:
    problems = Clauses()
    for name, style in plan.styles.items():
        problem = style.problem(module.get_submodule(name), plan.tp) if isinstance(style, Style) else None
        if problem is not None:
            problems.add(f"{name} {problem}", "choose another tp, or another style for it, or leave it out of the plan")
    return problems


def _set_heads(module: nn.Module, plan: TensorPlan) -> Clauses:
    """Note attributes that count heads, and return layers whose heads cannot be divided.

    Where there are more ranks than heads of keys, ranks share them: their layers get a style with copies.
    """
    problems = Clauses()
    layers: dict[str, list[str]] = {}
    for name, style in plan.styles.items():
        layer, (above, _, short) = module.get_submodule(name), called_as(name).rpartition(".")
        if not (isinstance(style, Style) and style.has_sharded_output and is_linear(layer)):
            continue
        layers.setdefault(above, []).append(short)
        owner, size = module.get_submodule(above), features(layer)[0]
        if isinstance(style, PackedColwise):
            if style.parts is None:
                plan.styles[name] = PackedColwise(*packed_parts(owner, short, size, plan.tp))
            continue
        problem = head_problem(owner, called_as(name), size, plan.tp)
        if problem is not None:
            problems.add(problem, "choose one of these for tp")
        copies = copies_of(owner, short, size, plan.tp)
        if copies > 1:
            plan.styles[name] = PackedColwise((size,), (copies,))
    for above, split in layers.items():
        owner = module.get_submodule(above)
        problems += [*_share_keys(plan, owner, above, split), *expand_adapters(module, plan.styles)]
        counts = local_counts(owner, split, plan.tp)
        if counts:
            plan.counts[above] = {one: (getattr(owner, one), local) for one, local in counts.items()}
    return problems


def _share_keys(plan: TensorPlan, owner: nn.Module, above: str, split: list[str]) -> Clauses:
    """Let all ranks compute the only head of keys where the plan splits queries alone; return what it forgets."""
    problems = Clauses()
    for short in key_layers(owner) if any(is_query(one) for one in split) else ():
        layer, name = base_of(owner.get_submodule(short)), f"{above}.{short}".lstrip(".")
        if short in split or not is_linear(layer):
            continue
        size = features(layer)[0]
        if copies_of(owner, short, size, plan.tp) == plan.tp:
            plan.styles[name] = PackedColwise((size,), (plan.tp,))
        else:
            what = f"{name} is full, and the queries beside it are split: a rank's heads would get the keys of others"
            problems.add(what, "choose the style 'colwise' for it too, or leave out the queries")
    return problems


def _groups(plan: TensorPlan, problems: Clauses) -> list[str]:
    """Return the names of the modules that hold layers which belong together, and note layers without a partner."""
    styles = {name: style for name, style in plan.styles.items() if isinstance(style, Style)}
    gives = [name for name, style in styles.items() if style.has_sharded_output]
    takes = [name for name, style in styles.items() if style.takes_sharded_input]
    alone = [name for name, style in styles.items() if isinstance(style, Colwise | Embedding)]
    foreign = len(styles) < len(plan.styles)  # torch's styles: whatever they give or take
    above_gives = {name: _above_both(name, takes) for name in gives}
    above_takes = {name: _above_both(name, gives) for name in takes}
    groups: dict[str, None] = {}
    for own, others, says in ((above_gives, above_takes, "rowwise"), (above_takes, above_gives, "colwise")):
        for name, group in own.items():
            # A partner that is nearer to another layer belongs to that one.
            if group is not None and any(_is_in(one, group) and above == group for one, above in others.items()):
                groups[group] = None
            elif not foreign:
                what = f"{name} has {shown(styles[name])!r}, and no layer of the plan has {says!r} to go with it"
                problems.add(what, "name both, or write 'colwise_gather_output' or 'rowwise_split_input'")
    groups.update(dict.fromkeys(name for name in alone if name not in gives))
    return list(groups)


def _above_both(name: str, partners: list[str]) -> str | None:
    """Return the nearest module above `name` that one of the partners is below, too."""
    above = name
    while above:
        above = above.rpartition(".")[0]
        if any(_is_in(one, above) for one in partners):
            return above
    return None


def _is_in(name: str, above: str) -> bool:
    return not above or name.startswith(f"{above}.")


def _keep_parts_of_logits(plan: TensorPlan) -> list[tuple[str, str]]:
    heads = [name for name, one in plan.styles.items() if isinstance(one, Colwise) and one.is_gathered]
    if not heads:
        what = "loss_parallel=True needs a last layer with the style 'colwise_gather_output', and the plan has none"
        return [(what, "choose it for the layer that computes the logits, or leave out loss_parallel=True")]
    plan.loss_parallel = True
    plan.styles[heads[-1]] = Colwise(keeps_dtensor=True)
    return []


def shown(style: ParallelStyle) -> str:
    """Return the name of a style, or what it looks like."""
    for name, make in STYLES.items():
        one = make()
        if type(one) is type(style) and vars(one) == vars(style):
            return name
    return repr(style)
