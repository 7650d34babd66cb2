"""BitsandbytesPrecision: layers compute with the packed weights, train what is left, and resume exactly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.callbacks import BaseFinetuning
from loopwright.errors import ConfigError, ModuleError
from loopwright.fabric.resolve import _PACKED
from loopwright.precision.quantized import BITSANDBYTES_MODES, import_bitsandbytes

pytest.importorskip("bitsandbytes")
FROZEN = [mode for mode in BITSANDBYTES_MODES if mode != "int8-training"]


class Net(lw.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.LayerNorm(64))
        self.head = nn.Linear(64, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.body(batch[0])).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.02)


def data() -> DataLoader[Any]:
    inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=16)


def precision(mode: str, dtype: torch.dtype | None = None) -> lw.BitsandbytesPrecision:
    return lw.BitsandbytesPrecision(mode, dtype, ignore_modules={"head"})


def fit(mode: str, folder: Path, epochs: int, dtype: torch.dtype | None = None, **kwargs: Any) -> tuple[Any, Net]:
    module = Net()
    trainer = lw.Trainer(
        max_epochs=epochs, plugins=[precision(mode, dtype)], default_root_dir=folder, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data(), **kwargs)
    return trainer, module


@pytest.mark.parametrize("mode", FROZEN)
def test_layers_compute_with_the_packed_weights(mode: str) -> None:
    functional = import_bitsandbytes().functional
    module = precision(mode, torch.float32).convert_module(Net())
    weight: Any = module.body[0].weight
    inputs = torch.randn(5, 64)
    if mode.startswith("int8"):
        state = module.body[0].state_dict()
        whole = state["weight"].float() * state["SCB"].unsqueeze(1) / 127
        tolerance = 2e-2  # inputs are rounded to 8 bits, too
    else:
        whole = functional.dequantize_4bit(weight, weight.quant_state)
        tolerance = 1e-5
    expected = F.linear(inputs, whole.view(96, 64), module.body[0].bias)
    torch.testing.assert_close(module.body[0](inputs), expected, rtol=tolerance, atol=tolerance)
    assert not weight.requires_grad
    assert weight.itemsize * weight.numel() <= 96 * 64 * (1 if mode == "int8" else 0.5)
    assert type(module.head) is nn.Linear


@pytest.mark.parametrize("mode", BITSANDBYTES_MODES)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_resumed_run_equals_the_uninterrupted_one(mode: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    trainer, module = fit(mode, tmp_path / "a", 1, dtype)
    before = precision(mode, dtype).convert_module(Net())
    changed = {name for name, one in module.named_parameters() if not torch.equal(one, before.get_parameter(name))}
    assert ("body.0.weight" in changed) == (mode == "int8-training")
    assert {"body.0.bias", "head.weight"} <= changed
    _, resumed = fit(mode, tmp_path / "b", 2, dtype, ckpt_path=trainer.checkpoint_callback.best_model_path)
    _, whole = fit(mode, tmp_path / "c", 2, dtype)
    state = whole.state_dict()
    assert resumed.state_dict().keys() == state.keys()
    for name, one in resumed.state_dict().items():
        assert not isinstance(one, Tensor) or (one.isfinite().all() and torch.equal(one, state[name])), name


@pytest.mark.parametrize("mode", ["nf4", "fp4-dq"])
def test_weights_before_quantization_are_quantized_when_they_are_read(mode: str) -> None:
    other = Net(seed=1)
    found = precision(mode, torch.float32).convert_module(Net(seed=0))
    expected = precision(mode, torch.float32).convert_module(Net(seed=1))
    found.load_state_dict(other.state_dict())
    inputs = torch.randn(3, 64)
    assert torch.equal(found.head(found.body(inputs)), expected.head(expected.body(inputs)))
    again = precision(mode, torch.float32).convert_module(Net(seed=0))
    again.load_state_dict(expected.state_dict())
    assert torch.equal(again.head(again.body(inputs)), expected.head(expected.body(inputs)))
    incomplete = {name: one for name, one in other.state_dict().items() if name != "body.0.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*body\.0\.weight"):
        again.load_state_dict(incomplete)


def test_fabric_quantizes_once_and_casts_the_rest() -> None:
    fabric = lw.Fabric(accelerator="cpu", plugins=[precision("nf4")])
    module = Net()
    optimizer = torch.optim.SGD(module.head.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    loss = model.training_step(next(iter(data())), 0)
    fabric.backward(loss)
    optimizer.step()
    assert module.body[0].weight.dtype == torch.uint8
    assert module.body[3].weight.dtype == module.head.weight.dtype == torch.bfloat16
    assert fabric.strategy is not None
    assert precision("nf4").convert_module(module) is module


def _train(rank: int, size: int, seeds: list[int]) -> Any:
    module = Net(seeds[rank])
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy="ddp", plugins=[precision("nf4", torch.float32)])
    fabric.launch()
    optimizer = torch.optim.SGD(list(module.head.parameters()), lr=0.1)
    try:
        model, optimizer = fabric.setup(module, optimizer)
    except ConfigError as error:
        return str(error)
    inputs, labels = next(iter(data()))
    part = slice(rank * 8, rank * 8 + 8)
    fabric.backward(model.training_step((inputs[part], labels[part]), 0))
    optimizer.step()
    return module.head.weight.detach()


def test_ranks_train_what_one_process_trains_and_other_weights_are_refused() -> None:
    first, second = run_ranks(_train, 2, [0, 0], connect=False)
    module = precision("nf4", torch.float32).convert_module(Net())
    optimizer = torch.optim.SGD(module.head.parameters(), lr=0.1)
    module.training_step(next(iter(data())), 0).backward()
    optimizer.step()
    assert torch.equal(first, second)
    torch.testing.assert_close(first, module.head.weight.detach(), rtol=1e-6, atol=1e-7)  # a mean of two means
    for refusal in run_ranks(_train, 2, [0, 1], connect=False):
        assert "other ones on rank 1" in refusal


def _fit_in_forks(rank: int, size: int, folder: str) -> Any:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    module = Net()
    trainer = lw.Trainer(
        max_epochs=1, plugins=[precision("nf4-dq", torch.float32)], default_root_dir=folder, accelerator="cpu",
        devices=2, strategy="ddp_fork", logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data())
    return module.state_dict(), {one.dtype for one in module.body.parameters()}


def test_what_other_processes_trained_is_put_back(tmp_path: Path) -> None:
    ((state, dtypes),) = run_ranks(_fit_in_forks, 1, str(tmp_path), connect=False)
    start = precision("nf4-dq", torch.float32).convert_module(Net()).state_dict()
    assert state.keys() == start.keys()
    assert torch.equal(state["body.0.weight"], start["body.0.weight"])
    assert not torch.equal(state["head.weight"], start["head.weight"])
    assert torch.uint8 in dtypes


def test_what_cannot_work_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="nf4-dq"):
        lw.BitsandbytesPrecision("nf5")
    with pytest.raises(ConfigError, match="float64"):
        lw.BitsandbytesPrecision("nf4", torch.float64)
    with pytest.raises(ModuleError, match="with none"):
        lw.BitsandbytesPrecision("nf4").convert_module(nn.Sequential(nn.ReLU()))
    with pytest.raises(ModuleError, match="Linear itself"):
        lw.BitsandbytesPrecision("nf4").convert_module(nn.Linear(8, 8))
    tied = nn.ModuleDict({"words": nn.Embedding(8, 8), "head": nn.Linear(8, 8), "body": nn.Linear(8, 8)})
    tied["head"].weight = tied["words"].weight
    with pytest.raises(ModuleError, match=r"head, tied"):
        lw.BitsandbytesPrecision("nf4").convert_module(tied)
    assert _PACKED == BITSANDBYTES_MODES
    for strategy in ("fsdp", "deepspeed"):
        with pytest.raises(ConfigError, match="BitsandbytesPrecision cannot be used"):
            lw.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[lw.BitsandbytesPrecision("nf4")])


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (2, 1, 3, 64)])
@pytest.mark.parametrize("mode", ["int8", "int8-training"])
def test_inputs_have_any_shape(mode: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 32))
    wanted = plain[0].weight.detach().clone().requires_grad_()
    layer = lw.BitsandbytesPrecision(mode, torch.float32).convert_module(plain)[0]
    given, same = (torch.ones(shape).cumsum(-1).requires_grad_() for _ in range(2))
    output, expected = layer(given), F.linear(same, wanted, layer.bias.detach())
    for one in (output, expected):
        one.square().sum().backward()
    # 8 bits of a row's largest value: the error of 64 products is below 1/100 of the largest result.
    pairs = [(output, expected), (given.grad, same.grad)]
    pairs += [(layer.weight.grad, wanted.grad)] if mode == "int8-training" else []
    for found, reference in pairs:
        assert found.shape == reference.shape
        assert (found - reference).abs().max() < 0.02 * reference.abs().max()


def test_a_backbone_of_packed_weights_is_unfrozen_but_for_them() -> None:
    module = Net()
    precision("nf4").convert_module(module)
    BaseFinetuning.freeze(module.body)
    BaseFinetuning.make_trainable(module.body)
    assert [one.requires_grad for one in module.body.parameters()] == [False, True, False, True, True, True]


def test_a_name_to_ignore_that_no_module_has_is_said() -> None:
    module = nn.ModuleDict({"model": nn.ModuleDict({"head": nn.Linear(64, 64), "body": nn.Linear(64, 64)})})
    with pytest.warns(UserWarning, match=r"ignore_modules has 'head' \(did you mean 'model.head'\?\)"):
        lw.BitsandbytesPrecision("nf4", ignore_modules="head").convert_module(module)
    with pytest.warns(UserWarning, match=r"ignore_modules has 'model.haed' \(did you mean 'model.head'\?\)"):
        lw.BitsandbytesPrecision("nf4", ignore_modules="model.haed").convert_module(
            nn.ModuleDict({"model": nn.ModuleDict({"head": nn.Linear(64, 64)})})
        )
