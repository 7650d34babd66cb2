"""A resumed run whose optimizer or schedule is configured otherwise than before: said, refused, or put in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR
from toys import Net, assert_same, loader, net, quiet

from loopwright.errors import CheckpointError
from loopwright.strategies import Strategy


class Configured(Net):
    """Whatever `configure` makes of the module."""

    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def sgd(lr: float = 0.1, momentum: float = 0.9) -> Callable[[Any], Any]:
    return lambda module: SGD(module.parameters(), lr=lr, momentum=momentum)


def in_groups(*layers: int, lrs: tuple[float, ...] = (0.1, 0.2, 0.3)) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        groups = [{"params": module.net[layer].parameters(), "lr": lrs[layer]} for layer in layers]
        return SGD(groups, lr=1.0, momentum=0.9)

    return configure


def stepped(step_size: int, lr: float = 0.1) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=lr)
        return [optimizer], [{"scheduler": StepLR(optimizer, step_size, 0.5), "interval": "step"}]

    return configure


def fit(configure: Any, steps: int, *, kind: type[Any] = Configured, ckpt_path: Any = None, **kwargs: Any) -> Any:
    module = net(kind, configure, **kwargs)
    trainer = quiet(max_steps=steps)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer, module


def saved(configure: Any, path: Path) -> Path:
    trainer, _ = fit(configure, 2)
    trainer.save_checkpoint(path)
    return path


def test_the_same_configuration_says_nothing_whatever_schedules_did(tmp_path: Path, caplog: Any) -> None:
    for number, configure in enumerate((sgd(), stepped(1), in_groups(0, 1, 2))):
        path = saved(configure, tmp_path / f"{number}.ckpt")
        _, resumed = fit(configure, 4, ckpt_path=path)
        assert_same(resumed, fit(configure, 4)[1])
    assert caplog.text == ""


def test_other_values_are_all_said_and_those_of_the_checkpoint_are_used(tmp_path: Path, caplog: Any) -> None:
    trainer, _ = fit(sgd(0.01, 0.5), 4, ckpt_path=saved(sgd(), tmp_path / "a.ckpt"))
    group = trainer.optimizers[0].param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)
    assert "the optimizer: lr=0.01 is configured, and the checkpoint has 0.1" in caplog.text
    assert "momentum=0.5 is configured, and the checkpoint has 0.9" in caplog.text
    caplog.clear()
    trainer, _ = fit(stepped(3, lr=0.2), 4, ckpt_path=saved(stepped(1), tmp_path / "b.ckpt"))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**4
    assert "the optimizer: lr=0.2 is configured, and the checkpoint has 0.1" in caplog.text
    assert "StepLR: step_size=3 is configured, and the checkpoint has 1" in caplog.text


def test_a_value_of_ones_own_can_be_put_in_its_place(tmp_path: Path, caplog: Any) -> None:
    class Own(Configured):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.01

    trainer, _ = fit(sgd(0.01), 4, kind=Own, ckpt_path=saved(sgd(), tmp_path / "a.ckpt"))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01
    assert caplog.text == ""


def test_groups_in_another_order_keep_their_own_state(tmp_path: Path, caplog: Any) -> None:
    path = saved(in_groups(0, 1, 2), tmp_path / "a.ckpt")
    trainer, resumed = fit(in_groups(1, 0, 2), 4, ckpt_path=path)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.2, 0.1, 0.3]
    assert_same(resumed, fit(in_groups(0, 1, 2), 4)[1])
    assert caplog.text == ""


def test_other_groups_are_refused_with_the_names_of_the_parameters(tmp_path: Path) -> None:
    path = saved(in_groups(0, 1), tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"2 groups there and 3 here, net\.2\.weight is new, net\.2\.bias is new"):
        fit(in_groups(0, 1, 2), 4, ckpt_path=path)
    with pytest.raises(CheckpointError, match=r"net\.2\.weight is new.* net\.1\.weight is in none any more"):
        fit(in_groups(0, 2), 4, ckpt_path=path)

    def moved(module: Any) -> Any:
        first, second = module.net[0], module.net[1]
        groups = [{"params": [first.weight, second.bias]}, {"params": [second.weight, first.bias]}]
        return SGD(groups, lr=0.1, momentum=0.9)

    with pytest.raises(CheckpointError, match=r"net\.0\.bias was in group 0 and is in group 1"):
        fit(moved, 4, ckpt_path=path)


def test_renamed_layers_keep_their_places(tmp_path: Path) -> None:
    class Renamed(Configured):
        def __init__(self, configure: Any) -> None:
            super().__init__(configure)
            self.layers = self.net
            del self.net

        def loss(self, batch: Any) -> Any:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name.replace("net.", "layers."): value for name, value in state.items()}

    _, resumed = fit(sgd(), 4, kind=Renamed, ckpt_path=saved(sgd(), tmp_path / "a.ckpt"))
    whole = fit(sgd(), 4)[1].state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(resumed.state_dict().values(), whole, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_state_of_another_class_is_refused(momentum: float, tmp_path: Path) -> None:
    path = saved(sgd(momentum=momentum), tmp_path / "a.ckpt")
    with pytest.raises(
        CheckpointError,
        match=r"state does not match Adam: it has no 'step'|a state of Adam in the checkpoint, got one without .*betas",
    ):
        fit(lambda module: Adam(module.parameters()), 4, ckpt_path=path)


def test_a_class_with_the_same_state_goes_on_and_is_said(tmp_path: Path, caplog: Any) -> None:
    path = saved(lambda module: Adam(module.parameters(), lr=0.1), tmp_path / "a.ckpt")
    fit(lambda module: AdamW(module.parameters(), lr=0.1), 4, ckpt_path=path)
    assert "the optimizer is AdamW, and the checkpoint's is Adam" in caplog.text


def test_defaults_made_of_the_constructors_locals_are_no_part_of_the_state() -> None:
    class Own(SGD):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr)
            self.defaults["__class__"] = self.param_groups[0]["__class__"] = type(self)

    module = nn.Linear(2, 2)
    state = SGD(module.parameters(), lr=0.5).state_dict()  # a file holds no class
    optimizer = Own(module.parameters())
    Strategy().load_optimizer_state(optimizer, state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_fabric_loop_reports_another_class_too() -> None:
    module = nn.Linear(2, 2)
    state = SGD(module.parameters(), lr=0.1).state_dict()
    with pytest.raises(CheckpointError, match="a state of Adam in the checkpoint"):
        Strategy().load_optimizer_state(Adam(module.parameters()), state)
