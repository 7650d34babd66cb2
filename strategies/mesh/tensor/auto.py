"""A tensor plan for a module that has none: groups of layers in its graph whose split computes the same numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import nn

from .graph import LinearGroup, linear_groups
from .heads import COUNTS
from .names import Found
from .simulate import group_problem
from .styles import Colwise, Rowwise, is_linear

logger = logging.getLogger(__name__)

_MOST_LAYERS = 64
"""Linear layers of a module above which it is not run as a block."""

_Outcome = list[tuple[LinearGroup, str | None]]
"""The groups of a module, each with why it cannot be split, or None."""


def find_by_graph(module: nn.Module, tp: int) -> Found:
    """Return the styles of layers that a pass of their block shows to belong together, and that numbers confirm.

    Blocks run on made-up activations; equal blocks are run once. What cannot be run, or is refused, stays whole and is
    named in the notes.

    Args:
        module: The user's module, on any device.
        tp: Number of ranks.
    """
    found = Found("the graph")
    outcomes: dict[object, _Outcome] = {}
    reasons: dict[str, str] = {}
    for name, block in _blocks(module):
        key = _key(block)
        if key not in outcomes:
            outcomes[key] = _try(block, tp, name or type(module).__name__, reasons)
        for group, problem in outcomes[key]:
            layers = [f"{name}.{one}".lstrip(".") for one in (*group.sources, group.sink)]
            if problem is None and not any(one in found.styles for one in layers):
                found.styles.update({one: Colwise() for one in layers[:-1]})
                found.styles[layers[-1]] = Rowwise()
    refused = {sink: reason for sink, reason in reasons.items() if sink and sink not in found.styles}
    found.notes += [f"{reason}." for reason in refused.values()]
    if not found.styles:
        listed = "; ".join(reasons.values()) or "it has no two Linear layers that belong together"
        found.problems.append(
            (
                f"tensor_plan='auto' found no layers of {type(module).__name__} to split over tp={tp}: {listed}",
                "pass tensor_plan={'blocks.*.mlp.up': 'colwise', 'blocks.*.mlp.down': 'rowwise'} with its layers",
            )
        )
    return found


def _try(block: nn.Module, tp: int, name: str, reasons: dict[str, str]) -> _Outcome:
    try:
        groups = linear_groups(block)
    except Exception as error:  # whatever the user's forward raises on made-up arguments
        logger.debug("%s could not be run to find its layers: %s", name, error)
        # Under no layer's name: what could not be run may hold blocks that can.
        reasons.setdefault("", f"{name} could not be run on made-up activations ({type(error).__name__})")
        return []
    outcome: _Outcome = [(group, group_problem(block, group, tp)) for group in groups]
    for group, problem in outcome:
        if problem is not None:
            sink = f"{name}.{group.sink}"
            reasons.setdefault(sink, f"{sink} stays whole, with {', '.join(group.sources)}: {problem}")
    return outcome


def _blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with two to a few Linear layers, inner ones first."""
    for name, one in reversed(list(module.named_modules())):
        if isinstance(one, nn.ModuleList | nn.ModuleDict | nn.MultiheadAttention) or is_linear(one):
            continue
        if 2 <= sum(is_linear(inner) for inner in one.modules()) <= _MOST_LAYERS:
            yield name, one


def _key(block: nn.Module) -> object:
    """Return what blocks that compute the same have in common."""
    shapes = tuple((name, tuple(one.shape)) for name, one in block.named_parameters())
    counts = tuple((name, one.__dict__.get(count)) for name, one in block.named_modules() for count in COUNTS)
    return type(block), shapes, counts
