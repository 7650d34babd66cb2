"""Experts over processes on gloo: training and checkpoints are those of one process, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import SAMPLES, Mixture, loader
from mesh_program import part_of
from ranks import run_ranks
from torch import Tensor, nn

import loopwright as lw
from loopwright.strategies import MeshStrategy

# Any in this file: arguments of trainers, and results that travel between processes.

STEPS = 5


def trainer_of(size: int, strategy: Any, **arguments: Any) -> lw.Trainer:
    settings = {
        "accelerator": "cpu", "precision": "64-true", "max_steps": STEPS, "num_sanity_val_steps": 0,
        "gradient_clip_val": 0.05,
        "accumulate_grad_batches": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "use_distributed_sampler": True,
    }  # fmt: skip
    return lw.Trainer(strategy=strategy, devices=size, **{**settings, **arguments})


def full(module: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        state = part_of(module)
        return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for n, v in state.items()}


def build(**options: Any) -> Mixture:
    lw.seed_everything(1, verbose=False)
    return Mixture(**options)


def train(
    rank: int, size: int, strategy: Any, options: dict[str, Any], steps: int = STEPS, copies: int = 1, **paths: Path
) -> Any:
    """Train, from a checkpoint if one is given, and write one if a path is given."""
    module = build(**options)
    trainer = trainer_of(size, strategy, max_steps=steps)
    # The ranks have unequally many batches to evaluate.
    trainer.fit(module, loader(4 * copies // size), loader(2, samples=9), ckpt_path=paths.get("start"))
    if "end" in paths:
        trainer.save_checkpoint(paths["end"])
    up = module.blocks[0].moe.experts.up
    return {
        "state": full(module),
        "losses": [float(trainer.callback_metrics[name]) for name in ("loss", "val_loss")],
        "elements": (up.to_local() if hasattr(up, "to_local") else up).numel(),
    }


def assert_equal(everywhere: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for one in everywhere:
        assert one["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-13)
        assert list(one["state"]) == list(alone["state"])
        for name, value in alone["state"].items():
            assert (one["state"][name] - value).abs().max() <= 1e-12, name


@pytest.mark.parametrize(
    ("mesh", "size", "shards", "options"),
    [
        ("mesh:fsdp=2,ep=2", 2, 2, {}),
        ("mesh:fsdp=4,ep=2", 4, 4, {"num_experts": 6, "gated": True}),
        ("mesh:dp=2,fsdp=2,ep=2", 4, 2, {"top_k": 1, "normalize": False}),
    ],
    ids=["ep2", "ep2 x fsdp2", "dp2 x ep2"],
)
def test_training_is_that_of_one_process(mesh: str, size: int, shards: int, options: dict[str, Any]) -> None:
    (alone,) = run_ranks(train, 1, "auto", options, connect=False)
    everywhere = run_ranks(train, size, mesh, options, connect=False)
    assert_equal(everywhere, alone)
    assert [one["elements"] for one in everywhere] == [alone["elements"] // shards] * size


def test_experts_beside_split_layers_are_the_same_on_all_ranks() -> None:
    (alone,) = run_ranks(train, 1, "auto", {}, connect=False)
    mesh = MeshStrategy(fsdp=1, tp=2, tensor_plan={"stem": "colwise_gather_output"})
    everywhere = run_ranks(train, 2, mesh, {}, connect=False, copies=2)
    assert_equal(everywhere, alone)


def train_balanced(rank: int, size: int, strategy: Any) -> Any:
    """Train with the balance loss: a micro-batch of one process is the batch of a rank."""
    module = build(balance=0.1, num_experts=6)
    trainer = trainer_of(size, strategy, accumulate_grad_batches=2 // size, max_steps=SAMPLES // 4)
    trainer.fit(module, loader(2), loader(2, samples=2))
    losses = [float(trainer.callback_metrics[name]) for name in ("loss", "val_loss")]
    return {"state": full(module), "losses": losses}


def test_the_balance_loss_is_that_of_micro_batches() -> None:
    (alone,) = run_ranks(train_balanced, 1, "auto", connect=False)
    assert_equal(run_ranks(train_balanced, 2, "mesh:fsdp=2,ep=2", connect=False), alone)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_checkpoints_load_on_any_mesh(kind: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(train, 1, "auto", {}, STEPS + 2, connect=False)
    mesh = MeshStrategy(fsdp=4, ep=2, state_dict_type=kind)
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    run_ranks(train, 4, mesh, {}, connect=False, end=first)
    assert_equal(run_ranks(train, 1, "auto", {}, STEPS + 2, connect=False, start=first), alone)
    # Back from one process to another mesh.
    run_ranks(train, 1, "auto", {}, connect=False, end=second)
    assert_equal(run_ranks(train, 2, "mesh:fsdp=2,ep=2", {}, STEPS + 2, connect=False, start=second), alone)
