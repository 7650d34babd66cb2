"""What a pipelined step changes beside its loss, and what it leaves alone: as on one process, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.errors import ModuleError
from loopwright.strategies import MeshStrategy, Strategy
from loopwright.strategies.distributed.shards import full_tensor, is_sharded
from loopwright.strategies.mesh.pipeline import Pipeline

# Any in this file: batches, and results that travel between processes.

WIDTH = 6


class Block(nn.Module):
    def __init__(self, *, detaches: bool) -> None:
        super().__init__()
        self.layer, self.detaches = nn.Linear(WIDTH, WIDTH), detaches
        self.calls = 0
        self.register_buffer("used", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, shared: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.used += 1
        x = x.detach() if self.detaches else x
        return x + torch.tanh(self.layer(x)) * (1.0 if shared is None else shared)


class Counting(lw.Module):
    """Counts its steps in many ways, from some of which the loss is computed.

    Args:
        detached: Number of a block that detaches its input.
    """

    mean: Tensor
    steps: Tensor

    def __init__(self, detached: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH)).double()
        self.blocks = nn.ModuleList([Block(detaches=number == detached) for number in range(8)]).double()
        self.last = nn.Linear(WIDTH, 1).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.number, self.by_index, self.order, self.seen = 0, {}, [], torchmetrics.SumMetric()  # type: ignore[var-annotated]
        self.evaluations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.number += 1
        self.steps += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.by_index[batch_idx] = self.by_index.get(batch_idx, 0) + 1
        self.order.append(batch_idx)
        self.seen.update(x.sum())
        x = self.first(x - self.mean) * (1 + 1 / self.number)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.last(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluations += 1
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        self.log("val", self.last(x).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=1.0)

    def counts(self) -> list[Any]:
        return [
            self.number, int(self.steps), self.by_index, self.order, float(self.seen.sum_value), self.evaluations,
            self.seen.update_count,
        ]  # fmt: skip


class Sharing(Counting):
    """All blocks take what a module before them computes, which has a gradient where the hidden state has none."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = shared = self.first(batch[0])
        for block in self.blocks:
            hidden = block(hidden, shared)
        return F.mse_loss(self.last(hidden), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:  # gradients of 0 would decay
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)


def fit(strategy: Strategy | str, size: int, detached: int | None, kind: type[Counting] = Counting) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(32, width, generator=generator, dtype=torch.float64) for width in (4, 1))
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, precision="64-true", max_epochs=1, logger=False,
        accumulate_grad_batches=4, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    module = kind(detached)
    data = DataLoader(TensorDataset(x, y), batch_size=2)
    trainer.fit(module, data, data)
    with torch.no_grad():
        own = [*module.named_parameters(), *module.named_buffers()]  # of this rank's stages
        state = {key: full_tensor(one) if is_sharded(one) else one.clone() for key, one in own}
    calls = {key: one.calls for key, one in module.named_modules() if isinstance(one, Block)}
    return state, calls, module.counts()


def pipeline(schedule: str, **axes: int) -> MeshStrategy:
    return MeshStrategy(**{"pp": 2, "fsdp": 1, **axes}, pipeline=Pipeline(schedule=schedule))  # type: ignore[arg-type]


def fit_all(rank: int, size: int) -> list[str]:
    wrong = []
    kinds = [("1f1b", 4), ("1f1b", 5), ("interleaved", None), ("interleaved", 3), ("interleaved", 4), ("zbv", None)]
    for schedule, detached in kinds:
        found, calls, counts = fit(pipeline(schedule), size, detached)
        wanted, all_calls, all_counts = torch.load(f"alone-{detached}.pt")
        at = f"{schedule}, {detached}"
        if counts != all_counts:
            wrong.append(f"{at}: {counts} instead of {all_counts}")
        wrong += [f"{at}: {key}" for key, one in found.items() if not torch.equal(one, wanted[key])]
        wrong += [f"{at}: calls of {key}" for key, count in calls.items() if count not in (0, all_calls[key])]
    found, _, _ = fit(pipeline("interleaved"), size, 4, Sharing)
    wanted = torch.load("sharing.pt")[0]
    wrong += [
        f"shared: {key}"
        for key, one in found.items()
        if key.startswith(("first", "last")) and (one - wanted[key]).abs().max() > 1e-12
    ]
    return wrong


def fit_alone(rank: int, size: int) -> None:
    for detached in (None, 3, 4, 5):
        torch.save(fit("single_device", 1, detached), f"alone-{detached}.pt")
    torch.save(fit("single_device", 1, 4, Sharing), "sharing.pt")


def test_a_step_changes_what_one_process_changes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_ranks(fit_alone, 1, connect=False)
    assert run_ranks(fit_all, 2, connect=False) == [[], []]


def fit_split(rank: int, size: int) -> dict[str, Tensor]:
    weights, _, _ = fit(pipeline("interleaved", fsdp=2), size, 4)
    return {key: one for key, one in weights.items() if key.startswith("blocks.0")}


def test_sharded_stages_that_no_gradient_reaches_stay_as_they_are() -> None:
    begun = dict(Counting(4).state_dict())
    for found in run_ranks(fit_split, 4, connect=False):
        assert all(torch.equal(one, begun[key]) for key, one in found.items() if "layer" in key)


def refuse(rank: int, size: int) -> str:
    with pytest.raises(ModuleError) as caught:
        fit(pipeline("zero-bubble"), size, 4)
    return str(caught.value)


def test_schedules_that_split_backward_refuse_a_detached_stage() -> None:
    for text in run_ranks(refuse, 2, connect=False):
        assert "stage 2 of the pipeline receives with schedule='zero-bubble', got none" in text
