"""Compiled runs on two processes equal those that are not compiled: ddp, fsdp, DeepSpeed; graphs are counted."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import keep
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

# Any in this file: batches, and results that travel between processes.

pytestmark = [  # of torch's own, while it compiles
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import what each forked process would import for seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
        torch._dynamo.reset()


class Graphs:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(F.gelu(self.first(x)))


class Net(lw.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.begin = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.end = nn.Linear(8, 1)

    def loss(self, batch: Any) -> Tensor:
        x = self.begin(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.end(x), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(seed: int, dtype: torch.dtype) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(24, width, generator=generator, dtype=dtype) for width in (4, 1))
    return DataLoader(TensorDataset(x, y), batch_size=2)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy={Block}),
    "fsdp checkpointed": lambda: FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing={Block}),
    "deepspeed 2": lambda: DeepSpeedStrategy(stage=2),
    "deepspeed 3": lambda: DeepSpeedStrategy(
        config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    ),
}


def run(name: str, folder: str, depth: int = 3, wrap: Any = None, precision: str = "64-true", **arguments: Any) -> Any:
    torch._dynamo.reset()
    quiet: dict[str, Any] = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    precision = "32-true" if name.startswith("deepspeed") else precision  # its masters are float32
    trainer = lw.Trainer(
        accelerator="cpu", devices=2, strategy=STRATEGIES[name](), max_epochs=2, accumulate_grad_batches=2,
        precision=precision, **quiet, **arguments,
    )  # fmt: skip
    dtype = torch.float64 if precision == "64-true" else torch.float32
    module = Net(depth)
    model = wrap(module) if wrap is not None else module
    trainer.fit(model, loader(1, dtype), loader(2, dtype))
    path = f"{folder}/{name}.ckpt"
    trainer.save_checkpoint(path)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    predicted = torch.stack(trainer.predict(model, loader(4, dtype))).tolist()  # type: ignore[arg-type]
    state = torch.load(path, weights_only=True)["state_dict"] if name[:4] != "deep" else {}
    return metrics, predicted, {key: value.tolist() for key, value in state.items()}


def on_ranks(rank: int, size: int, name: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"plain": run(name, folder)}
    graphs = Graphs()
    found["compiled"] = run(name, folder, compile={"backend": graphs}), graphs.count
    graphs = Graphs()
    found["given"] = run(name, folder, wrap=lambda module: torch.compile(module, backend=graphs)), graphs.count
    return found


@pytest.mark.parametrize("name", keep(["ddp", "fsdp", "fsdp checkpointed", "deepspeed 2"], "ddp", "fsdp"))
def test_compiled_ranks_compute_what_plain_ones_do(name: str, tmp_path: Path) -> None:
    if name.startswith("deepspeed"):
        import_deepspeed()
    for found in run_ranks(on_ranks, 2, name, str(tmp_path), connect=False, timeout_s=200):
        by_trainer, by_user = found["compiled"], found["given"]
        assert found["plain"] == by_trainer[0] == by_user[0]
        # Blocks and `begin`, in training (the first block's input has a gradient, as that of the others) and in
        # evaluation: not one for each of three blocks. Under ddp, torch.compile(module) has one for each kind of step.
        assert by_trainer[1] in (4, 6)
        assert by_user[1] == (3 if name == "ddp" else by_trainer[1])


class CompiledNet(Net):
    """One block is compiled in `__init__`."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__(depth)
        self.save_hyperparameters()
        self.blocks[0] = torch.compile(self.blocks[0], backend="eager")  # type: ignore[call-overload]


