"""`Found`: the styles that one source of a plan gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel.style import ParallelStyle

    from .names import Problems

__all__ = ["Found"]


@dataclass
class Found:
    """The styles that a source gives.

    Attributes:
        source: Where they come from, for messages.
        styles: By name of the module.
        problems: What is wrong with it.
        notes: What was left out, and why, as sentences.
    """

    source: str
    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    problems: Problems = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
