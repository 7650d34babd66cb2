"""Tied parameters: one parameter with several names, such as an embedding that also computes the logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from .style import Style
from .styles import Colwise, Embedding, is_linear

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from ....errors import Clauses


@dataclass
class Tied:
    """The names of tied parameters.

    Attributes:
        first: The first name of each parameter that has several, by each of its names.
    """

    first: dict[str, str] = field(default_factory=dict)

    def groups(self) -> list[list[str]]:
        """Return the names of each tied parameter."""
        groups: dict[str, list[str]] = {}
        for name, first in self.first.items():
            groups.setdefault(first, []).append(name)
        return list(groups.values())


def find_tied(
    module: nn.Module, styles: dict[str, ParallelStyle], notes: list[str], problems: Clauses, tp: int
) -> Tied:
    """Return the tied parameters of a module, and choose styles with one placement for their modules.

    Args:
        module: The user's module.
        styles: By name; an embedding gets the style that fits its tied layer, and the reverse.
        notes: Gets a sentence for each style that is added or taken away.
        problems: Gets parameters whose modules have styles that do not fit each other.
        tp: Number of ranks.
    """
    names: dict[int, list[str]] = {}
    for name, one in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    tied = Tied()
    for group in names.values():
        if len(group) > 1:
            tied.first.update(dict.fromkeys(group, group[0]))
            _fit(module, group, styles, notes, problems, tp)
    return tied


def _fit(
    module: nn.Module,
    group: list[str],
    styles: dict[str, ParallelStyle],
    notes: list[str],
    problems: Clauses,
    tp: int,
) -> None:
    owners = [name.rpartition(".")[0] for name in group]
    if any(owner in styles and not isinstance(styles[owner], Style) for owner in owners):
        return  # torch's styles: compared when they are applied
    placements = {name: _placement(module, name, styles) for name in group}
    if len(set(placements.values())) == 1:
        return
    if set(placements.values()) == {Shard(0), Replicate()}:
        added = {owner: style for owner in owners if owner not in styles and (style := _style(module, owner, tp))}
        if all(owner in styles or owner in added for owner in owners):
            styles.update(added)
            named = next(owner for owner in owners if owner not in added)
            notes += [f"{owner} is split too: its weight is tied to that of {named}." for owner in added]
            return
    listed = ", ".join(f"{name} ({placement})" for name, placement in placements.items())
    problems.add(f"the tied parameters {listed} would be split differently", "choose styles that fit for both modules")


def _style(module: nn.Module, owner: str, tp: int) -> Style | None:
    one = module.get_submodule(owner)
    style = Embedding() if isinstance(one, nn.Embedding) else Colwise(is_gathered=True) if is_linear(one) else None
    return style if style is not None and style.problem(one, tp) is None else None


def _placement(module: nn.Module, name: str, styles: dict[str, ParallelStyle]) -> Placement:
    owner, _, short = name.rpartition(".")
    style = styles.get(owner)
    return style.placements(module.get_submodule(owner))[short] if isinstance(style, Style) else Replicate()
