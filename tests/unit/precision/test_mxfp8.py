"""precision="mxfp8": three products of a linear layer with operands in MXFP8, and the checkpoints of float32."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from float8_models import Net, batches
from ranks import run_ranks
from torch import Tensor, nn

import loopwright as lw
from loopwright.errors import ConfigError, MissingDependency, ModuleError
from loopwright.fabric.resolve import resolve
from loopwright.precision.formats import round_to

pytest.importorskip("torchao", reason="needs torchao: pip install 'loopwright[float8]'")

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def emulated(**kwargs: Any) -> lw.Float8Precision:
    return lw.Float8Precision("cpu", recipe="mxfp8", emulate=True, **kwargs)


def fit(folder: Path, epochs: int, ckpt_path: str | None = None, **kwargs: Any) -> tuple[lw.Trainer, Net]:
    module = Net()
    chosen = {} if "precision" in kwargs else {"plugins": [emulated()]}
    trainer = lw.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder, **QUIET, **chosen, **kwargs)
    trainer.fit(module, batches(24), ckpt_path=ckpt_path)
    return trainer, module


def quantized(values: Tensor) -> Tensor:
    """Return the values of MXFP8 in float64, as OCP MX 1.0 defines them, with a scale that is rounded up.

    Args:
        values: bfloat16 values of shape (rows, columns); columns are padded to whole blocks.
    """
    padded = nn.functional.pad(values.double(), (0, -values.shape[1] % 32))
    blocks = padded.reshape(len(values), -1, 32)
    largest = blocks.abs().amax(dim=2, keepdim=True)
    scale = torch.where(largest > 0, 2.0 ** torch.ceil(torch.log2(largest / 448)), 1.0)
    # `round_to` rounds with a scale that is rounded down: it is used without one here.
    return (round_to((blocks / scale).float(), "float8_e4m3").double() * scale).reshape(padded.shape)


@pytest.mark.parametrize(("rows", "spread"), [(64, 1.0), (37, 1.0), (5, 1e-3), (64, 1e4)])
def test_output_and_both_gradients_are_products_of_quantized_operands(rows: int, spread: float) -> None:
    made = torch.Generator().manual_seed(2)
    layer = nn.Linear(64, 96)
    emulated().convert_module(nn.Sequential(layer))
    inputs = torch.randn(rows, 64, generator=made) * torch.logspace(-2, 2, rows)[:, None] * spread
    inputs[:, 3] = 0
    inputs.requires_grad_()
    gradient = torch.randn(rows, 96, generator=made).bfloat16()
    with emulated().forward_context():
        output = layer(inputs)
    output.backward(gradient)
    x, w = inputs.detach().bfloat16(), layer.weight.detach().bfloat16()
    assert layer.weight.grad is not None
    found = {
        "output": (output.detach(), quantized(x) @ quantized(w).T + layer.bias.detach()),
        "input": (inputs.grad, quantized(gradient) @ quantized(w.T).T),
        "weight": (layer.weight.grad, quantized(gradient.T) @ quantized(x.T).T),
    }
    exact = {
        "output": x.double() @ w.double().T + layer.bias.detach(),
        "input": gradient.double() @ w.double(),
        "weight": gradient.double().T @ x.double(),
    }
    for name, (got, expected) in found.items():
        assert got is not None
        # bfloat16 rounds the result (and the bias, then the sum once more) by 2^-9 of it at most; MXFP8 by 3 %.
        assert (got.double() - expected).norm() < 2**-8 * expected.norm(), name
        assert (expected - exact[name]).norm() > 0.01 * exact[name].norm(), name


def test_a_compiled_layer_is_one_graph_with_the_same_bits() -> None:
    layer = nn.Linear(64, 96)
    emulated().convert_module(nn.Sequential(layer))
    inputs, found = torch.randn(37, 64, requires_grad=True), []
    for one in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):  # inductor fuses casts
        with emulated().forward_context():
            output = one(inputs)
        found.append((output, *torch.autograd.grad(output.square().sum(), [inputs, layer.weight])))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_ddp_and_fsdp_make_the_step_of_one_process_bit_for_bit() -> None:
    alone = Net()
    emulated().convert_module(alone)
    gradients = []
    for batch in batches(24)[:2]:
        with emulated().forward_context():
            loss = alone.training_step(batch, 0)
        gradients.append(torch.autograd.grad(loss, list(alone.parameters())))
    expected = [p.detach() - (a + b) / 2 for p, a, b in zip(alone.parameters(), *gradients, strict=True)]
    for strategy in ("ddp", "fsdp"):
        for stepped in run_ranks(_step, 2, strategy, connect=False):
            assert all(torch.equal(one, other) for one, other in zip(stepped, expected, strict=True)), strategy


def _step(rank: int, size: int, strategy: str) -> list[Tensor]:
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=strategy, plugins=[emulated()])
    fabric.launch()
    module = Net()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    fabric.backward(model.training_step(batches(24)[rank], 0))
    optimizer.step()
    whole: list[Any] = list(module.parameters())
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).detach() for one in whole]


def test_a_resume_is_exact_and_checkpoints_are_those_of_float32(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 3}
    trainer, _ = fit(tmp_path / "a", 1, **options)
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    whole = fit(tmp_path / "c", 2, **options)[1].state_dict()
    assert [(name, one.dtype) for name, one in whole.items()] == [
        (n, one.dtype) for n, one in Net().state_dict().items()
    ]
    resumed = fit(tmp_path / "b", 2, path, **options)[1].state_dict()
    assert all(torch.equal(one, whole[name]) for name, one in resumed.items())
    other, module = fit(tmp_path / "d", 2, path, precision="32-true", **options)
    assert not torch.equal(module.body[0].weight, whole["body.0.weight"])
    torch.testing.assert_close(
        module.body[0].weight, whole["body.0.weight"], rtol=0, atol=0.06
    )  # 3 steps of 0.01, twice
    back = other.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    assert fit(tmp_path / "e", 3, back, **options)[0].global_step == 9


def test_the_name_chooses_it_and_says_that_it_is_emulated() -> None:
    with pytest.warns(UserWarning, match="emulated on this device.*slower"):
        fabric = lw.Fabric(accelerator="cpu", precision="mxfp8")
    assert isinstance(fabric.precision, lw.Float8Precision)
    assert (fabric.precision.precision, fabric.precision.emulate) == ("mxfp8", True)


@pytest.mark.parametrize(
    ("capability", "cuda", "emulates"),
    [((10, 0), "12.8", False), ((10, 3), "13.0", False), ((10, 0), "12.6", True), ((9, 0), "13.0", True),
     ((12, 0), "13.0", True), ((10, 3), None, True)],
)  # fmt: skip
def test_kernels_are_those_of_blackwell(
    capability: tuple[int, int], cuda: str | None, emulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if emulates:
        with pytest.warns(UserWarning, match="emulated"):
            precision = lw.Float8Precision("cuda", recipe="mxfp8")
    else:
        precision = lw.Float8Precision("cuda", recipe="mxfp8")
    assert precision.emulate is emulates


def test_layers_stay_by_size_and_by_name_and_hooks_stay() -> None:
    module, calls = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 48)), []
    module[0].register_forward_hook(lambda *_: calls.append(1))
    emulated(ignore_modules={"1"}).convert_module(module)
    assert [type(one).__name__ for one in module] == ["MXLinear", "Linear", "Linear"]
    with emulated().forward_context():
        module(torch.randn(2, 3, 32))
    assert calls == [1]
    with torch.autocast("cpu", enabled=False):
        assert module[0](torch.randn(32)).dtype == torch.float32
    with pytest.raises(AssertionError, match="float64"):
        module[0](torch.randn(2, 32).double())


def test_operands_in_any_order_of_memory() -> None:
    layer, transposed = nn.Linear(64, 96), nn.Linear(64, 96)
    transposed.load_state_dict(layer.state_dict())
    transposed.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    emulated().convert_module(nn.ModuleList([layer, transposed]))
    inputs = torch.randn(32, 64)
    found = layer(inputs)
    assert torch.equal(transposed(inputs.t().contiguous().t()), found)
    assert torch.equal(layer(inputs.repeat_interleave(2, 1)[:, ::2]), found)


@pytest.mark.parametrize("recipe", ["mxfp8", "tensorwise"])
def test_products_may_be_plain_for_a_block(recipe: str) -> None:
    precision, inputs = lw.Float8Precision("cpu", recipe=recipe, emulate=True), torch.randn(32, 32)
    module, plain = Net(), Net()
    precision.convert_module(module)
    with precision.plain_products(module):
        assert torch.equal(module.body(inputs), plain.body(inputs))
    assert not torch.equal(module.body(inputs), plain.body(inputs))


def test_gradients_of_gradients_are_refused() -> None:
    layer, inputs = nn.Linear(64, 96), torch.randn(32, 64, requires_grad=True)
    emulated().convert_module(nn.Sequential(layer))
    with pytest.raises(ModuleError, match=r"create_graph=True.*cannot be differentiated"):
        torch.autograd.grad(layer(inputs).sum(), inputs, create_graph=True)


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleError, match="multiples of 32"):
        emulated().convert_module(nn.Sequential(nn.Linear(16, 16)))
    with pytest.raises(ConfigError, match="no float8"):
        lw.Float8Precision("mps", recipe="mxfp8")
    with pytest.raises(ConfigError, match="'mxfp8' cannot be used with strategy='mesh:tp=2', which splits the weights"):
        lw.Fabric(accelerator="cpu", devices=2, strategy="mesh:tp=2", plugins=[emulated()])
    with pytest.raises(ConfigError, match="float32 master weights"):
        lw.Fabric(accelerator="cpu", devices=2, strategy="deepspeed", plugins=[emulated()])
    monkeypatch.delitem(sys.modules, "loopwright.precision.mx_linear", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training.mxfp8_linear", None)
    with pytest.raises(ConfigError, match=r"(?s)as in 0\.18.*pip install 'torchao"):
        emulated()
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingDependency, match=r"(?s)precision='mxfp8'.*loopwright\[float8\]"):
        resolve(accelerator="cpu", precision="mxfp8")
