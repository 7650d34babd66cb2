"""Optimizers that train on other weights than those to evaluate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import loopwright as lw


class Doubling(torch.optim.SGD):
    """The weights to evaluate are twice those of training, plus what rounds when it is computed back."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, momentum=0.9)
        for group in self.param_groups:
            group["train_mode"] = False

    @torch.no_grad()
    def _change(self, factor: float, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not to_train:
                for parameter in group["params"]:
                    if parameter in self.state:
                        parameter.mul_(factor)
                group["train_mode"] = to_train

    def eval(self) -> None:
        self._change(1.7, to_train=False)

    def train(self) -> None:
        self._change(1 / 1.7, to_train=True)

    def step(self, closure: Any = None) -> Any:
        assert all(group["train_mode"] for group in self.param_groups)
        return super().step(closure)


def schedule_free(params: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("schedulefree").AdamWScheduleFree(params, lr=0.05)  # type: ignore[no-any-return]


class Net(lw.Module):
    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.make = make
        self.losses: list[Tensor] = []
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.layer.weight.detach().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


class Saving(lw.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"validated{trainer.global_step}.ckpt")


def fit(make: Any, folder: Path, *, saves: bool = True, **others: Any) -> tuple[Net, lw.Trainer]:
    loader = DataLoader(torch.linspace(-1, 1, 24).view(8, 3), batch_size=1)
    net = Net(make)
    trainer = lw.Trainer(
        accelerator="cpu", max_steps=6, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=0,
        val_check_interval=3 if saves else None, limit_val_batches=1 if saves else 0,
        callbacks=[Saving(folder)] if saves else None,
    )  # fmt: skip
    trainer.fit(net, loader, loader if saves else None, **others)
    return net, trainer


@pytest.mark.parametrize("make", [Doubling, schedule_free])
def test_weights_to_evaluate_are_validated_and_saved_and_training_is_as_without(make: Any, tmp_path: Path) -> None:
    plain, _ = fit(make, tmp_path, saves=False)
    net, trainer = fit(make, tmp_path)
    assert torch.equal(torch.stack(net.losses), torch.stack(plain.losses))
    for name in ("step3", "validated3"):
        content = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert torch.equal(content["state_dict"]["layer.weight"], net.seen[0]), name
        again, _ = fit(make, tmp_path / name, ckpt_path=tmp_path / f"{name}.ckpt")
        assert torch.equal(torch.stack(again.losses), torch.stack(plain.losses)[3:]), name
        assert torch.equal(again.layer.weight, net.layer.weight)
    # After training, the module has the weights to evaluate, and a checkpoint the state of training too.
    assert torch.equal(net.layer.weight, net.seen[-1])
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    ended, validated = (torch.load(tmp_path / f"{one}.ckpt", weights_only=True) for one in ("end", "step6"))
    assert torch.equal(ended["state_dict"]["layer.weight"], net.layer.weight)
    groups = [one["optimizer_states"][0]["param_groups"][0]["train_mode"] for one in (ended, validated)]
    assert groups == [True, True]


def test_an_optimizer_of_torch_is_left_alone(tmp_path: Path) -> None:
    net, _ = fit(lambda parameters: torch.optim.SGD(parameters, lr=0.1), tmp_path)
    content = torch.load(tmp_path / "validated3.ckpt", weights_only=True)
    assert torch.equal(content["state_dict"]["layer.weight"], net.seen[0])
