"""What docs/migrating.md says about a difference: its parity switch, or the row that parity does not cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..parity.switches import SWITCHES
from .compare import FirstDifference

__all__ = ["NOT_COVERED", "candidates", "find_row"]


class _Row(NamedTuple):
    """A statement of the documents.

    Attributes:
        text: How it begins there.
        applies: Whether it explains a difference.
    """

    text: str
    applies: Callable[[FirstDifference], bool]


def _context(found: FirstDifference, name: str) -> object:
    return None if found.verb is None else found.verb.values.get(name)


def _has_callback(found: FirstDifference, *names: str) -> bool:
    present = _context(found, "callbacks")
    return isinstance(present, list) and any(name in present for name in names)


def _verb(found: FirstDifference) -> str:
    return "" if found.verb is None else found.verb.name


# The rows of "What parity does not change", the most specific first.
NOT_COVERED = (
    _Row(
        "A search of a learning rate or a batch size saves no checkpoint of its own",
        lambda found: (
            _verb(found) in ("scale_batch_size", "lr_find")
            or _has_callback(found, "BatchSizeFinder", "LearningRateFinder")
        ),
    ),
)

# Kind of a difference -> switches that may explain it, the likely ones first.
_SWITCHES = {
    "batch": ("reading", "random_numbers", "samplers"),
    "hook": (
        "closures", "cut_epochs", "random_numbers", "optimizer_steps", "losses_of_none", "swa", "within_windows",
        "data_modules", "fit_start", "resumed_events",
    ),
    "result": ("random_numbers", "divided_outputs", "bfloat16_on_cpu", "means", "fabric_methods"),
    "weights": (
        "short_windows", "random_numbers", "losses_of_none", "swa", "schedule_steps", "bfloat16_on_cpu",
        "autocast_cache", "second_fits", "frozen_parameters",
    ),
    "rates": ("schedule_steps", "plateaus", "stepping_batches"),
    "row": ("means", "learning_rates", "evaluation_rows", "optimizer_steps", "random_numbers"),
    "checkpoint": (
        "optimizer_steps", "equal_scores", "cut_epochs", "weight_averaging", "plateaus", "checkpoint_names",
        "checkpoint_folders", "pruning", "kept_callbacks",
    ),
    "metrics": ("means", "metrics_of_verbs", "learning_rates", "optimizer_steps", "cut_epochs"),
}  # fmt: skip


def find_row(found: FirstDifference) -> str:
    """Return the statement of docs/migrating.md that explains a difference under parity; empty where none does."""
    return next((row.text for row in NOT_COVERED if row.applies(found)), "")


def candidates(found: FirstDifference) -> list[str]:
    """Return the switches of parity that may explain a difference without it, the likely ones first."""
    likely = _SWITCHES.get(found.kind, ())
    return [*likely, *(one.name for one in SWITCHES if one.name not in likely)]
