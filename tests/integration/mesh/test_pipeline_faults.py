"""Steps that cannot be pipelined: each is an error that names its cause, on some rank, and no rank waits forever."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import MeshStrategy

# Any in this file: batches.

WIDTH = 4


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.last(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Skip(Net):
    def forward(self, x: Tensor) -> Tensor:
        start = x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.last(x + start))


class Twice(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch[0]) - self(-batch[0])).square().mean()


class Reads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        penalty = sum(cast(Tensor, one[0].weight).square().sum() for one in cast(Any, self.blocks))
        return self(batch[0]).square().mean() + penalty


class ReadsAfter(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean() + self.first.weight.square().sum()


class Penalty(Net):
    """Adds up all parameters, of which a stage has some."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean() + sum(one.square().sum() for one in self.parameters())


class PenaltyOfBlock(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean() + sum(one.abs().sum() for one in self.blocks[0].parameters())


class Forces(Net):
    """Differentiates within a step with respect to the batch, from which each block computes, too, or none."""

    is_reached, allow_unused = True, False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        places = batch[0].clone().requires_grad_()
        x = self.first(places)
        for block in self.blocks:
            x = block(x + places.cos() if self.is_reached else x)
        energy = self.last(x).sum()
        (force,) = torch.autograd.grad(energy, places, create_graph=True, allow_unused=self.allow_unused)
        return energy if force is None else force.square().mean()


class NoForces(Forces):
    is_reached = False


class LostForces(NoForces):
    allow_unused = True


class Transformed(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.func.grad(lambda x: self(x).sum())(batch[0]).square().mean()


class Checkpointed(Net):
    """Computes the activations of blocks again in the backward pass, by torch's own function around them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return cast(Tensor, self.last(x))


class Reentrant(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return cast(Tensor, self.last(x))


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Closure(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class NoLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 3 else loss


class ByValue(Net):
    """The shape of the hidden state follows from values of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[: 1 + int(x.sum().item() > 0)])


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 5:
            raise ValueError("planted")
        return loss


def fit(rank: int, size: int, make: Callable[[], Net]) -> str:
    torch.manual_seed(0)
    trainer = lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(pp=2), devices=size, max_epochs=1, logger=False,
        accumulate_grad_batches=1 if make is ByHand else 2, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    try:
        trainer.fit(make(), DataLoader(TensorDataset(data), batch_size=2))
    # Whatever it is: its text is compared.
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "no error"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Skip, "NonFiniteError: the loss of the first micro-batch is NaN.*blocks.2 or what follows it"),
        (Twice, "Expected a step to call the module once, got a second call"),
        (Reads, r"read blocks.[02].0.weight \(square\), which stage [01]"),
        (ReadsAfter, r"read first.weight \(square\), which stage 0"),
        (Penalty, r"read first.weight \(square\), which stage 0 .* let the optimizer .*weight_decay="),
        (PenaltyOfBlock, r"read blocks.0.0.weight \(abs\), which stage 0"),
        (Forces, "gradients through the blocks of a pipeline to the backward pass, got a gradient within the step"),
        (NoForces, "a gradient within the step of a tensor that no block of this stage computes from"),
        (LostForces, "a gradient within the step of a tensor that no block of this stage computes from"),
        (Transformed, "got a transform of torch.func"),
        (Checkpointed, "got torch.utils.checkpoint around blocks.0: .* activation_checkpointing=True"),
        (Reentrant, "got torch.utils.checkpoint around blocks.0"),
        (ByHand, "Expected automatic optimization with pipeline stages, got ByHand"),
        (Closure, "LBFGS cannot be used with MeshStrategy"),
        (NoLoss, "where None skips a batch"),
        (ByValue, r"pass on \((1|2), 4\), as for an earlier batch of the same shapes"),
        (Fails, "ValueError: planted"),
    ],
)
def test_what_cannot_be_pipelined_is_named(make: Callable[[], Net], text: str) -> None:
    answers = run_ranks(fit, 2, make, connect=False, timeout_s=60)
    assert "no error" not in answers
    assert any(re.search(text, answer, re.DOTALL) for answer in answers), answers


def refused(rank: int, size: int, arguments: dict[str, Any]) -> str:
    try:
        trainer = lw.Trainer(
            accelerator="cpu", strategy=MeshStrategy(pp=2), devices=size, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **arguments,
        )  # fmt: skip
        trainer.fit(Net(), DataLoader(TensorDataset(torch.zeros(4, WIDTH))))
    except lw.errors.ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"compile": True}, "compile= cannot be used with MeshStrategy: a step of a pipeline stage"),
        ({"callbacks": lw.callbacks.EMAWeightAveraging()}, "each pipeline stage has only some of them"),
    ],
)
def test_what_needs_the_entire_model_is_refused(arguments: dict[str, Any], text: str) -> None:
    answers = run_ranks(refused, 2, arguments, connect=False, timeout_s=60)
    assert all(text in answer for answer in answers), answers