def saved_and_resumed(rank: int, size: int, folder: str) -> list[Any]:
    """Train two epochs at once, and in two runs, with a part compiled and with the module compiled as well."""

    def fit(name: str, model: Any, max_epochs: int, path: str | None = None) -> lw.Trainer:
        torch._dynamo.reset()
        trainer = lw.Trainer(
            accelerator="cpu", devices=2, strategy=STRATEGIES[name](), max_epochs=max_epochs,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, loader(1, torch.float32), loader(2, torch.float32), ckpt_path=path)
        return trainer

    def state(path: str) -> dict[str, Any]:
        return {key: value.tolist() for key, value in torch.load(path, weights_only=True)["state_dict"].items()}

    found = []
    for name in ("ddp", "fsdp"):
        for wrap in (lambda module: module, lambda module: torch.compile(module, backend="eager")):
            path = f"{folder}/{name}.ckpt"
            fit(name, wrap(CompiledNet()), 1).save_checkpoint(path)
            first = state(path)
            loaded = CompiledNet.load_from_checkpoint(path).state_dict()
            fit(name, wrap(CompiledNet()), 2, path).save_checkpoint(path)
            resumed = state(path)
            fit(name, wrap(CompiledNet()), 2).save_checkpoint(path)
            found.append((first, {key: value.tolist() for key, value in loaded.items()}, resumed, state(path)))
    return found


@pytest.mark.slow
def test_compiled_parts_are_saved_loaded_and_resumed(tmp_path: Path) -> None:
    for rank in run_ranks(saved_and_resumed, 2, str(tmp_path), connect=False, timeout_s=200):
        for first, loaded, resumed, once in rank:
            assert not any("_orig_mod" in name for name in first)
            assert {name.replace("_orig_mod.", ""): value for name, value in loaded.items()} == first
            assert resumed == once
            assert first != once


def refused(rank: int, size: int) -> str:
    with pytest.raises(ConfigError) as caught:
        run("deepspeed 3", "", compile=True)
    return str(caught.value)


def test_what_cannot_be_compiled_under_deepspeed_says_what_to_use() -> None:
    import_deepspeed()
    for text in run_ranks(refused, 2, connect=False, timeout_s=200):
        assert "ZeRO stage 3" in text
        assert "stage=2" in text


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_a_compiled_module_goes_to_processes_that_are_started(strategy: str) -> None:
    def fit(model: Any, **arguments: Any) -> Any:
        trainer = lw.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, precision="64-true", **arguments,
        )  # fmt: skip
        trainer.fit(model, loader(1, torch.float64), loader(2, torch.float64))
        return trainer.callback_metrics["val"]

    module, other = Net(2), Net(2)
    expected = fit(module, compile={"backend": "eager"})
    assert fit(torch.compile(other, backend="eager")) == expected
    assert all(torch.equal(one, two) for one, two in zip(module.parameters(), other.parameters(), strict=True))


def with_inductor(rank: int, size: int, name: str, folder: str) -> dict[str, Any]:
    """Train uncompiled, compiled, and compiled again; return weights, and the graphs that were compiled and read."""
    from torch._dynamo.utils import counters

    found: dict[str, Any] = {}
    with torch._inductor.config.patch(compile_threads=1):
        for number in ("first", "again"):
            counters.clear()
            options = {"cache_dir": f"{folder}/cache"}
            weights = run(name, folder, precision="32-true", compile=options, gradient_clip_val=1.0)[2]
            kept = counters["inductor"]
            found[number] = weights, kept["fxgraph_cache_miss"], kept["fxgraph_cache_hit"]
    found["plain"] = run(name, folder, precision="32-true", gradient_clip_val=1.0)[2]
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler (g++)")
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_one_rank_compiles_and_the_other_reads_what_it_did(name: str, tmp_path: Path) -> None:
    first, other = run_ranks(with_inductor, 2, name, str(tmp_path), connect=False, timeout_s=500)
    assert first["first"][1] > 0
    num_graphs = (
        first["first"][1] + first["first"][2]
    )  # equal blocks: the first one is compiled, the next ones are hits
    assert other["first"][1:] == (0, num_graphs)
    for found in (first, other):
        assert found["again"][1] == 0
        assert found["again"][2] == num_graphs
        for number in ("first", "again"):
            for key, value in found["plain"].items():
                # Sums in another order: float32 agrees to about five digits.
                torch.testing.assert_close(
                    torch.tensor(found[number][0][key]), torch.tensor(value), rtol=1e-4, atol=1e-5
                )
