"""Each mesh trains as one process: weights, logged rows, samples, checkpoints and resumes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mesh_program import Heard, Program, SaveAt, fit, mesh, whole
from ranks import run_ranks
from torch import Tensor

from loopwright.strategies import FSDPStrategy, Strategy

# Any in this file: results that travel between processes.

MESHES = {
    "fsdp2": (2, {"fsdp": 2}),
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "fsdp2-tp2": (4, {"fsdp": 2, "tp": 2}),
    "dp2-tp2": (4, {"dp": 2, "fsdp": 1, "tp": 2}),
    "dp2-fsdp2-tp2": (8, {"dp": 2, "fsdp": 2, "tp": 2}),
}


def data_size(axes: dict[str, Any]) -> int:
    return int(axes.get("dp", 1) * axes.get("fsdp", 1))


def train(rank: int, size: int, axes: dict[str, Any], **options: Any) -> dict[str, Any]:
    trainer, module, rows = fit(mesh(**axes), size, data_size=data_size(axes), **options)
    return {
        "weights": whole(module),
        "rows": rows.rows,
        "seen": module.seen,
        "masks": module.masks,
        "data_rank": trainer.strategy.topology.data_rank,
        "samples": trainer._lw_samples_of_all_ranks(),
    }


def assert_same_rows(ours: list[Any], theirs: list[Any]) -> None:
    assert [(step, sorted(row)) for step, row in ours] == [(step, sorted(row)) for step, row in theirs]
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        for key, value in other.items():
            if key != "epoch":
                assert one[key] == pytest.approx(value, rel=1e-13, abs=1e-13), key


def assert_same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    worst = {name: float((ours[name] - value).abs().max()) for name, value in theirs.items()}
    assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize("name", ["fsdp2", "dp2-tp2"])  # the others are in test_every_mesh.py
def test_training_is_that_of_one_process(name: str) -> None:
    size, axes = MESHES[name]
    trainer, alone, rows = fit("auto", 1)
    everywhere = run_ranks(train, size, axes, connect=False)
    for found in everywhere:
        assert_same_weights(found["weights"], whole(alone))
        assert found["samples"] == trainer._lw_samples_of_all_ranks()
    assert_same_rows(everywhere[0]["rows"], rows.rows)
    assert not any(found["rows"] for found in everywhere[1:])
    by_share: dict[int, list[Any]] = {}
    for found in everywhere:
        assert by_share.setdefault(found["data_rank"], found["seen"]) == found["seen"]  # copies read the same
    batches = zip(*(by_share[rank] for rank in sorted(by_share)), strict=True)
    assert [[number for part in parts for number in part] for parts in batches] == alone.seen


IN_PARTS = {"sequence": {"sequence_parallel": True}, "loss": {"loss_parallel": True}}
IN_PARTS["both"] = IN_PARTS["sequence"] | IN_PARTS["loss"]


@pytest.mark.parametrize(
    ("axes", "name"),
    [({"tp": 2}, "sequence"), ({"tp": 2}, "loss"), ({"fsdp": 2, "tp": 2}, "both"), ({"pp": 2, "tp": 2}, "sequence")],
)
def test_sequences_and_losses_in_parts_are_those_of_one_process(axes: dict[str, int], name: str) -> None:
    # Logits in parts are for cross_entropy alone.
    options = {"module": Program(scales_logits=name == "sequence")}
    _, alone, rows = fit("auto", 1, **copy.deepcopy(options))
    size = math.prod(axes.values())
    everywhere = run_ranks(train, size, {"fsdp": 1, **axes, **IN_PARTS[name]}, connect=False, **options)
    found: dict[str, Tensor] = {}
    for one in everywhere:
        found.update(one["weights"])
        if "pp" not in axes:
            assert_same_weights(one["weights"], whole(alone))
    assert_same_weights(found, whole(alone))
    assert_same_rows(next(one["rows"] for one in everywhere if one["rows"]), rows.rows)


def stop_and_resume(rank: int, size: int, axes: dict[str, Any], folder: str) -> Any:
    path, options = f"{folder}/stopped.ckpt", {"data_size": data_size(axes)}
    _, through, rows = fit(mesh(**axes), size, module=Program(dropout=0.3), callbacks=[SaveAt(2, path)], **options)
    trainer, module, resumed = fit(mesh(**axes), size, module=Program(dropout=0.3), ckpt_path=path, **options)
    return {
        "through": (whole(through), through.masks, through.seen, rows.rows),
        "resumed": (whole(module), module.masks, module.seen, resumed.rows),
        "data_rank": trainer.strategy.topology.data_rank,
    }


@pytest.mark.parametrize(
    ("name", "kind"), [("tp2", "full"), ("fsdp2-tp2", "full"), ("fsdp2-tp2", "sharded"), ("dp2-fsdp2-tp2", "sharded")]
)
def test_a_run_that_resumes_within_an_epoch_has_the_masks_and_bits_of_one_that_did_not_stop(
    name: str, kind: str, tmp_path: Path
) -> None:
    size, axes = MESHES[name]
    everywhere = run_ranks(stop_and_resume, size, {**axes, "state_dict_type": kind}, str(tmp_path), connect=False)
    masks: dict[int, Any] = {}
    for found in everywhere:
        weights, drawn, seen, _ = found["through"]
        resumed_weights, resumed_drawn, resumed_seen, _ = found["resumed"]
        assert (drawn[4:], seen[4:]) == (resumed_drawn, resumed_seen)
        assert_same_weights(resumed_weights, weights)
        assert masks.setdefault(found["data_rank"], drawn) == drawn  # copies draw the same masks
    assert len({repr(drawn) for drawn in masks.values()}) == len(masks)  # others draw other ones
    through, resumed = everywhere[0]["through"][3], everywhere[0]["resumed"][3]
    assert_same_rows(resumed, [row for row in through if row[0] >= 2])


def save(rank: int, size: int, axes: dict[str, Any], path: str) -> Any:
    heard = Heard()
    _, module, rows = fit(mesh(**axes), size, data_size=data_size(axes), callbacks=[SaveAt(2, path)])
    assert heard.texts == []  # torch has nothing to warn of
    return whole(module), rows.rows


def resume(rank: int, size: int, axes: dict[str, Any], path: str) -> Any:
    _, module, rows = fit(mesh(**axes) if axes else "auto", size, data_size=data_size(axes), ckpt_path=path)
    return whole(module), rows.rows


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_checkpoint_of_a_mesh_continues_on_others_and_on_one_process(kind: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/stopped.ckpt"
    weights, rows = run_ranks(save, 4, {"fsdp": 2, "tp": 2, "state_dict_type": kind}, path, connect=False)[0]
    for axes in ({"tp": 2}, {"fsdp": 2}, {}):
        resumed, after = run_ranks(resume, 2 if axes else 1, axes, path, connect=False)[0]
        assert_same_rows(after, [row for row in rows if row[0] >= 2])
        assert_same_weights(resumed, weights)


def stopped_or_resumed(
    rank: int, size: int, strategy: Strategy | str, path: str, ckpt_path: str | None
) -> tuple[dict[str, Tensor], list[Any]]:
    """Train to the end on two shares of the data: saving after two steps, or from a checkpoint."""
    callbacks = [] if ckpt_path else [SaveAt(2, path)]
    _, module, rows = fit(strategy, size, data_size=2, callbacks=callbacks, ckpt_path=ckpt_path)
    return whole(module), rows.rows


OTHERS: dict[str, Callable[[], Strategy | str]] = {
    "ddp": lambda: "ddp",
    "fsdp-full": lambda: FSDPStrategy(auto_wrap_policy={"Block"}, state_dict_type="full"),
    "fsdp-sharded": lambda: FSDPStrategy(auto_wrap_policy={"Block"}, state_dict_type="sharded"),
}


@pytest.mark.parametrize(("other", "kind"), [("ddp", "full"), ("fsdp-full", "sharded"), ("fsdp-sharded", "sharded")])
def test_checkpoints_go_from_other_strategies_to_a_mesh_and_back(other: str, kind: str, tmp_path: Path) -> None:
    there, here = str(tmp_path / "other.ckpt"), str(tmp_path / "mesh.ckpt")
    axes = {"fsdp": 2, "tp": 2, "state_dict_type": kind}
    weights, rows = run_ranks(stopped_or_resumed, 2, OTHERS[other](), there, None, connect=False)[0]
    again = run_ranks(stopped_or_resumed, 4, mesh(**axes), "", there, connect=False)[0]
    run_ranks(stopped_or_resumed, 4, mesh(**axes), here, None, connect=False)
    back = run_ranks(stopped_or_resumed, 2, OTHERS[other](), "", here, connect=False)[0]
    assert Path(here).is_dir() == (kind == "sharded")
    assert Path(there).is_dir() == (other == "fsdp-sharded")
    for resumed, after in (again, back):
        assert_same_rows(after, [row for row in rows if row[0] >= 2])
        assert_same_weights(resumed, weights)
