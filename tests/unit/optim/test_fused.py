from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import Net, assert_near, loader, net, quiet

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.optim.fused import fuse, match_implementation

MAKERS = [lw.optim.adamw, lw.optim.adam, lw.optim.sgd]


class Quantized(Tensor):
    """Stands for subclasses that torch's fused kernels do not know."""


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(all(group["fused"] for group in optimizer.param_groups))


@pytest.mark.parametrize("make", MAKERS)
def test_parameters_on_a_device_with_fused_kernels_are_stepped_fused(make: Any) -> None:
    layer = nn.Linear(2, 2)
    groups = [{"params": layer.weight, "weight_decay": 0.1}, {"params": [layer.bias]}]
    for parameters in (layer.parameters(), list(layer.parameters()), groups, layer.named_parameters()):
        optimizer = make(parameters, lr=0.5, weight_decay=0.2)
        assert is_fused(optimizer)
        assert {group["lr"] for group in optimizer.param_groups} == {0.5}
        assert optimizer.param_groups[-1]["weight_decay"] == 0.2
        assert type(optimizer).__module__.startswith("torch.optim")


@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}])
def test_an_implementation_that_is_named_is_taken(option: dict[str, bool]) -> None:
    optimizer = lw.optim.adamw(nn.Linear(2, 2).parameters(), **option)
    assert not is_fused(optimizer)
    assert all(optimizer.param_groups[0][name] == value for name, value in option.items())


def test_what_kernels_cannot_step_is_not_fused() -> None:
    meta = nn.Parameter(torch.ones(2, device="meta"))
    with_complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    quantized = torch.ones(2).as_subclass(Quantized).requires_grad_()
    for one in (meta, with_complex, quantized):
        assert not lw.optim.can_fuse([nn.Parameter(torch.ones(2)), one])
    assert not lw.optim.can_fuse([])
    assert not is_fused(lw.optim.adamw([with_complex]))


@pytest.mark.parametrize("make", MAKERS)
def test_the_weights_are_those_of_torchs_own_steps(make: Any) -> None:
    def trained(**options: Any) -> Net:
        module = net(Net, lambda parameters: make(parameters, lr=0.05, weight_decay=0.1, **options))
        quiet(max_epochs=3, gradient_clip_val=0.5, accumulate_grad_batches=2).fit(module, loader())
        return module

    assert_near(trained(), trained(fused=False), rtol=1e-4)  # the kernel rounds in another order


def test_a_run_continues_with_the_implementation_of_its_checkpoint(tmp_path: Path) -> None:
    def trained(epochs: int, path: Path | None, fused: bool | None) -> tuple[Any, Any]:
        module = net(Net, lambda parameters: lw.optim.adamw(parameters, lr=0.05, fused=fused))
        trainer = quiet(max_epochs=epochs)
        trainer.fit(module, loader(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module, trainer.optimizers[0]

    for before, now in ((False, None), (None, False)):
        expected, _ = trained(2, None, before)
        trained(1, None, before)
        module, optimizer = trained(2, tmp_path / "1.ckpt", now)
        assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), module.parameters(), strict=True))
        assert is_fused(optimizer) is (before is None)
        # With a loss scale, torch asks this of the optimizer and not of its groups.
        assert optimizer._step_supports_amp_scaling is (before is None)


def test_a_checkpoint_of_fused_steps_goes_on_where_there_are_none() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.param_groups[0]["fused"] = True
    match_implementation(optimizer)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not is_fused(optimizer)


def test_an_optimizer_can_be_fused_before_its_first_step_only() -> None:
    class Own(torch.optim.AdamW):
        """Its step may be another."""

    layer = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(layer.parameters())
    assert fuse(optimizer)
    assert is_fused(optimizer)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not fuse(optimizer)
    assert not fuse(Own(layer.parameters()))
    assert not fuse(torch.optim.RMSprop(layer.parameters()))


def test_the_command_line_makes_an_optimizer_by_a_function() -> None:
    from loopwright.cli import CLI

    def made(*arguments: str) -> Any:
        cli = CLI(Net, run=False, args=["trainer.accelerator=cpu", *arguments])
        return cli.model.configure_optimizers()

    optimizer = made("optimizer=loopwright.optim.adamw", "optimizer.lr=0.25")
    assert isinstance(optimizer, torch.optim.AdamW)
    assert is_fused(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises((ConfigError, SystemExit)):
        made("optimizer=loopwright.optim.adamw", "optimizer.lrr=0.25")
    with pytest.raises((ConfigError, SystemExit)):
        made("optimizer=loopwright.optim.can_fuse")
