"""Steps that are run twice: no trace in the run, and a gradient that differs once is found before the step."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import loopwright as lw

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_steps": 20, "log_every_n_steps": 1,
}  # fmt: skip
PRIVATE = torch.Generator()


class Drawing(lw.Module):
    """Draws, changes its batch and its buffers, and logs; its gradient has one wrong element at one step if asked."""

    def __init__(self, wrong_at: int = -1, *, is_private: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.mean = MeanMetric()
        self.wrong_at, self.is_private = wrong_at, is_private
        self.calls = self.after_backward = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls += 1
        batch.mul_(1 + random.random())
        hidden = self.model[:3](batch + torch.randn(()))
        if self.trainer.global_step == self.wrong_at:
            self.wrong_at = -1
            hidden.register_hook(lambda gradient: gradient + 1e-6)
        loss = self.model[3](hidden).square().mean()
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss * torch.rand((), generator=PRIVATE) if self.is_private else loss

    def on_after_backward(self) -> None:
        self.after_backward += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(net: Drawing, *callbacks: lw.Callback, **arguments: Any) -> list[Any]:
    """Train, and return what a run leaves."""
    torch.manual_seed(1)
    random.seed(1)
    trainer = lw.Trainer(**{**QUIET, **arguments}, callbacks=list(callbacks))
    trainer.fit(net, DataLoader(torch.randn(200, 4), batch_size=2, shuffle=True))
    tensors = [*net.parameters(), *net.buffers(), *(one.grad for one in net.parameters() if one.grad is not None)]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    drawn = float(torch.rand(())), random.random()
    return [*(one.tolist() for one in tensors), logged, drawn, float(net.mean.compute()), net.after_backward]


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}])
def test_a_step_that_is_run_twice_leaves_no_trace(arguments: dict[str, Any]) -> None:
    plain, twice = Drawing(), Drawing()
    assert fit(twice, lw.Sentinel(replay_every=5), **arguments) == fit(plain, **arguments)
    assert twice.calls == plain.calls * 6 // 5


def test_a_gradient_that_differs_once_is_found_before_the_weights_change() -> None:
    net = Drawing(wrong_at=14)
    with pytest.raises(lw.SentinelError, match="the second and the third run differ from the first") as caught:
        fit(net, lw.Sentinel(replay_every=5))
    deviation = caught.value.deviation
    assert (deviation.kind, deviation.parameter, deviation.ranks) == ("played step", "model.0.weight", (0,))
    assert (deviation.agreed_step, deviation.step) == (10, 15)
    until = Drawing()
    fit(until, max_steps=14)
    assert [one.tolist() for one in net.parameters()] == [one.tolist() for one in until.parameters()]


def test_steps_that_are_never_the_same_are_reported_as_such_and_not_run_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = Drawing(is_private=True)
    with caplog.at_level(logging.WARNING, logger="loopwright"):
        fit(net, lw.Sentinel(replay_every=5))
    assert "three different gradients" in caplog.text
    assert "deterministic=True" in caplog.text
    assert net.calls == 22


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"accumulate_across_epochs": True}, "another epoch"), ({"on_oom": "shrink"}, "repeats or runs")],
)
def test_windows_that_cannot_be_repeated_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(lw.ConfigError, match=reason):
        fit(Drawing(), lw.Sentinel(replay_every=5), **arguments)


class Following(Drawing):
    """A target network follows the trained one, by tensors or by their data; layers are unfrozen during training."""

    def __init__(self, moves: str) -> None:
        super().__init__()
        self.target = nn.Linear(4, 8).requires_grad_(False)
        self.added = nn.Linear(4, 8).requires_grad_(False)
        self.moves = moves

    def move(self) -> None:
        for one, target in zip(self.model[0].parameters(), self.target.parameters(), strict=True):
            target.data.lerp_(one.data, 0.1)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.moves == "unfreezes" and self.trainer.global_step == 4:  # the fifth step is run twice
            self.added.requires_grad_()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.moves == "before zero_grad":
            self.move()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.moves == "in the step":
            self.move()
        own = batch.clone()  # the step below changes its batch
        apart = self.model[0](own) + self.added(own) - self.target(own)
        return super().training_step(batch, batch_idx) + apart.square().mean()


@pytest.mark.parametrize("moves", ["in the step", "before zero_grad", "unfreezes"])
def test_parameters_that_change_within_a_step_do_so_once(moves: str) -> None:
    plain, twice = Following(moves), Following(moves)
    assert fit(twice, lw.Sentinel(replay_every=5)) == fit(plain)
    assert twice.calls > plain.calls


def test_gradients_are_divided_by_the_loss_scale_once() -> None:
    scaled = {"precision": "16-mixed", "gradient_clip_val": 0.1}
    plain, twice = Drawing(), Drawing()
    assert fit(twice, lw.Sentinel(replay_every=5), **scaled) == fit(plain, **scaled)
    assert twice.calls == plain.calls * 6 // 5
