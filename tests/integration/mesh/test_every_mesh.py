"""Every kind of mesh trains as one process, and resumes within an epoch: weights, logged rows and samples.

Five AdamW steps of two micro-batches in float64, with clipping, losses with weights, and validation with an uneven end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from combined_models import Sparse
from context_models import Positioned
from mesh_program import TRAINED, Program, SaveAt, fit, mesh, whole
from ranks import run_ranks
from torch import Tensor

import loopwright as lw
from loopwright.strategies.mesh.context import Context
from loopwright.strategies.mesh.pipeline import Pipeline
from loopwright.strategies.mesh.pipeline.stages import runner_of

# Any in this file: results that travel between processes.

SAVED = 2  # steps; an epoch has three
IN_PARTS = {"sequence_parallel": True, "loss_parallel": True}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
FOUR_STAGES = ("pp4", "pp2 interleaved", "pp2 zero-bubble", "pp2 zbv", "pp2 dualpipev")

MESHES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 in parts": {"tp": 2, **IN_PARTS},
    "tp4": {"tp": 4},
    "fsdp2 x tp2": {"fsdp": 2, "tp": 2},
    "dp2 x fsdp2 x tp2": {"dp": 2, "fsdp": 2, "tp": 2},
    **{f"pp2 {name}": {"pp": 2, "pipeline": Pipeline(schedule=name)} for name in SCHEDULES},
    "pp4": {"pp": 4},
    "dp2 x pp2": {"dp": 2, "pp": 2},
    "pp2 x tp2": {"pp": 2, "tp": 2},
    "pp2 x fsdp2 x tp2": {"pp": 2, "fsdp": 2, "tp": 2},
    "cp2": {"cp": 2, "context": Context(module="net")},
    "cp4": {"cp": 4, "context": Context(module="net", method="ulysses")},
    "cp2 x fsdp2": {"cp": 2, "fsdp": 2, "context": Context(module="net")},
    "ep2": {"fsdp": 2, "ep": 2},
    "ep2 x fsdp2": {"fsdp": 4, "ep": 2},
}


class Read(lw.Callback):
    """Collects the numbers of the samples of each batch; a step runs once for each of a rank's stages."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.samples.append(batch[0].tolist())


@dataclass(frozen=True)
class Run:
    """What a mesh trains; runs that are equal have the same results.

    Attributes:
        kind: Class of the model: with positions of its own, which parts of sequences need, or with experts.
        blocks: Number of blocks.
        scales_logits: See `Program`.
        micro_batches: In a window: as many as stages, so that each schedule has its own order.
    """

    kind: type[Positioned] = Positioned
    blocks: int = 2
    scales_logits: bool = True
    micro_batches: int = 2

    @classmethod
    def of(cls, name: str) -> Run:
        axes = MESHES[name]
        return cls(
            Sparse if "ep" in axes else Positioned,
            4 if "pp" in axes else 2,
            "loss_parallel" not in axes,
            4 if name in FOUR_STAGES else 2,
        )


def train(rank: int, size: int, strategy: Any, run: Run, data_size: int, path: str) -> list[dict[str, Any]]:
    """Train, and, given a path, once more from a checkpoint in the middle of an epoch; return what is compared."""
    found = []
    for way in ("through", "resumed") if path else ("through",):
        read = Read()
        callbacks = [read, SaveAt(SAVED, path)] if path and way == "through" else [read]
        module = Program(kind=run.kind, blocks=run.blocks, scales_logits=run.scales_logits)
        trainer, _, rows = fit(
            strategy, size, module=module, data_size=data_size, trained=TRAINED * run.micro_batches // 2,
            accumulate_grad_batches=run.micro_batches, callbacks=callbacks,
            ckpt_path=path if way == "resumed" else None,
        )  # fmt: skip
        runner = runner_of(module)
        found.append(
            {
                "weights": whole(module),
                "rows": rows.rows,
                "seen": read.samples,
                "data_rank": trainer.strategy.topology.data_rank,
                "samples": trainer._lw_samples_of_all_ranks(),
                "is_scheduled": runner is None or len(runner.schedules) == 1,
            }
        )
    return found


@cache
def alone(run: Run) -> dict[str, Any]:
    """Return what one process computes."""
    (((found),),) = run_ranks(train, 1, "auto", run, 1, "", connect=False)
    return found


def everywhere(name: str, run: Run, path: str) -> list[list[dict[str, Any]]]:
    axes = MESHES[name]
    size = math.prod(axes.get(axis, 1) for axis in ("pp", "dp", "fsdp", "cp", "tp"))
    data_size = axes.get("dp", 1) * axes.get("fsdp", 1)
    return run_ranks(train, size, mesh(**{"fsdp": 1, **axes}), run, data_size, path, connect=False, timeout_s=150)


def joined(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the weights of all stages, which are the same on all ranks that have them."""
    weights: dict[str, Tensor] = {}
    for found in ranks:
        for key, value in found["weights"].items():
            assert torch.equal(weights.setdefault(key, value), value), key
    return weights


def assert_same_rows(ours: list[Any], theirs: list[Any]) -> None:
    assert [(step, sorted(row)) for step, row in ours] == [(step, sorted(row)) for step, row in theirs]
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=1e-13, abs=1e-13), key


def assert_read_once(ranks: list[dict[str, Any]], seen: list[list[int]]) -> None:
    """Compare the samples of each step with those of one process; ranks with the same share read the same ones."""
    by_share: dict[int, list[Any]] = {}
    for found in ranks:
        assert by_share.setdefault(found["data_rank"], found["seen"]) == found["seen"]
    batches = zip(*(by_share[rank] for rank in sorted(by_share)), strict=True)
    assert [[number for part in parts for number in part] for parts in batches] == seen


@pytest.mark.parametrize("name", MESHES)
def test_training_and_resuming_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    run = Run.of(name)
    wanted = alone(run)
    through, resumed = zip(*everywhere(name, run, str(tmp_path / "stopped.ckpt")), strict=True)
    weights = joined(through)
    assert weights.keys() == wanted["weights"].keys()
    for key, value in wanted["weights"].items():
        assert (weights[key] - value).abs().max() <= 1e-12, key
    for key, value in joined(resumed).items():
        assert torch.equal(value, weights[key]), key
    (rows,) = [found["rows"] for found in through if found["rows"]]
    (later,) = [found["rows"] for found in resumed if found["rows"]]
    assert_same_rows(rows, wanted["rows"])
    assert later == [row for row in rows if row[0] >= SAVED]
    assert all(found["samples"] == wanted["samples"] for found in (*through, *resumed))
    assert all(found["is_scheduled"] for found in through)
    assert_read_once(through, wanted["seen"])
    assert_read_once(resumed, wanted["seen"][SAVED * run.micro_batches :])
