"""The note on an error says where in the run it happened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import loopwright as lw
from loopwright.errors import LoopwrightError


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def note_of(module: lw.Module, loader: Any = None, **arguments: Any) -> str:
    trainer = lw.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **arguments,
    )  # fmt: skip
    with pytest.raises(Exception, match="broken") as caught:
        trainer.fit(module, loader if loader is not None else DataLoader(torch.ones(12, 4), batch_size=4))
    assert not isinstance(caught.value, LoopwrightError)
    return next(note for note in caught.value.__notes__ if note.startswith("Loopwright: in"))


class BreaksBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        BreaksBackward.calls += 1
        if BreaksBackward.calls == 2:
            raise RuntimeError("broken")
        return gradients[0]


def test_an_error_in_the_backward_pass() -> None:
    class Broken(Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = BreaksBackward.apply(super().training_step(batch, batch_idx))  # type: ignore[no-untyped-call]
            return loss

    BreaksBackward.calls = 0
    assert note_of(Broken()) == (
        "Loopwright: in the backward pass of training_step, trainer.fit, stage train, epoch 0, step 1, batch 1"
    )


def test_an_error_in_the_training_step() -> None:
    class Broken(Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("broken")

    assert note_of(Broken()) == "Loopwright: in training_step, trainer.fit, stage train, epoch 0, step 0, batch 0"


def test_an_error_in_the_optimizer_step() -> None:
    class BrokenSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("broken")

    class Broken(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return BrokenSGD(self.parameters(), lr=0.01)

    assert note_of(Broken()) == "Loopwright: in the optimizer step, trainer.fit, stage train, epoch 0, step 0, batch 0"


class BrokenData(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise RuntimeError("broken")
        return torch.ones(4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_dataset_names_the_batch_that_could_not_be_read(num_workers: int) -> None:
    loader = DataLoader(BrokenData(), batch_size=4, num_workers=num_workers)
    assert (
        note_of(Net(), loader) == "Loopwright: in the data loader, trainer.fit, stage train, epoch 0, step 2, batch 2"
    )


def test_an_error_in_a_generator_of_batches() -> None:
    class Batches:
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.ones(4, 4)
            raise RuntimeError("broken")

    assert note_of(Net(), Batches()).startswith("Loopwright: in the data loader, trainer.fit, stage train, epoch 0")


def test_an_error_in_the_transfer_of_a_batch() -> None:
    class Batch:
        def to(self, *args: Any, **kwargs: Any) -> Batch:
            raise RuntimeError("broken")

    note = note_of(Net(), [Batch()])
    assert note == (
        "Loopwright: in the transfer of a batch to the device, trainer.fit, stage train, epoch 0, step 0, batch 0"
    )


def test_an_error_in_a_hook_that_cannot_log() -> None:
    class Broken(Net):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            raise RuntimeError("broken")

    assert note_of(Broken()) == "Loopwright: in on_before_backward, trainer.fit, stage train, epoch 0, step 0, batch 0"


def test_an_error_in_a_callback() -> None:
    class Broken(lw.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise RuntimeError("broken")

    note = note_of(Net(), callbacks=[Broken()])
    assert note == "Loopwright: in on_train_batch_end, trainer.fit, stage train, epoch 0, step 1"


def test_an_error_in_gradient_clipping() -> None:
    class Broken(Net):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("broken")

    note = note_of(Broken(), gradient_clip_val=1.0)
    assert note.startswith("Loopwright: in configure_gradient_clipping, trainer.fit")
