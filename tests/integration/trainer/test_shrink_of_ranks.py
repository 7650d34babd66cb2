"""Trainer(on_oom="shrink") on several ranks: where one runs out of memory, all repeat the window in smaller parts.

No rank waits for another in a collective, and the training is that of ranks that were never short.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import quiet

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.strategies import DDPStrategy, FSDPStrategy
from loopwright.strategies.memory_report import memory_report

# Any in this file: batches, strategies, and results that travel between processes.

WIDTH = 12
Short = dict[int, tuple[int, str, int]]  # step -> rank, where it runs out of memory, and the most samples that fit
SHORT: Short = {0: (1, "first block", 4), 1: (0, "last block", 2), 4: (1, "backward", 1)}
BACKWARD: Short = {0: (0, "backward", 4), 2: (1, "first block", 2), 3: (0, "last block", 1)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise torch.OutOfMemoryError("planted")
        x = x + torch.tanh(self.layer(x))
        if self.fails == "backward":
            x.register_hook(_run_out)
        return x


def _run_out(gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("planted")


class Net(lw.Module):
    def __init__(self, short: Short) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.short = short

    def training_step(self, batch: Any, batch_idx: int) -> lw.Loss:
        x, weight = batch
        rank, where, most = self.short.get(self.trainer.global_step, (-1, "", 0))
        is_short = rank == self.trainer.global_rank and len(x) > most
        first, last = self.blocks[0], self.blocks[2]
        first.fails = last.fails = ""
        if is_short and where == "first block":
            first.fails = "forward"
        elif is_short and where == "last block":
            last.fails = "forward"
        elif is_short:
            first.fails = "backward"
        for block in self.blocks:
            x = block(x)
        losses = self.head(x).square().flatten() * weight
        self.log("loss", lw.Loss(losses.sum(), weight.sum()), on_step=False, on_epoch=True)
        return lw.Loss(losses.sum(), weight.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def strategy_of(name: str) -> Any:
    if name == "ddp":
        return "ddp"
    return FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy="FULL_SHARD")


def train(rank: int, size: int, name: str, short: Short, **arguments: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    samples = torch.randn(60, WIDTH, generator=generator), torch.rand(60, generator=generator)
    module = Net(short)
    options = {"max_epochs": 2, "accelerator": "cpu", "devices": size, "strategy": strategy_of(name), **arguments}
    trainer = quiet(**options)
    trainer.fit(module, DataLoader(TensorDataset(*samples), batch_size=8))
    state = trainer.full_state_dict(module)
    return state, trainer.progress.parts_per_batch, trainer.global_step, float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("planted", "arguments"),
    [(SHORT, {}), (BACKWARD, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})],
    ids=["plain", "accumulated and clipped"],
)
def test_all_ranks_repeat_a_window_for_which_one_has_no_memory(
    name: str, planted: Short, arguments: dict[str, Any]
) -> None:
    (whole, _, steps, loss), *_ = run_ranks(train, 2, name, {}, connect=False, precision="64-true", **arguments)
    options = {"precision": "64-true", "on_oom": "shrink", **arguments}
    for state, parts, found_steps, found_loss in run_ranks(train, 2, name, planted, connect=False, **options):
        assert parts == 8
        assert found_steps == steps
        assert found_loss == pytest.approx(loss, rel=1e-6)  # logged in float32
        for key, value in state.items():
            torch.testing.assert_close(value, whole[key], rtol=1e-12, atol=1e-12, msg=key)


def refuse(rank: int, size: int, cases: dict[str, dict[str, Any]]) -> list[str]:
    found = []
    for options in cases.values():
        with pytest.raises(ConfigError) as caught:
            train(rank, size, "ddp", {}, on_oom="shrink", **options)
        found.append(str(caught.value))
    return found


def test_what_communicates_within_a_pass_is_refused_by_name() -> None:
    cases: dict[str, dict[str, Any]] = {
        "pipeline stages": {"strategy": "mesh:pp=2"},
        "sync_batchnorm=True": {"sync_batchnorm": True},
        "ddp_comm_hook": {"strategy": DDPStrategy(ddp_comm_hook="bf16")},
    }
    for errors in run_ranks(refuse, 2, cases, connect=False):
        for reason, error in zip(cases, errors, strict=True):
            assert "on_oom='shrink' with" in error
            assert reason in error


class Report(lw.Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.owners = memory_report(pl_module, error=exception).owners


def report(rank: int, size: int) -> dict[str, int]:
    callback = Report()
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        train(rank, size, "fsdp", {0: (rank, "last block", 0)}, callbacks=[callback])
    assert "gathered units" in "".join(caught.value.__notes__)
    return callback.owners


def test_the_report_of_a_sharded_module_has_gathered_units() -> None:
    block, head = 4 * (WIDTH * WIDTH + WIDTH), 4 * (WIDTH + 1)
    for owners in run_ranks(report, 2, connect=False):
        assert owners["parameters"] == pytest.approx((3 * block + head) / 2, abs=64)  # shards are padded
        assert block + head <= owners["gathered units"] <= 2 * (block + head)  # the last block, and the root
        assert owners["activations"] > 0
