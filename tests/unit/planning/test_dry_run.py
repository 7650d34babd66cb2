"""What a start on many ranks would refuse, from simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from measured_runs import LlamaTask
from tensor_models import Llama
from torch import nn

import loopwright as lw
from loopwright.planning import simulation
from loopwright.planning.dry_run import check_batches, dry_run
from loopwright.planning.simulation import Training
from loopwright.strategies.mesh import MeshStrategy


class Net(lw.Module):
    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.reads = reads

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for block in self.blocks:
            batch = block(batch)
        if self.reads == "size":
            batch = batch[: int(batch.argmax())]
        if self.reads == "number" and batch.sum().item() > 0:
            batch = 2 * batch
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def checks(strategy: Any, *, devices: int, num_batches: int = 4096, accumulate: int = 1, **options: Any) -> list[Any]:
    training = Training(lambda: Net(**options), torch.randn(2, 64), accumulate=accumulate)
    return dry_run(training, strategy, devices=devices, num_batches=num_batches)


def test_a_start_on_many_ranks_that_works_is_simulated_on_the_first_and_the_last() -> None:
    ranks, data = checks("ddp", devices=512)
    assert ranks.name == "ranks 0, 511"
    assert ranks.value.startswith("trains a step")
    assert data.value == "8 batches an epoch for each of 512 ranks, of 4096"
    assert not ranks.is_problem
    assert not data.is_problem


def test_the_first_rank_of_each_stage_is_simulated_too() -> None:
    ranks, data, uneven = checks(MeshStrategy(fsdp=-1, pp=4), devices=64, num_batches=100, accumulate=4)
    assert ranks.name == "ranks 0, 16, 32, 48, 63"
    assert ranks.value.startswith("trains a step")
    assert (data.value, uneven.value[:9]) == ("6 batches an epoch for each of 16 ranks, of 100", "4 batches")


@pytest.mark.parametrize(
    ("strategy", "devices", "what"),
    [
        (MeshStrategy(fsdp=3, tp=2), 512, "6 processes for the mesh fsdp=3, tp=2"),
        (lw.FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(3, 2)), 512, "3 x 2 = 6"),
        (MeshStrategy(pp=8), 8, "at least 8 blocks for 8 stages"),
        ("single_device", 8, "one device"),
    ],
)
def test_what_a_start_refuses_is_a_problem_with_its_remedy(strategy: Any, devices: int, what: str) -> None:
    (found,) = checks(strategy, devices=devices)  # without ranks that train, nothing is known of the data
    assert found.is_problem
    assert what in found.value
    assert found.advice


def test_a_step_that_reads_values_is_no_problem_and_no_success() -> None:
    (found,) = checks("ddp", devices=8, reads="size")
    assert found.value.startswith("not known: the step cannot be simulated (NeedsValues")
    assert not found.is_problem
    found, _ = checks("ddp", devices=8, reads="number")
    assert found.value.endswith("if numbers that the step reads are 1 and conditions False")


@pytest.mark.parametrize("most", [1 << 22, 0])  # 0: layers that are too large to compute with
def test_heads_that_ranks_do_not_divide_stay_whole_or_are_refused_in_a_plan(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> LlamaTask:
        task = LlamaTask()
        task.model = Llama(width=48, heads=3, blocks=2)
        return task

    monkeypatch.setattr(simulation, "_MOST_COMPUTED", most)
    training = Training(build, torch.zeros(4, 32, dtype=torch.int64))
    assert dry_run(training, MeshStrategy(tp=2), devices=2, num_batches=1)[0].value.startswith("trains a step")
    wanted = {"model.blocks.*.attn.w[qkv]": "colwise", "model.blocks.*.attn.wo": "rowwise"}
    refused = dry_run(training, MeshStrategy(tp=2, tensor_plan=wanted), devices=2, num_batches=1)[0]
    assert refused.is_problem
    assert "has 3 heads; tp=2 does not divide them" in refused.value


@pytest.mark.parametrize(
    ("num_batches", "accumulate", "names", "is_problem"),
    [
        (64, 1, ["data"], False),
        (7, 1, ["data"], True),
        (20, 1, ["data", "uneven data"], False),
        (16, 4, ["data", "accumulation"], False),
    ],
)
def test_batches_are_compared_with_the_ranks_that_read_them(
    num_batches: int, accumulate: int, names: list[str], is_problem: bool
) -> None:
    found = check_batches(num_batches, 8, accumulate=accumulate)
    assert [one.name for one in found] == names
    assert found[0].is_problem == is_problem
