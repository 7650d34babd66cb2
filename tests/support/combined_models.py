"""Language models and runs for tests of several axes of a mesh at once."""

from __future__ import annotations

from typing import Any

import torch
from context_models import Language, Positioned, fit, full
from tensor_models import PLAN, WIDTH

import loopwright as lw
from loopwright.strategies import MeshStrategy

__all__ = ["SPLIT", "TENSOR_PLAN", "Sparse", "assert_equal", "attempt", "train"]

# Any in this file: arguments of strategies, and results that travel between processes.

TENSOR_PLAN = {f"model.{name}": style for name, style in PLAN.items()}
SPLIT = {"tokens": 1, "following": 1}


class Sparse(Positioned):
    """Has layers of experts in place of dense ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            block.mlp = lw.Experts(WIDTH, 8, 4)


def train(
    rank: int, size: int, kind: type[Language], model: type[Positioned], axes: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Train on this rank, or alone without axes; return full weights, losses of steps and metrics."""
    torch.manual_seed(0)
    module = kind(model(**options))
    strategy = MeshStrategy(**{"fsdp": 1, **axes}) if axes else "auto"
    trainer = fit(module, size, strategy, batch_size=4 // axes.get("fsdp", 1))
    return {
        "state": {name: full(one) for name, one in module.named_parameters()},
        "losses": module.losses,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def assert_equal(everywhere: list[dict[str, Any]], alone: dict[str, Any], *, num_parts: int = 1) -> None:
    """Compare weights of all stages, losses of steps and metrics with those of one process.

    Args:
        everywhere: What `train` returned on all ranks.
        alone: What it returned on one.
        num_parts: Number of ranks whose losses are summed; others are means of equally many.
    """
    names = {name for found in everywhere for name in found["state"]}
    assert names == alone["state"].keys()
    for found in everywhere:
        for name, value in found["state"].items():
            assert (value - alone["state"][name]).abs().max() <= 1e-12, name
        for name, value in found["metrics"].items():
            assert abs(value - alone["metrics"][name]) <= 1e-13, name
    last = [found for found in everywhere if found["losses"]]  # of the last stage
    assert all(found["metrics"].keys() == alone["metrics"].keys() for found in last)
    for losses, wanted in zip(zip(*(found["losses"] for found in last), strict=True), alone["losses"], strict=True):
        mean = sum(losses) / len(losses) * num_parts
        assert abs(mean - wanted) <= 1e-13 * max(1.0, abs(wanted))


def attempt(
    rank: int, size: int, kind: type[Language], model: type[Positioned], axes: dict[str, Any], **options: Any
) -> str:
    """Train, and return the error's text."""
    try:
        train(rank, size, kind, model, axes, **options)
    # Whatever it is: its text is compared.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
