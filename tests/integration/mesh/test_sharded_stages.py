"""Sharded checkpoints of a mesh with stages, shards and tensors: each rank writes its own, and any layout continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mesh_program import Program, SaveAt, fit, mesh
from ranks import run_ranks

from loopwright.checkpoint import sharded

# Any in this file: options, and results that travel between processes.

SAVED, STEPS = 2, 4
STAGES = {"pp": 2, "fsdp": 2, "tp": 2, "state_dict_type": "sharded"}


def train(
    rank: int, size: int, axes: dict[str, Any], save: str | None = None, resume: str | None = None
) -> list[tuple[int, float]]:
    """Return the losses of steps that this rank logged."""
    strategy = mesh(**axes) if axes else "auto"
    data_size = axes.get("dp", 1) * axes.get("fsdp", 1) if axes else 1
    callbacks = [SaveAt(SAVED, save)] if save else []
    _, _, rows = fit(
        strategy, size, module=Program(blocks=4), data_size=data_size, steps=STEPS, ckpt_path=resume,
        callbacks=callbacks, limit_val_batches=0,
    )  # fmt: skip
    return [(step, row["train_loss_step"]) for step, row in rows.rows if "train_loss_step" in row]


def losses(size: int, axes: dict[str, Any], **paths: str) -> list[tuple[int, float]]:
    everywhere = run_ranks(train, size, axes, connect=False, **paths)
    return next(found for found in everywhere if found)


def assert_continues(found: list[tuple[int, float]], through: list[tuple[int, float]]) -> None:
    expected = [one for one in through if one[0] >= SAVED]
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert len(found) == STEPS - SAVED
    for (step, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-13, abs=1e-13), step


def test_stages_write_their_own_shards_and_other_layouts_continue(tmp_path: Path) -> None:
    path = f"{tmp_path}/stages.ckpt"
    through = losses(8, STAGES, save=path)
    manifest = sharded.read_manifest(path)
    writers: dict[str, set[int]] = {}
    for name, entry in manifest.tensors.items():
        writers[name] = {int(chunk.file.rsplit("-", 3)[1]) for chunk in entry.chunks}
    names = {f"state_dict/{name}" for name, _ in Program(blocks=4).named_parameters()}
    assert names <= writers.keys()
    assert len(manifest.tensors) == 3 * len(names)  # with both averages of AdamW
    for name in names:
        stage = None if name.endswith("temperature") else int("blocks.2" in name or "blocks.3" in name)
        stage = 1 if ".norm." in name or ".head." in name else stage
        if stage is not None:
            assert {rank // 4 for rank in writers[name]} == {stage}, (name, writers[name])
    for size, axes in ((4, {"fsdp": 4}), (2, {"tp": 2}), (1, {})):
        assert_continues(losses(size, axes, resume=path), through)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_stages_continue_from_other_layouts(kind: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/other.ckpt"
    size, axes = (1, {}) if kind == "full" else (2, {"fsdp": 2, "state_dict_type": "sharded"})
    through = losses(size, axes, save=path)
    assert_continues(losses(8, STAGES, resume=path), through)
