"""Training without compilation does not import torch's compiler; importing it later changes nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from loopwright import deferred_compiler
from loopwright.precision.base import take_step

BEGINS = """
import sys
import torch
from torch import nn
import loopwright as lw
from loopwright.precision.base import take_step

class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

def imported():
    return "torch._dynamo" in sys.modules
"""


def run(program: str) -> str:
    """Run a program in a fresh process, where nothing has imported the compiler yet, and return what it printed."""
    return subprocess.check_output([sys.executable, "-c", BEGINS + program], text=True)


def test_fit_with_the_defaults_does_not_import_the_compiler(tmp_path: Any) -> None:
    program = f"""
trainer = lw.Trainer(max_epochs=2, accelerator="cpu", devices=1, default_root_dir={str(tmp_path)!r}, logger=False)
trainer.fit(Net(), [torch.ones(4, 2)] * 3, [torch.ones(4, 2)])
class Manual(Net):
    automatic_optimization = False
    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
lw.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False).fit(
    Manual(), [torch.ones(4, 2)] * 3
)
lw.Trainer(max_epochs=3, accelerator="cpu", devices=1, default_root_dir={str(tmp_path)!r}, logger=False).fit(
    Net(), [torch.ones(4, 2)] * 3, ckpt_path=trainer.checkpoint_callback.best_model_path
)
print("imported", imported())
"""
    assert "imported False" in run(program)


def test_a_replica_does_not_import_it_and_what_asks_for_it_gets_it() -> None:
    program = """
import torch.distributed as dist
from loopwright.deferred_compiler import without_compiler
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fabric = lw.Fabric(accelerator="cpu", devices=1, strategy="ddp")
fabric.launch()
layer = nn.Linear(2, 1)
model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=1))
fabric.backward(model(torch.ones(3, 2)).sum())
optimizer.step()
print(imported(), type(fabric.strategy).__name__, "_dynamo" in vars(torch))
with without_compiler():
    print(torch._dynamo.utils.get_optimize_ddp_mode(), imported())
    print(torch._dynamo.utils.counters is sys.modules["torch._dynamo.utils"].counters)
    print(torch._dynamo is sys.modules["torch._dynamo"])
print(torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.utils.get_optimize_ddp_mode())
"""
    assert run(program).splitlines() == [
        "False DDPStrategy False",
        "ddp_optimizer False",
        "True",
        "True",
        "True ddp_optimizer",
    ]


@pytest.mark.slow
def test_once_it_is_imported_torch_excludes_the_functions_by_itself() -> None:
    program = """
from loopwright.deferred_compiler import defer_compiler_of_optimizers
defer_compiler_of_optimizers()
parts = [nn.Parameter(torch.ones(2)) for _ in range(3)]
optimizer = torch.optim.SGD(parts[:1], lr=0.1)
parts[0].grad = torch.zeros(2)
take_step(optimizer)
print(imported())
import torch._dynamo
optimizer.add_param_group({"params": parts[1:2]})
kept = vars(torch.optim.Optimizer.add_param_group.__wrapped__)["__dynamo_disable"]
print(kept.__module__, hasattr(kept, "_torchdynamo_disable"))
defer_compiler_of_optimizers()
optimizer.add_param_group({"params": parts[2:]})
print(kept is vars(torch.optim.Optimizer.add_param_group.__wrapped__)["__dynamo_disable"], len(optimizer.param_groups))
compiled = torch.compile(lambda: optimizer.step(), backend="eager")
for one in parts:
    one.grad = torch.ones(2)
compiled()
print([round(float(one.detach().sum()), 4) for one in parts])
"""
    assert run(program).splitlines() == [
        "False",
        "torch._dynamo.eval_frame True",
        "True 3",
        "[1.8, 1.8, 1.8]",
    ]


@pytest.mark.parametrize("has_hooks", [False, True])
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam])
def test_steps_without_the_compiler_equal_torchs(
    cls: Any, differentiable: bool, has_hooks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped(*, is_imported: bool) -> torch.Tensor:
        names = sys.modules.copy()
        if not is_imported:
            names.pop("torch._dynamo", None)
        monkeypatch.setattr(deferred_compiler, "sys", type("Modules", (), {"modules": names}))
        weight = nn.Parameter(torch.ones(3))
        optimizer = cls([weight.clone() if differentiable else weight], lr=0.1, differentiable=differentiable)
        modes: list[bool] = []
        heard: list[str] = []
        if has_hooks:
            optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
            optimizer.register_step_post_hook(lambda *_: heard.append(f"after {modes}"))
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.tensor([1.0, -2.0, 3.0])
        inner = cls._init_group
        monkeypatch.setattr(cls, "_init_group", lambda *args: (modes.append(torch.is_grad_enabled()), inner(*args))[1])
        take_step(optimizer)
        monkeypatch.setattr(cls, "_init_group", inner)
        assert modes == [differentiable]
        assert heard == (["before", f"after {modes}"] if has_hooks else [])
        assert torch.is_grad_enabled()
        value: torch.Tensor = optimizer.param_groups[0]["params"][0].detach()
        return value

    import torch._dynamo  # the other side of the comparison

    assert torch.equal(stepped(is_imported=False), stepped(is_imported=True))


def test_the_mode_of_gradients_is_put_back_after_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_compiler, "sys", type("Modules", (), {"modules": {}}))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    monkeypatch.setattr(torch.optim.SGD, "_init_group", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        take_step(optimizer)
    assert torch.is_grad_enabled()


def test_other_functions_stay_as_they_are() -> None:
    def plain() -> None: ...

    deferred_compiler.defer_compiler(plain)
    deferred_compiler.defer_compiler(None)
    assert vars(plain) == {}
