"""Float8Precision: products in float8 near those of bfloat16, with the weights and checkpoints of float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from float8_models import Net, batches
from ranks import run_ranks
from torch import Tensor, nn

import loopwright as lw
from loopwright.errors import ConfigError, ModuleError
from loopwright.precision import check_format

pytest.importorskip("torchao", reason="needs torchao: pip install 'loopwright[float8]'")


def fit(folder: Path, epochs: int, **kwargs: Any) -> tuple[lw.Trainer, Net]:
    module, path = Net(), kwargs.pop("ckpt_path", None)
    trainer = lw.Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{"precision": "float8", **kwargs},
    )  # fmt: skip
    trainer.fit(module, batches(32), ckpt_path=path)
    return trainer, module


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("emulate", [False, True])
def test_products_are_those_of_rounded_operands(recipe: str, emulate: bool) -> None:
    module = Net()
    inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
    expected = module.body[0](inputs)
    precision = lw.Float8Precision("cpu", recipe=recipe, emulate=emulate)
    assert precision.convert_module(precision.convert_module(module)) is module
    with precision.forward_context():
        found = module.body[0](inputs).float()
    error = float((found - expected).norm().detach() / expected.norm().detach())
    # Operands have errors of about 2.5 % each; the sum of many products keeps the relative error of one of them.
    rounding = check_format(inputs / inputs.abs().max() * 448, "float8_e4m3").rounding_error
    assert 0.2 * rounding < error < 4 * rounding
    assert type(module.head) is nn.Linear  # 3 is no multiple of 16


def test_a_run_learns_and_resumes_exactly_and_its_checkpoint_is_one_of_bf16(tmp_path: Path) -> None:
    trainer, module = fit(tmp_path / "a", 1)
    assert all(one.dtype == torch.float32 for one in module.parameters())
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    _, resumed = fit(tmp_path / "b", 2, ckpt_path=path)
    _, whole = fit(tmp_path / "c", 2)
    state = whole.state_dict()
    assert state.keys() == Net().state_dict().keys()
    assert all(torch.equal(one, state[name]) for name, one in resumed.state_dict().items())
    _, other = fit(tmp_path / "d", 2, ckpt_path=path, precision="bf16-mixed")
    assert not torch.equal(other.body[0].weight, whole.body[0].weight)
    torch.testing.assert_close(other.body[0].weight, whole.body[0].weight, rtol=0, atol=0.08)  # 8 steps of Adam at 0.01


def _gradient(rank: int, size: int, strategy: str) -> Tensor:
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=strategy, precision="float8")
    fabric.launch()
    module = Net()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    fabric.backward(model.training_step(batches(32)[rank], 0))
    optimizer.step()
    weight: Any = module.body[2].weight
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()


def test_ddp_and_fsdp_make_the_same_step() -> None:
    replicated = run_ranks(_gradient, 2, "ddp", connect=False)
    sharded = run_ranks(_gradient, 2, "fsdp", connect=False)
    before = Net().body[2].weight.detach()
    assert torch.equal(replicated[0], replicated[1])
    assert not torch.equal(replicated[0], before)
    # fsdp sums gradients in another dtype and order; a step that left a rank out would differ by half of itself.
    torch.testing.assert_close(sharded[0], replicated[0], rtol=0, atol=float((replicated[0] - before).abs().max()) / 16)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="rowwise"):
        lw.Float8Precision(recipe="row")
    with pytest.raises(ModuleError, match="multiples of 16"):
        lw.Float8Precision().convert_module(nn.Sequential(nn.Linear(16, 3)))
    with pytest.raises(ConfigError, match="splits the weights"):
        lw.Fabric(accelerator="cpu", devices=2, strategy="mesh:tp=2", precision="float8")
    with pytest.raises(ConfigError, match="float32 master weights"):
        lw.Fabric(accelerator="cpu", devices=2, strategy="deepspeed", precision="float8")
