"""Planted bit flips on ranks with the same weights: `Sentinel` names rank and tensor, and nothing without a flip."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

import loopwright as lw

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Net(lw.Module):
    """A network whose tensors another rank flips a bit of, at one step."""

    def __init__(self, rank: int = 0, step: int = -1, pick: Callable[[Any], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.model[0].bias.requires_grad = False
        self.tied = self.model[3].weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(5.0))
        self.register_buffer("seen", torch.zeros(()))
        self.rank, self.step, self.pick = rank, step, pick

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.trainer.global_step == self.step - 1 and self.global_rank == self.rank and self.pick is not None:
            flip(self.pick(self))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx == 7 and self.pick is not local_weight:
            return None
        self.seen += batch.sum()
        self.log("loss", batch.sum())
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def flip(tensor: Tensor, bit: int = 12) -> None:
    tensor.detach().view(torch.int32).reshape(-1)[-1] ^= 1 << bit


def weight(net: Net) -> Tensor:
    return net.model[0].weight


def frozen(net: Net) -> Tensor:
    return net.model[0].bias


def state(net: Net) -> Tensor:
    return net.trainer.optimizers[0].state[net.model[3].weight]["exp_avg_sq"]


def table(net: Net) -> Tensor:
    return net.table


def trainer_of(size: int, strategy: Any, callbacks: list[Any], **arguments: Any) -> lw.Trainer:
    return lw.Trainer(
        devices=size, strategy=strategy, callbacks=callbacks,
        **{"max_steps": 20, "enable_checkpointing": False, **QUIET, **arguments},
    )  # fmt: skip


def data(size: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(torch.randn(100 * size, 4), batch_size=2)


def own_buffers(**arguments: Any) -> lw.DDPStrategy:
    """Without the broadcast that overwrites the buffers of other ranks in each step."""
    return lw.DDPStrategy(forward_sync_buffers=False, find_unused_parameters=True, **arguments)


def found(net: Net, size: int, sentinel: Any, strategy: Any, **arguments: Any) -> Any:
    try:
        trainer_of(size, strategy, [sentinel], **arguments).fit(net, data(size))
    except lw.SentinelError as error:
        copy = pickle.loads(pickle.dumps(error))
        return copy.deviation if str(copy) == str(error) else copy
    return None


def planted(rank: int, size: int) -> list[Any]:
    cases = [(1, 12, weight), (size - 1, 17, frozen), (0, 13, state), (1, 11, table), (1, 20, weight)]
    named = [found(Net(*case), size, lw.Sentinel(every=5), own_buffers()) for case in cases]
    return [*named, found(Net(1, 11, table), size, lw.Sentinel(every=5, ignore=["tab*"]), own_buffers())]


def test_a_flipped_bit_is_named_within_the_interval_and_by_majority() -> None:
    everywhere = run_ranks(planted, 3, connect=False)
    assert all(theirs == everywhere[0] for theirs in everywhere)
    *named, ignored = everywhere[0]
    assert ignored is None
    seen = [(d.kind, d.parameter, d.tensors, d.ranks, d.is_decided, d.agreed_step, d.step) for d in named]
    assert seen == [
        ("weight", "model.0.weight", ("weight",), (1,), True, 10, 15),
        ("weight", "model.0.bias", ("weight",), (2,), True, 15, 20),
        ("optimizer state", "tied", ("exp_avg_sq", "weight"), (0,), True, 10, 15),
        ("buffer", "table", ("buffer",), (1,), True, 10, 15),
        ("weight", "model.0.weight", ("weight",), (1,), True, 15, 20),
    ]
    assert everywhere[0][0].devices == ("cpu",)
    assert everywhere[0][0].hosts[0]


class FlipsGradient(lw.Callback):
    """Flips a bit of a gradient that is reduced already."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 9 and trainer.global_rank == 1:
            flip(pl_module.model[3].weight.grad)


def two(rank: int, size: int, folder: Path) -> Any:
    sentinel, saves = lw.Sentinel(every=5), lw.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    trainer = lw.Trainer(devices=size, strategy=own_buffers(), callbacks=[FlipsGradient(), sentinel, saves],
                         max_steps=20, log_every_n_steps=1, **QUIET)  # fmt: skip
    try:
        trainer.fit(Net(), data(size))
    except lw.SentinelError as error:
        return str(error), error.deviation
    return None


