"""Names of styles and patterns of module names, as plans have them: the user's own, and those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle

from ....errors import Clauses, nearest
from .styles import Colwise, Embedding, PackedColwise, Replicated, Rowwise, is_linear


@dataclass
class Found:
    """The styles of a source.

    Attributes:
        source: Where they come from, for messages.
        styles: By name of the module.
        problems: What is wrong with it.
        notes: What was left out, and why, as sentences.
    """

    source: str
    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    problems: Clauses = field(default_factory=Clauses)
    notes: list[str] = field(default_factory=list)


STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": Colwise,
    "colwise_gather_output": lambda: Colwise(is_gathered=True),
    "rowwise": Rowwise,
    "rowwise_split_input": lambda: Rowwise(splits_input=True),
    "embedding": Embedding,
    "packed_colwise": PackedColwise,
    "replicated": Replicated,
    "replicated_with_grad_allreduce": lambda: Replicated(is_partial=True),
    "sequence_parallel": lambda: Replicated(is_partial=True),
}
"""The styles that have a name."""

_ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "embedding",
    "embedding_colwise": "colwise_gather_output",
    "replicate": "replicated",
}


def style_named(name: str) -> ParallelStyle | None:
    """Return a new style of that name; None if there is none."""
    make = STYLES.get(_ALIASES.get(name, name))
    return None if make is None else make()


def match(pattern: str, names: Mapping[str, nn.Module]) -> list[str]:
    """Return the names that a pattern matches: `*` matches one name, or a part of it, between two dots."""
    parts = pattern.split(".")
    return [
        name
        for name in names
        if len(own := name.split(".")) == len(parts)
        and all(fnmatchcase(one, part) for one, part in zip(own, parts, strict=True))
    ]


def read_plan(wanted: Mapping[str, object], module: nn.Module, source: str) -> tuple[dict[str, ParallelStyle], Clauses]:
    """Return the style of each module that a user's plan names, and what is wrong with the plan.

    Args:
        wanted: Pattern of module names -> name of a style, or a ParallelStyle; a later pattern wins.
        module: The module, whose names are meant.
        source: Where the plan comes from, for messages.
    """
    names = dict(module.named_modules())
    styles: dict[str, ParallelStyle] = {}
    problems = Clauses()
    for pattern, value in wanted.items():
        matched = match(pattern, names)
        if not matched:
            problems.append(_unmatched(pattern, names, source))
        style = style_named(value) if isinstance(value, str) else value
        if not isinstance(style, ParallelStyle):
            known = nearest(value, STYLES) if isinstance(value, str) else ""
            what = f"Expected a style for {pattern!r} of {source}, got {value!r}{known}"
            problems.add(what, f"use one of {', '.join(STYLES)}, or an object of torch.distributed.tensor.parallel")
            continue
        styles.update(dict.fromkeys(matched, style))
    return styles, problems


def _unmatched(pattern: str, names: Mapping[str, nn.Module], source: str) -> tuple[str, str]:
    linear = [name for name, one in names.items() if is_linear(one) or isinstance(one, nn.Embedding)]
    shown = ", ".join(linear[:12]) + (f" and {len(linear) - 12} more" if len(linear) > 12 else "")
    return (
        f"pattern {pattern!r} of {source} matches no module; Linear layers and embeddings are: {shown or 'none'}",
        "write the name with its path, and * for a number: 'blocks.*.mlp.up'",
    )
