"""What a module has beside its weights, from any layout to any other: frozen or not, modes, buffers, and user states.

With pipeline stages each rank has a part of it, and code after the blocks runs on the rank with the last stage only.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.callbacks.summary.summary import summarize
from loopwright.checkpoint import storage
from loopwright.strategies import MeshStrategy
from loopwright.strategies.mesh.pipeline import Pipeline
from loopwright.strategies.mesh.verify import saved_buffers

# Any in this file: batches, and results that travel between processes.

STEPS = 3
PLAN = {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}
PIPELINE = Pipeline(module="net")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2, "tensor_plan": PLAN},
    "pp2": {"pp": 2, "pipeline": PIPELINE},
    "pp2 sharded": {"pp": 2, "pipeline": PIPELINE, "state_dict_type": "sharded"},
    "pp2 x tp2": {"pp": 2, "tp": 2, "tensor_plan": PLAN, "pipeline": PIPELINE},
    "fsdp2": {"fsdp": 2},  # its ranks read different data
    "ep2": {"fsdp": 2, "ep": 2},
}


class Block(nn.Module):
    """Counts its calls in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.moe = lw.Experts(4, 4, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.norm(self.moe(self.down(self.up(x).tanh())))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Body(nn.Module):
    """The blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Net(lw.Module):
    """A buffer that is changed after the blocks, a sum of losses, and layers that hooks freeze and unfreeze."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Body()
        self.head = nn.Linear(4, 1)
        self.register_buffer("center", torch.zeros(1))
        self.total = 0.0
        self.net.blocks[2].down.requires_grad_(False)
        self.net.blocks[0].norm.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.head(self.net(batch[0]))
        self.center.lerp_(y.detach().mean(0), 0.5)
        loss = y.square().mean()
        self.total += float(loss.detach())
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 1 and self.trainer.max_steps == STEPS:
            blocks = self.net.blocks
            blocks[1].up.requires_grad_(False)
            blocks[3].requires_grad_(False)
            blocks[2].down.requires_grad_(True)
            blocks[2].moe.experts.up.requires_grad_(False)
            blocks[0].norm.train()
            blocks[1].norm.eval()
            blocks[3].norm.eval()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["total"] = self.total

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.total = checkpoint["total"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Losses(lw.Callback):
    """Adds losses up, and counts batches."""

    def __init__(self) -> None:
        self.total, self.batches = 0.0, 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.total += 0.0 if outputs is None else float(outputs["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.batches = state["total"], state["batches"]


class OnRankZero(lw.Callback):
    """Counts on rank 0 alone, as what writes a file does."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.count += trainer.is_global_zero

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def fit(
    size: int, axes: dict[str, Any], steps: int, resume: str | None = None, **options: Any
) -> tuple[lw.Trainer, Net, Losses, OnRankZero]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    losses, counted = Losses(), OnRankZero()
    trainer = lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(**{"fsdp": 1, **axes}) if axes else "auto", devices=size,
        precision="64-true", max_steps=steps, max_epochs=9, logger=False, accumulate_grad_batches=2,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[losses, counted],
        **options,
    )  # fmt: skip
    module = Net()
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=4 // axes.get("fsdp", 1)), ckpt_path=resume)
    return trainer, module, losses, counted


def save(rank: int, size: int, axes: dict[str, Any], path: str) -> None:
    fit(size, axes, STEPS)[0].save_checkpoint(path)


def load(rank: int, size: int, axes: dict[str, Any], paths: list[str]) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        _, module, losses, counted = fit(size, axes, 0, path)
        found.append({
            "trained": {name: one.requires_grad for name, one in module.named_parameters()},
            "training": {name: one.training for name, one in module.named_modules()},
            "buffers": {name: value.tolist() for name, value in saved_buffers(module).items()},
            "calls": {
                f"net.blocks.{at}": block.calls for at, block in enumerate(module.net.blocks) if [*block.parameters()]
            },
            "user": (module.total, losses.total, losses.batches, counted.count),
        })  # fmt: skip
    return found


def size_of(axes: dict[str, Any]) -> int:
    return math.prod(axes.get(axis, 1) for axis in ("pp", "fsdp", "tp"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the checkpoint of each layout."""
    root = tmp_path_factory.mktemp("layouts")
    for name, axes in LAYOUTS.items():
        run_ranks(save, size_of(axes), axes, str(root / name), connect=False)
    return {name: root / name for name in LAYOUTS}


def test_files_of_all_layouts_tell_what_one_process_has(saved: dict[str, Path]) -> None:
    files: dict[str, Any] = {name: storage.load(path) for name, path in saved.items()}
    one = files["one"]
    assert one["loopwright"]["frozen"]["modules"] == ["net.blocks.1.norm", "net.blocks.3.norm"]
    for name, file in files.items():
        ours, theirs = file["loopwright"]["frozen"], one["loopwright"]["frozen"]
        assert {key: sorted(ours[key]) for key in ours} == {key: sorted(theirs[key]) for key in theirs}, name
        if "fsdp" in LAYOUTS[name]:
            continue
        assert file["total"] == pytest.approx(one["total"], rel=1e-12), name
        assert file["callbacks"].keys() == one["callbacks"].keys()
        for key, state in one["callbacks"].items():
            assert file["callbacks"][key] == pytest.approx(state, rel=1e-12), (name, key)
        for key, value in one["state_dict"].items():
            if isinstance(value, Tensor):
                assert (file["state_dict"][key] - value).abs().max() <= 1e-12, (name, key)
            else:
                assert file["state_dict"][key] == value, (name, key)


@pytest.mark.parametrize("name", ["one", "tp2", "pp2", "pp2 x tp2", "fsdp2", "ep2"])
def test_each_layout_continues_with_what_the_file_has(name: str, saved: dict[str, Path]) -> None:
    axes = LAYOUTS[name]
    everywhere = run_ranks(load, size_of(axes), axes, [str(path) for path in saved.values()], connect=False)
    for source, *found in zip(saved.values(), *everywhere, strict=True):
        file = storage.load(source)
        frozen, state = file["loopwright"]["frozen"], file["state_dict"]
        names = [key for key in state if key not in found[0]["buffers"] and not key.endswith("_extra_state")]
        seen = set()
        for rank in found:
            assert all(is_trained == (key not in frozen["parameters"]) for key, is_trained in rank["trained"].items())
            assert all(mode == (key not in frozen["modules"]) for key, mode in rank["training"].items())
            assert all(value == state[key].tolist() for key, value in rank["buffers"].items())
            assert all(calls == state[f"{key}._extra_state"]["calls"] for key, calls in rank["calls"].items())
            losses, counted = (
                next(s for key, s in file["callbacks"].items() if n in key) for n in ("Losses", "OnRank")
            )
            assert rank["user"] == (file["total"], losses["total"], losses["batches"], counted["count"])
            seen |= rank["trained"].keys() | rank["buffers"].keys()
        assert seen >= set(names)


def test_a_fit_in_forked_processes_brings_back_what_all_stages_have() -> None:
    _, one, *counted = fit(1, {}, STEPS)
    _, module, *ours = fit(2, {**LAYOUTS["pp2"], "start_method": "fork"}, STEPS)
    trained = [{name: value.requires_grad for name, value in each.named_parameters()} for each in (one, module)]
    assert trained[0] == trained[1]
    assert (module.center - one.center).abs().max() <= 1e-12
    assert [each.state_dict() for each in ours] == [pytest.approx(each.state_dict(), rel=1e-12) for each in counted]


def test_windows_that_span_epochs_are_refused_with_stages() -> None:
    (text, _) = run_ranks(refused, 2, connect=False)
    assert "accumulate_across_epochs=True with pipeline stages" in text


def refused(rank: int, size: int) -> str:
    with pytest.raises(lw.ConfigError) as caught:
        fit(size, LAYOUTS["pp2"], STEPS, accumulate_across_epochs=True)
    return str(caught.value)


def count(rank: int, size: int) -> list[int]:
    summary = summarize(fit(size, LAYOUTS["pp2"], 0)[1])
    return [summary.total_parameters, *(row.num_parameters for row in summary.layers)]


def test_a_summary_counts_the_parameters_of_all_stages() -> None:
    net = Net()
    counts = [sum(one.numel() for one in part.parameters()) for part in (net, net.net, net.head)]
    assert run_ranks(count, 2, connect=False) == [counts, counts]
