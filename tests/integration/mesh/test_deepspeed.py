"""Checkpoints between meshes and DeepSpeed's ZeRO stages, in both directions; and what its own format carries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_program import Program, Rows, SaveAt, fit, mesh, whole
from ranks import import_deepspeed, run_ranks
from torch import Tensor

import loopwright as lw
from loopwright.strategies import DeepSpeedStrategy

pytest.importorskip("deepspeed")

# Any in this file: results that travel between processes.

SAVED, STEPS = 2, 4
STAGES = (1, 2, 3)
MESHES: dict[str, tuple[int, dict[str, int]]] = {"fsdp2-tp2": (4, {"fsdp": 2, "tp": 2}), "pp2": (2, {"pp": 2})}
KINDS = ("full", "sharded")

Losses = list[tuple[int, float]]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_deepspeed()


class Scaled(Program):
    """Has a number as temperature: DeepSpeed refuses parameters without dimensions, and steps of stage 3 read none."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        del self.temperature
        self.temperature = 1.25  # type: ignore[assignment]


class SaveOwn(lw.Callback):
    """Saves after a step in DeepSpeed's own format."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: lw.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED and trainer.at_step_boundary:
            trainer.strategy.deepspeed_engine.save_checkpoint(self.path)  # type: ignore[attr-defined]


def engine(stage: int) -> DeepSpeedStrategy:
    # In stage 3 no parameter is so small that it stays full.
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    return DeepSpeedStrategy(config=config) if stage == 3 else DeepSpeedStrategy(stage=stage)


def run(strategy: Any, size: int, data_size: int, **options: Any) -> tuple[lw.Trainer, Program, Losses]:
    module = Scaled().float()
    trainer, module, rows = fit(
        strategy, size, module=module, data_size=data_size, precision="32-true", limit_val_batches=0,
        **{"steps": STEPS, **options},
    )  # fmt: skip
    return trainer, module, losses_in(rows)


def losses_in(rows: Rows) -> Losses:
    return [(step, row["train_loss_step"]) for step, row in rows.rows if "train_loss_step" in row]


def assert_continues(found: Losses, through: Losses) -> None:
    expected = [one for one in through if one[0] >= SAVED]
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert len(found) == STEPS - SAVED
    for (step, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), step  # float32


def on_engines(rank: int, size: int, folder: str) -> list[Losses]:
    """Train in each stage, saving in Loopwright's format and in DeepSpeed's."""
    found = []
    for stage in STAGES:
        callbacks = [SaveAt(SAVED, f"{folder}/zero{stage}.ckpt"), SaveOwn(f"{folder}/own{stage}")]
        found.append(run(engine(stage), size, size, callbacks=callbacks)[2])
    return found


def on_mesh(rank: int, size: int, axes: Mapping[str, int], folder: str) -> Any:
    """Continue from each checkpoint of DeepSpeed; of its own format return what was loaded."""
    data_size = axes.get("fsdp", 1)
    continued = [
        run(mesh(**{"fsdp": 1, **axes}), size, data_size, ckpt_path=f"{folder}/zero{stage}.ckpt")[2] for stage in STAGES
    ]
    loaded = []
    for stage in STAGES:
        strategy, path = mesh(**{"fsdp": 1, **axes}), f"{folder}/own{stage}"
        trainer, module, _ = run(strategy, size, data_size, ckpt_path=path, steps=SAVED)
        trainer.save_checkpoint(f"{folder}/loaded{stage}.ckpt")
        loaded.append((trainer.global_step, whole(module)))
    return continued, loaded


@pytest.mark.filterwarnings("ignore:trainer.fit has nothing to do")  # what is loaded is looked at
@pytest.mark.parametrize("name", MESHES)
def test_checkpoints_of_deepspeed_continue_on_a_mesh(name: str, tmp_path: Path) -> None:
    size, axes = MESHES[name]
    through = run_ranks(on_engines, 2, str(tmp_path), connect=False)[0]
    everywhere = run_ranks(on_mesh, size, axes, str(tmp_path), connect=False)
    for continued, wanted in zip(next(one for one, _ in everywhere if one[0]), through, strict=True):
        assert_continues(continued, wanted)
    for number, stage in enumerate(STAGES):
        saved = lw.checkpoint.load(tmp_path / f"zero{stage}.ckpt")
        found: dict[str, Tensor] = {}
        for _, loaded in everywhere:
            assert loaded[number][0] == SAVED
            found.update(loaded[number][1])
        again = lw.checkpoint.load(tmp_path / f"loaded{stage}.ckpt")
        for key, value in saved["state_dict"].items():
            assert torch.equal(again["state_dict"][key], value), key
            assert torch.equal(found[key], value), key
        ours, theirs = (one["optimizer_states"][0]["state"] for one in (again, saved))
        assert len(ours) == len(theirs) == len(list(Scaled().parameters()))
        for place, entry in theirs.items():
            assert all(
                torch.equal(torch.as_tensor(ours[place][key]), torch.as_tensor(one)) for key, one in entry.items()
            )


def save_on_mesh(rank: int, size: int, axes: Mapping[str, int], paths: dict[str, str]) -> Losses:
    return run(mesh(**{"fsdp": 1, **axes}), size, axes.get("fsdp", 1), callbacks=[SaveAt(SAVED, paths)])[2]


def continue_on_engines(rank: int, size: int, sources: list[tuple[int, str]]) -> list[Losses]:
    return [run(engine(stage), size, size, ckpt_path=path)[2] for stage, path in sources]


def test_checkpoints_of_a_mesh_continue_with_deepspeed(tmp_path: Path) -> None:
    through = {}
    for name, (size, axes) in MESHES.items():
        paths = {kind: str(tmp_path / f"{name}-{kind}.ckpt") for kind in KINDS}
        through[name] = next(one for one in run_ranks(save_on_mesh, size, axes, paths, connect=False) if one)
    pairs = [("fsdp2-tp2", 1, "full"), ("fsdp2-tp2", 2, "sharded"), ("fsdp2-tp2", 3, "sharded"), ("pp2", 1, "sharded"),
             ("pp2", 3, "full")]  # fmt: skip
    sources = [(stage, str(tmp_path / f"{name}-{kind}.ckpt")) for name, stage, kind in pairs]
    everywhere = run_ranks(continue_on_engines, 2, sources, connect=False)
    for (name, _, _), found in zip(pairs, everywhere[0], strict=True):
        assert_continues(found, through[name])
