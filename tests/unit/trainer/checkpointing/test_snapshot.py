"""What a resume puts back of a module beside its weights: what is frozen, and modes; compiled or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw

# Any in this file: batches.


class Compiled(nn.Module):
    """Has the names that torch.compile makes, and compiles nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._orig_mod(x)
        return result


class Net(lw.Module):
    """A norm in evaluation mode, and a frozen layer, which a hook changes for others.

    Args:
        is_compiled: Whether the first layers are compiled.
        changes: Whether the hook does so.
    """

    def __init__(self, *, is_compiled: bool, changes: bool) -> None:
        super().__init__()
        self.first: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.last = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.last[0].requires_grad_(False)
        self.last[1].eval()
        self.changes = changes
        self.parts = (self.first, self.last)
        if is_compiled:
            self.first = Compiled(self.first)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.changes:
            first, last = self.parts
            assert isinstance(first, nn.Sequential)
            first[0].requires_grad_(False)
            first[1].eval()
            last[0].requires_grad_(True)
            last[1].train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.last(self.first(batch[0])).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Net, steps: int, ckpt_path: Path | None = None) -> lw.Trainer:
    trainer = lw.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(("before", "after"), [(False, False), (True, False), (False, True)])
def test_frozen_layers_and_modes_are_those_of_the_checkpoint(before: bool, after: bool, tmp_path: Path) -> None:
    fit(Net(is_compiled=before, changes=True), 1).save_checkpoint(tmp_path / "x.ckpt")
    module = Net(is_compiled=after, changes=False)
    fit(module, 2, tmp_path / "x.ckpt")
    trained = {name.replace("_orig_mod.", ""): one.requires_grad for name, one in module.named_parameters()}
    assert trained == {name: not name.startswith("first.0") for name in trained}
    assert [part.get_submodule("1").training for part in module.parts] == [False, True]
