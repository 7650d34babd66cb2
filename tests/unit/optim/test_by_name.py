"""Optimizers of packages by name: the class, what to install, and runs that are resumed to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import assert_same, loader, quiet

import loopwright as lw
from loopwright.optim import optimizer_class
from loopwright.settings import names

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lars": ("pytorch_optimizer", {"lr": 0.1}),
    "Lamb": ("pytorch_optimizer", {"lr": 1e-2}),
    "adamw_schedule_free": ("schedulefree", {"lr": 1e-2}),
    "sgd-schedulefree": ("schedulefree", {"lr": 1e-1}),
    "AdamW8bit": ("bitsandbytes", {"lr": 1e-2, "min_8bit_size": 64}),
    "AdamW4bit": ("torchao", {"lr": 1e-2, "block_size": 32}),
    "AdamWFp8": ("torchao", {"lr": 1e-2, "block_size": 32}),
}


class Net(lw.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layers = kind, nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return optimizer_class(self.kind)(self.parameters(), **KINDS[self.kind][1])


@pytest.mark.filterwarnings("ignore")  # of the packages, when they are imported
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_bits(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(KINDS[kind][0])
    assert optimizer_class(kind).__module__.startswith(KINDS[kind][0])
    whole, first, resumed = (Net(kind) for _ in range(3))
    quiet(max_steps=6).fit(whole, loader(12))
    trainer = quiet(max_steps=2)
    trainer.fit(first, loader(12))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    quiet(max_steps=6).fit(resumed, loader(12), ckpt_path=tmp_path / "two.ckpt")
    assert_same(resumed, whole)
    assert not torch.equal(first.layers[0].weight, whole.layers[0].weight)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names._OPTIMIZERS, "nowhere", "no_such_package.Nowhere")
    with pytest.raises(lw.ConfigError, match="no_such_package is not installed: pip install no_such_package"):
        optimizer_class("Nowhere")


def test_names_of_torch_are_torchs_and_unknown_ones_are_errors() -> None:
    assert optimizer_class("adam_w") is torch.optim.AdamW
    with pytest.raises(lw.ConfigError, match="did you mean 'Adam'"):
        optimizer_class("AdamV")


@pytest.mark.parametrize("name", ["", "_", None, 3])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(lw.ConfigError, match=r"no Optimizer is called|Expected the name of an optimizer"):
        optimizer_class(name)