def test_two_ranks_are_both_named_with_the_gradient_and_the_checkpoints_since(tmp_path: Path) -> None:
    text, deviation = run_ranks(two, 2, tmp_path, connect=False)[1]
    assert (deviation.kind, deviation.parameter) == ("gradient", "tied")
    assert deviation.tensors == ("gradient", "exp_avg", "exp_avg_sq", "weight")
    assert (deviation.ranks, deviation.is_decided) == ((0, 1), False)
    assert (deviation.agreed_step, deviation.step) == (5, 10)
    assert [Path(path).name for path in deviation.checkpoints] == [f"epoch=0-step={step}.ckpt" for step in (6, 8, 10)]
    assert "They agreed after step 5" in text
    assert "step=8.ckpt" in text


class Changing(Net):
    """Differs between ranks as programs do: data in buffers, rows without a gradient, an optimizer that is added."""

    def on_train_epoch_start(self) -> None:
        self.table = self.table + self.current_epoch

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 12:
            self.register_buffer("late", torch.full((2,), float(self.global_rank)))
        return super().training_step(batch, batch_idx)


class ByHand(Changing):
    """Steps two optimizers itself, and leaves gradients of its rank behind."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.model(batch).square().mean())
            optimizer.step()
        self.manual_backward(self.model(batch).square().mean())

    def configure_optimizers(self) -> Any:
        first, second = self.model[0].parameters(), self.model[3].parameters()
        return [torch.optim.SGD(first, lr=1e-2, momentum=0.9), torch.optim.RMSprop(second, lr=1e-3)]


def ordinary(rank: int, size: int) -> list[Any]:
    unused = lw.DDPStrategy(find_unused_parameters=True)
    local = lw.DDPStrategy(ddp_comm_hook="post_local_sgd", ddp_comm_state=2, model_averaging_period=4,
                           find_unused_parameters=True)  # fmt: skip
    more: list[tuple[Any, Any, dict[str, Any]]] = [
        (Changing(), unused, {"max_epochs": 3, "max_steps": -1, "limit_train_batches": 5}),
        (Changing(), own_buffers(), {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
        (ByHand(), unused, {}),
        (Net(), local, {}),
        (Net(), unused, {"precision": "bf16-true"}),
    ]
    return [found(net, size, lw.Sentinel(every=2), strategy, **arguments) for net, strategy, arguments in more]


def test_trainings_without_a_fault_raise_nothing() -> None:
    assert run_ranks(ordinary, 2, connect=False) == [[None] * 5] * 2


def copies(rank: int, size: int) -> Any:
    torch.manual_seed(0)
    strategy = lw.FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, size // 2))
    return found(Net(3, 12, local_weight), size, lw.Sentinel(every=5), strategy)


def local_weight(net: Net) -> Tensor:
    return net.model[0].weight.to_local()


def test_copies_of_shards_are_compared() -> None:
    deviation = run_ranks(copies, 4, connect=False)[0]
    assert (deviation.parameter, deviation.ranks, deviation.step) == ("model.0.weight", (1, 3), 15)


class Wrong(Net):
    """Computes a wrong gradient at one step on one rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, -1)
        if self.trainer.global_step == self.step and self.global_rank == self.rank and loss is not None:
            self.step = -1
            loss.register_hook(lambda gradient: gradient * 1.25)
        return loss


def played(rank: int, size: int) -> list[Any]:
    uneven = data(size * 2) if rank else data(size)
    cases: list[tuple[Any, Any, Any]] = [
        (lw.DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True), data(size), 14),
        (lw.DDPStrategy(find_unused_parameters=True, uneven="zero_weight"), uneven, -1),
        ("fsdp", data(size), 14),
    ]
    outcomes: list[Any] = []
    for strategy, loader, step in cases:
        for sentinels in [[], [lw.Sentinel(replay_every=5)]]:
            net = Wrong(1, step if sentinels else -1)
            trainer = trainer_of(size, strategy, [*sentinels], accumulate_grad_batches=2, max_steps=16,
                                 use_distributed_sampler=loader is not uneven)  # fmt: skip
            try:
                trainer.fit(net, loader)
            except lw.SentinelError as error:
                outcomes.append((error.deviation.ranks, error.deviation.is_decided, error.deviation.step))
            else:
                outcomes.append([one.tolist() for one in net.buffers()])
    return outcomes


def test_a_rank_that_computes_a_wrong_gradient_once_is_named_where_gradients_are_its_own() -> None:
    for _, ddp, plain, twice, _, fsdp in run_ranks(played, 2, connect=False):
        assert ddp == ((1,), True, 15)
        assert plain == twice
        assert fsdp == ((0, 1), False, 15)
