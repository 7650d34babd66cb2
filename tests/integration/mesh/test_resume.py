"""A run on stages, shards and split layers at once continues on other layouts, and theirs on it: full and sharded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from mesh_program import Program, SaveAt, fit, mesh
from ranks import run_ranks

SAVED, STEPS = 3, 5  # in the middle of the second epoch, of three
CUBE: Mapping[str, int] = {"pp": 2, "fsdp": 2, "tp": 2}
KINDS = ("full", "sharded")

Losses = list[tuple[int, float]]


def train(
    rank: int, size: int, axes: Mapping[str, int], sources: list[str], save: dict[str, str] | None = None
) -> list[Losses]:
    """Train once from each checkpoint ("" is the beginning), and return the losses of steps that this rank logged."""
    found = []
    for source in sources:
        _, _, rows = fit(
            mesh(**axes) if axes else "auto", size, module=Program(blocks=4), data_size=axes.get("fsdp", 1),
            batch_size=8, steps=STEPS, ckpt_path=source or None, callbacks=[SaveAt(SAVED, save)] if save else [],
            limit_val_batches=0,
        )  # fmt: skip
        found.append([(step, row["train_loss_step"]) for step, row in rows.rows if "train_loss_step" in row])
    return found


def losses(size: int, axes: Mapping[str, int], sources: list[str], save: dict[str, str] | None = None) -> list[Losses]:
    everywhere = run_ranks(train, size, axes, sources, save, connect=False)
    return next(found for found in everywhere if found[0])


def paths(folder: Path, name: str) -> dict[str, str]:
    return {kind: str(folder / f"{name}-{kind}.ckpt") for kind in KINDS}


def assert_continues(found: Losses, through: Losses) -> None:
    expected = [one for one in through if one[0] >= SAVED]
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert len(found) == STEPS - SAVED
    for (step, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-13, abs=1e-13), step


@pytest.fixture(scope="module")
def of_cube(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Losses]:
    """Return checkpoints of the run on eight ranks in both forms, and its losses."""
    saved = paths(tmp_path_factory.mktemp("cube"), "cube")
    return saved, losses(8, CUBE, [""], saved)[0]


@pytest.mark.parametrize(
    ("size", "axes"), [(8, {"fsdp": 8}), (2, {"fsdp": 1, "tp": 2}), (1, {})], ids=["fsdp8", "tp2", "one process"]
)
def test_a_run_continues_there_and_back(
    size: int, axes: dict[str, int], of_cube: tuple[dict[str, str], Losses], tmp_path: Path
) -> None:
    saved, through = of_cube
    for found in losses(size, axes, [saved[kind] for kind in KINDS]):
        assert_continues(found, through)
    theirs = paths(tmp_path, "other") if axes else {"full": str(tmp_path / "other.ckpt")}
    (alone,) = losses(size, axes, [""], theirs)
    for path in theirs.values():
        assert Path(path).is_dir() == path.endswith("sharded.ckpt")
    for found in losses(8, CUBE, list(theirs.values())):
        assert_continues(found, alone)
