"""Exported programs are run, and compared with the module: TorchScript, ONNX, torch.export."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from toys import loader, net, quiet

import loopwright as lw
from loopwright.errors import ConfigError, MissingDependency, ModuleError

pytestmark = [
    pytest.mark.filterwarnings("ignore:validation is skipped:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxscript"),
    pytest.mark.filterwarnings("ignore::FutureWarning:onnxscript"),
]

# Any in this file: batches, and what torch's exporters return.


class Classifier(lw.Module):
    """Has what a user's module has: hyperparameters, a sample, batch norm, dropout, a branch, an unused layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 3))
        self.frozen = nn.Dropout(0.5)
        self.frozen.eval()
        self.example_input_array = torch.ones(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            x = x[None]
        return self.frozen(self.net(x)).softmax(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch[0])[:, 0].mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fresh(folder: Path) -> Classifier:
    return net(Classifier)  # type: ignore[arg-type, no-any-return]


def fitted(folder: Path) -> Classifier:
    module = fresh(folder)
    quiet(max_epochs=1).fit(module, loader())
    return module


def loaded(folder: Path) -> Classifier:
    trainer = quiet(max_epochs=1)
    trainer.fit(fresh(folder), loader())
    trainer.save_checkpoint(folder / "a.ckpt")
    return Classifier.load_from_checkpoint(folder / "a.ckpt")


def expected_of(module: Classifier, x: Tensor) -> Tensor:
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    with torch.no_grad():
        output: Tensor = module(x)
    for one, mode in modes:
        one.training = mode
    return output


def scripted(module: Classifier, path: Path) -> Callable[[Tensor], Tensor]:
    module.to_torchscript(path)
    return torch.jit.load(str(path))  # type: ignore[no-any-return, no-untyped-call]


def traced(module: Classifier, path: Path) -> Callable[[Tensor], Tensor]:
    module.to_torchscript(path, method="trace")
    return torch.jit.load(str(path))  # type: ignore[no-any-return, no-untyped-call]


def exported(module: Classifier, path: Path) -> Callable[[Tensor], Tensor]:
    module.to_export(path)
    return torch.export.load(path).module()


def as_onnx(module: Classifier, path: Path) -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own packages
        module.to_onnx(path, verbose=False)
    return run_by(path)


def run_by(path: Path) -> Callable[..., Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # no threads of its own: later tests fork
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        names = [one.name for one in session.get_inputs()]
        outputs = session.run(None, {name: one.numpy() for name, one in zip(names, inputs, strict=True)})
        return torch.from_numpy(outputs[0])

    return run


@pytest.mark.parametrize("state", [fresh, fitted, loaded])
@pytest.mark.parametrize("export", [scripted, traced, exported, as_onnx])
def test_an_exported_program_computes_what_the_module_does(state: Any, export: Any, tmp_path: Path) -> None:
    module = state(tmp_path)
    module.train()
    module.frozen.eval()
    modes = [one.training for one in module.modules()]
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    expected = expected_of(module, x)

    program = export(module, tmp_path / "new" / "program")

    # Other kernels sum in another order.
    torch.testing.assert_close(program(x), expected, rtol=1e-6, atol=1e-6)
    assert [one.training for one in module.modules()] == modes
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("state", [fresh, fitted, loaded])
def test_torch_itself_takes_the_module(state: Any, tmp_path: Path) -> None:
    module = state(tmp_path).eval()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    expected = expected_of(module, x)
    assert torch.equal(torch.jit.script(module)(x), expected)
    assert torch.equal(torch.jit.trace(module, x)(x), expected)  # type: ignore[no-untyped-call]
    assert torch.equal(torch.export.export(module, (x,)).module()(x), expected)


def test_a_script_has_the_branches_that_a_trace_has_not(tmp_path: Path) -> None:
    module = fresh(tmp_path)
    one = torch.ones(4)
    assert torch.equal(module.to_torchscript()(one), expected_of(module, one))


@pytest.mark.parametrize("compile", [False, True])
def test_export_within_a_run(compile: bool, tmp_path: Path) -> None:
    class Exporting(lw.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.modes = [one.training for one in pl_module.modules()]
                x = torch.ones(2, 4)
                self.expected = expected_of(pl_module, x)
                programs = [pl_module.to_torchscript(), pl_module.to_torchscript(method="trace")]
                programs += [pl_module.to_export().module(), torch.jit.script(pl_module).eval()]
                self.found = [program(x).detach() for program in programs]
                self.modes_after = [one.training for one in pl_module.modules()]

    callback = Exporting()
    arguments = {"compile": {"backend": "eager"}} if compile else {}
    trainer = quiet(max_epochs=1, callbacks=callback, **arguments)
    trainer.fit(fresh(tmp_path), loader())
    assert callback.modes_after == callback.modes
    for found in callback.found:
        torch.testing.assert_close(found, callback.expected, rtol=1e-6, atol=1e-6)
    assert trainer.global_step == 4


class Pair(lw.Module):
    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return x * scale


class Two(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x) + y


def test_samples_may_be_given_by_position_or_by_name(tmp_path: Path) -> None:
    x, y = torch.ones(3, 4), torch.ones(3, 2)
    module = net(Two)  # type: ignore[arg-type]
    expected = module(x, y).detach()
    by_name = {"x": x, "y": y}
    for sample in ((x, y), [x, y], by_name):
        assert torch.equal(module.to_torchscript(method="trace", example_inputs=sample)(x, y), expected)
        is_named = isinstance(sample, dict)
        program = module.to_export(example_inputs=sample).module()
        assert torch.equal(program(**by_name) if is_named else program(x, y), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.to_onnx(tmp_path / "two.onnx", by_name, verbose=False)
    torch.testing.assert_close(run_by(tmp_path / "two.onnx")(x, y), expected, rtol=1e-6, atol=1e-6)
    keyword = Pair().to_export(example_inputs={"x": x, "scale": torch.tensor(2.0)})
    assert torch.equal(keyword.module()(x=x, scale=torch.tensor(2.0)), 2 * x)


def test_sizes_may_be_left_open(tmp_path: Path) -> None:
    module = fresh(tmp_path)
    module.example_input_array = None
    batch = torch.export.Dim("batch", min=2)
    program = module.to_export(example_inputs=torch.ones(3, 4), dynamic_shapes=({0: batch},))
    x = torch.randn(7, 4)
    torch.testing.assert_close(program.module()(x), expected_of(module, x), rtol=1e-6, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.to_onnx(tmp_path / "a.onnx", torch.ones(3, 4), dynamic_shapes=({0: batch},), verbose=False)
    torch.testing.assert_close(run_by(tmp_path / "a.onnx")(x), expected_of(module, x), rtol=1e-6, atol=1e-6)


def test_a_program_can_be_written_to_any_file_system(tmp_path: Path) -> None:
    module = fresh(tmp_path)
    x = torch.ones(2, 4)
    module.to_torchscript(f"file://{tmp_path}/a.pt")
    module.to_export(f"file://{tmp_path}/a.pt2")
    expected = expected_of(module, x)
    assert torch.equal(torch.jit.load(str(tmp_path / "a.pt"))(x), expected)  # type: ignore[no-untyped-call]
    assert torch.equal(torch.export.load(tmp_path / "a.pt2").module()(x), expected)


def test_modes_are_put_back_when_an_export_fails() -> None:
    class Failing(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("boom")

    module = Failing()
    module.train()
    module.frozen.eval()
    with pytest.raises(ValueError, match="boom"):
        module.to_torchscript(method="trace")
    assert module.net.training
    assert not module.frozen.training


def export_sharded(rank: int, size: int) -> None:
    module = net(Two)  # type: ignore[arg-type]
    lw.Fabric(accelerator="cpu", devices=1, strategy="fsdp").setup(module)
    with pytest.raises(ModuleError, match="sharded over processes(?s:.*)load_from_checkpoint"):
        module.to_export(example_inputs=(torch.ones(3, 4), torch.ones(3, 2)))


def test_a_sharded_module_says_how_to_export_it() -> None:
    run_ranks(export_sharded, 1, connect=False)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda module: module.to_onnx("x.onnx"), "input_sample="),
        (lambda module: module.to_torchscript(method="trace"), "example_inputs="),
        (lambda module: module.to_export(), "example_inputs="),
    ],
)
def test_a_missing_sample_is_asked_for(call: Callable[[Any], Any], argument: str) -> None:
    with pytest.raises(ConfigError, match=rf"Two\.to_\w+(?s:.*){argument}.*example_input_array"):
        call(Two())


def test_another_method_is_an_error() -> None:
    with pytest.raises(ConfigError, match="method='compile'.*expected 'script' or 'trace'"):
        Two().to_torchscript(method="compile")


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # as if it were not installed
    with pytest.raises(MissingDependency, match=r"(?s)'onnxscript'.*pip install 'loopwright\[onnx\]'"):
        fresh(tmp_path).to_onnx(tmp_path / "a.onnx")


def test_without_a_trainer_reading_it_is_still_an_error() -> None:
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        _ = Two().trainer
    assert not hasattr(Two(), "no_such_attribute")


class WithProperty(Classifier):
    __jit_unused_properties__ = [*lw.Module.__jit_unused_properties__, "folder"]

    @property
    def folder(self) -> str | None:
        return self.trainer.log_dir


def test_a_property_that_asks_the_trainer_is_left_out_of_a_script() -> None:
    x = torch.ones(2, 4)
    module = WithProperty()
    script = module.to_torchscript()
    assert torch.equal(script(x), module.eval()(x))
    with pytest.raises(RuntimeError, match="not attached"):
        module.folder  # noqa: B018
