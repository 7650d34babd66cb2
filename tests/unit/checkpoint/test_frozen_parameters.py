"""Checkpoints of modules with `exclude_frozen_parameters`: what they contain, and what loading them requires."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.checkpoint.frozen_parameters import leave_out
from loopwright.errors import CheckpointError

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Adapted(lw.Module):
    """A frozen base with a batch norm and tied weights, and a trained head."""

    exclude_frozen_parameters = True

    def __init__(self, *, num_heads: int = 1, has_wide_base: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.base = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        if has_wide_base:
            self.base.append(nn.Linear(4, 4))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.base[0].weight
        for one in self.parameters():
            one.data = torch.randn(one.shape, generator=generator)
        self.requires_grad_(False)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(num_heads))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.tied(self.base(batch[0]))
        return torch.stack([head(found).square().mean() for head in self.heads]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([one for one in self.parameters() if one.requires_grad], lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(2))), batch_size=4)


def fitted(module: Adapted, max_steps: int, ckpt_path: Path | None = None) -> lw.Trainer:
    trainer = lw.Trainer(max_steps=max_steps, enable_checkpointing=False, **QUIET)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    fitted(Adapted(), 2).save_checkpoint(tmp_path / "half.ckpt")
    return tmp_path / "half.ckpt"


def test_frozen_parameters_are_left_out_and_buffers_are_not(saved: Path) -> None:
    buffers = [f"base.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert sorted(torch.load(saved, weights_only=True)["state_dict"]) == sorted(
        ["heads.0.weight", "heads.0.bias", *buffers]
    )


def test_a_resumed_run_is_the_uninterrupted_one(saved: Path) -> None:
    torch.manual_seed(3)
    expected = Adapted()
    fitted(expected, 4)
    module = Adapted()
    fitted(module, 4, saved)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in module.state_dict().items())


def test_load_from_checkpoint_keeps_the_base_of_the_module(saved: Path) -> None:
    module = Adapted.load_from_checkpoint(saved)
    assert torch.equal(module.base[0].weight, Adapted().base[0].weight)
    assert torch.equal(module.heads[0].weight, torch.load(saved, weights_only=True)["state_dict"]["heads.0.weight"])


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"num_heads": 2}, "missing keys heads.1.weight, heads.1.bias and no unexpected keys"),
        ({"num_heads": 0}, "no missing keys and unexpected keys heads.0.weight, heads.0.bias"),
        ({"has_wide_base": True}, "missing keys base.3.weight, base.3.bias"),
    ],
)
def test_other_names_are_still_required(saved: Path, arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(CheckpointError, match=names):
        lw.Trainer(**QUIET).predict(Adapted(**arguments), loader(), ckpt_path=saved)
    with pytest.raises(CheckpointError, match=names):
        Adapted.load_from_checkpoint(saved, **arguments)


def test_a_module_that_does_not_leave_out_requires_all(saved: Path) -> None:
    module = Adapted()
    module.exclude_frozen_parameters = False
    with pytest.raises(CheckpointError, match=r"Missing key.*base.0.weight"):
        fitted(module, 4, saved)


def test_parameters_that_an_optimizer_has_are_kept() -> None:
    module = Adapted()
    base = module.base[0]
    with pytest.warns(UserWarning, match="an optimizer has 2 of its 7 frozen parameters"):
        state, names = leave_out(module.state_dict(), module, [base.weight, *module.heads.parameters()])
    assert "base.0.weight" in state
    assert "tied.weight" in state
    assert names == ["base.0.bias", "base.1.bias", "base.1.weight", "base.2.bias", "base.2.weight"]


def test_entries_that_belong_to_a_parameter_are_left_out_with_it() -> None:
    module = Adapted()
    entries = {f"base.0.weight.{name}": torch.ones(1) for name in ("absmax", "quant_state.bitsandbytes__nf4")}
    state = leave_out({**module.state_dict(), **entries}, module, [])[0]
    assert not any(name.startswith("base.0.weight") for name in state)
    assert "base.1.running_mean" in state
