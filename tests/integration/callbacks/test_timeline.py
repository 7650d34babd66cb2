"""The timeline and a profiler on two ranks: waiting for a slow rank is communication, and chosen ranks are profiled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.strategies.distributed.shards import local


class Uneven(lw.Module):
    """Rank 1 is slower than rank 0 in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1:
            time.sleep(0.05)  # much longer than a step
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    rank: int, size: int, root: Path, *, strategy: str = "ddp", is_measured: bool = True, profiler: Any = None
) -> dict[str, Any]:
    trainer = lw.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
        profiler=None if profiler is None else profiler(), gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.timeline.every = 1
    trainer.timeline.is_enabled = is_measured
    module = Uneven()
    trainer.fit(module, DataLoader(torch.ones(24, 4), batch_size=1))
    report = trainer.timeline.report()
    return {
        "weights": [part.clone() for part in local([parameter.detach() for parameter in module.parameters()])],
        "seconds": report.seconds, "bound": report.bound, "steps": report.num_steps, "advice": report.advice,
    }  # fmt: skip


def test_waiting_for_a_slow_rank_is_communication_and_measuring_changes_nothing(tmp_path: Path) -> None:
    fast, slow = run_ranks(fit, 2, tmp_path)
    assert fast["steps"] == slow["steps"] == 12
    assert fast["bound"] == "communication"
    assert "slower rank" in fast["advice"][0]
    assert fast["seconds"]["communication"] > slow["seconds"]["communication"]
    assert slow["bound"] == "compute"
    assert slow["seconds"]["forward"] > 0.5  # what it slept at least
    bare, _ = run_ranks(fit, 2, tmp_path, is_measured=False)
    assert all(torch.equal(one, other) for one, other in zip(bare["weights"], fast["weights"], strict=True))


def fit_sharded(rank: int, size: int, root: Path) -> list[dict[str, Any]]:
    return [fit(rank, size, root, strategy="fsdp", is_measured=is_measured) for is_measured in (True, False)]


def test_gathering_and_reducing_of_a_sharded_model_are_communication(tmp_path: Path) -> None:
    (fast, bare), (slow, _) = run_ranks(fit_sharded, 2, tmp_path)
    assert fast["bound"] == "communication"
    assert fast["seconds"]["communication"] > fast["seconds"]["backward"]
    assert slow["seconds"]["communication"] > 0
    assert all(torch.equal(one, other) for one, other in zip(bare["weights"], fast["weights"], strict=True))


def make_profiler() -> Any:
    from loopwright.profilers import PyTorchProfiler

    return PyTorchProfiler(filename="p", steps="2-3", ranks=[1])


def test_chosen_ranks_write_the_trace(tmp_path: Path) -> None:
    run_ranks(fit, 2, tmp_path, profiler=make_profiler)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        "fit-p-1.txt", "fit-p-1-train.1.pt.trace.json",
    }  # fmt: skip


def test_the_timeline_comes_back_from_processes_that_the_trainer_started(tmp_path: Path) -> None:
    trainer = lw.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.timeline.every = 1
    trainer.fit(Uneven(), DataLoader(torch.ones(12, 4), batch_size=1))
    assert trainer.timeline.num_steps == 6
    assert [record.step for record in trainer.timeline.records] == [1, 2, 3, 4, 5]
    assert trainer.timeline.report().bound == "communication"
