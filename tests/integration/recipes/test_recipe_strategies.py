"""Recipes on two ranks: first values are those of the folder, and four steps are those of one process."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import keep
from ranks import import_deepspeed, run_ranks
from recipe_models import import_libraries, loader, save_model, settings, trainer
from torch import Tensor

from loopwright.recipes.module import OptimizerSettings, RecipeModule, block_classes
from loopwright.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, MeshStrategy

# Any in this file: strategies, and results that travel between processes.

PARTITIONED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
BLOCKS = {"LlamaDecoderLayer"}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy=BLOCKS),
    # The output layer is a unit of its own, as that of a large vocabulary is.
    "fsdp, head": lambda: FSDPStrategy(auto_wrap_policy={*BLOCKS, "Linear"}, reshard_after_forward=True),
    "deepspeed_stage_3": lambda: DeepSpeedStrategy(config=PARTITIONED),
    "mesh:tp=2": lambda: MeshStrategy(tp=2),
    "mesh:pp=2": lambda: MeshStrategy(pp=2),
    "mesh:fsdp=2,tp=2": lambda: MeshStrategy(fsdp=2, tp=2, auto_wrap_policy=BLOCKS),
}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_deepspeed()
    import_libraries()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("saved") / "llama")


class Seen(RecipeModule):
    """Reads its weights before and after."""

    def read(self) -> None:
        run = self.trainer.latest_run()
        assert run is not None
        state = self.trainer.strategy.gather_state(self.trainer.strategy.module_state_dict(run.model))
        if self.trainer.is_global_zero:
            self.seen.append({name: value.clone() for name, value in state.items()})

    def on_train_start(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.read()

    def on_train_end(self) -> None:
        self.read()


def fit(
    strategy: Any, size: int, data_size: int, folder: Path, kind: str, chunk_tokens: int | None, **options: Any
) -> tuple[list[dict[str, Tensor]], float]:
    runner = trainer(strategy, size, has_val=True, accumulate_grad_batches=2, gradient_clip_val=1.0, **options)
    # A small eps enlarges the noise of gradients near zero.
    chosen = OptimizerSettings(learning_rate=1e-2, eps=1e-4, weight_decay=0.1)
    module = Seen(settings(folder, kind), chosen, 4, chunk_tokens=chunk_tokens)
    runner.fit(module, loader(4 // data_size), loader(2, rows=8, seed=8))
    return module.seen, float(runner.callback_metrics["val_loss"])


def train(rank: int, size: int, name: str, data_size: int, *args: Any) -> Any:
    return fit(STRATEGIES[name](), size, data_size, *args)


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: packed weights of 4 bits may be NaN as numbers."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def compare(name: str, size: int, data_size: int, folder: Path, kind: str, chunk_tokens: int | None) -> None:
    (first, last), val_loss = fit("auto", 1, 1, folder, kind, chunk_tokens)
    found = run_ranks(train, size, name, data_size, folder, kind, chunk_tokens, connect=False, timeout_s=120)[0]
    (theirs, trained), their_loss = found
    changes = [
        float((last[key] - value).abs().max()) for key, value in first.items() if kind == "full" or "lora_" in key
    ]
    assert max(changes) > 1e-3, "nothing is trained"
    # Shards of a quantized weight have no entries beside it (weight.absmax), which a checkpoint leaves out anyway.
    assert theirs.keys() == {key for key in first if ".weight." not in key or name == "ddp"}
    for key, value in theirs.items():
        assert torch.equal(bits(value), bits(first[key])), f"{name}: {key}"
        if kind != "full" and "lora_" not in key:
            assert torch.equal(bits(trained[key]), bits(value)), f"{name}: {key}"
        else:  # ranks add up gradients in another order; sums within a layer (tp) reach 2.0e-6 with any loss
            tolerance = 6e-6 if "tp=" in name else 2e-6
            torch.testing.assert_close(trained[key], last[key], rtol=0, atol=tolerance, msg=f"{name}: {key}")
    assert their_loss == pytest.approx(val_loss, abs=1e-6)


def test_one_process_begins_with_the_folder(folder: Path) -> None:
    from safetensors.torch import load_file

    saved = load_file(folder / "model.safetensors")
    for kind in ("full", "lora"):
        (first, _), _ = fit("auto", 1, 1, folder, kind, None)
        plain = {
            name.removeprefix("model.").removeprefix("base_model.model.").replace(".base_layer.", "."): one
            for name, one in first.items()
        }
        assert all(torch.equal(plain[name], one) for name, one in saved.items())
        assert all(not one.any() for name, one in plain.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("name", "kind"),
    keep(
        itertools.product(["ddp", "fsdp", "fsdp, head", "deepspeed_stage_3"], ["full", "lora"]),
        ("ddp", "lora"),
        ("fsdp", "full"),
        ("fsdp, head", "lora"),
        ("deepspeed_stage_3", "full"),
    ),
)
def test_two_ranks_are_one_process(name: str, kind: str, folder: Path) -> None:
    compare(name, 2, 2, folder, kind, 5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "dora"])
@pytest.mark.parametrize("chunk_tokens", [None, 0])
@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed_stage_3"])
def test_other_losses_on_two_ranks_are_one_process(
    name: str, chunk_tokens: int | None, kind: str, folder: Path
) -> None:
    compare(name, 2, 2, folder, kind, chunk_tokens)


@pytest.mark.parametrize("kind", keep(["full", "lora"], "lora"))
def test_tensor_parallelism_is_one_process(kind: str, folder: Path) -> None:
    compare("mesh:tp=2", 2, 1, folder, kind, 5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_shards_of_tensors_are_one_process(kind: str, folder: Path) -> None:
    compare("mesh:fsdp=2,tp=2", 4, 2, folder, kind, 5)


def test_pipeline_stages_are_one_process(folder: Path) -> None:
    compare("mesh:pp=2", 2, 1, folder, "full", None)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("name", keep(["ddp", "fsdp"], "fsdp"))
def test_a_quantized_base_on_two_ranks_is_one_process(name: str, folder: Path) -> None:
    compare(name, 2, 2, folder, "nf4", 5)


def fit_muon(strategy: Any, size: int, folder: Path) -> list[dict[str, Tensor]]:
    """Return the weights before and after a step."""
    groups = {"matrices": {"optimizer": {"class_path": "Muon"}, "learning_rate": 0.01}}
    chosen = OptimizerSettings(learning_rate=1e-2, eps=1e-4, warmup=0, groups=groups)
    module = Seen(settings(folder), chosen, 1)
    trainer(strategy, size, max_steps=1).fit(module, loader(4 // size))
    return module.seen


def train_muon(rank: int, size: int, folder: Path) -> list[list[dict[str, Tensor]]]:
    strategies = (DDPStrategy(), FSDPStrategy(auto_wrap_policy=BLOCKS))
    return [fit_muon(strategy, size, folder) for strategy in strategies]


def test_an_optimizer_of_matrices_on_two_ranks_is_that_of_one_process(folder: Path) -> None:
    before, alone = fit_muon("auto", 1, folder)
    for name, (_, found) in zip(("ddp", "fsdp"), run_ranks(train_muon, 2, folder, connect=False)[0], strict=True):
        for key, one in found.items():
            # Muon computes in bfloat16, which enlarges rounding. Of parts of a matrix, it makes another update: 0.6.
            change = alone[key] - before[key]
            assert float((one - alone[key]).norm()) < 0.1 * float(change.norm()) + 1e-5, f"{name}: {key}"


def fit_experts(folder: Path, strategy: Any, size: int, accumulate: int) -> dict[str, Tensor]:
    module = Seen(settings(folder), OptimizerSettings(learning_rate=1e-2, eps=1e-4), 2)
    trainer(strategy, size, accumulate_grad_batches=accumulate, max_steps=2).fit(module, loader(2))
    return module.seen[-1] if module.seen else {}


def train_experts(rank: int, size: int, folder: Path) -> list[dict[str, Tensor]]:
    return [
        fit_experts(folder, strategy, size, accumulate)
        for strategy, accumulate in (
            (DDPStrategy(), 2),
            (FSDPStrategy(auto_wrap_policy={"MixtralDecoderLayer"}), 2),
            (MeshStrategy(tp=2), 4),
        )
    ]


def test_the_loss_of_a_router_on_two_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "mixtral")
    alone = fit_experts(folder, "auto", 1, 4)  # the same micro-batches, of which the term is a mean
    for name, found in zip(("ddp", "fsdp", "tp"), run_ranks(train_experts, 2, folder, connect=False)[0], strict=True):
        for key, one in found.items():
            torch.testing.assert_close(one, alone[key], rtol=0, atol=6e-6, msg=f"{name}: {key}")


def test_units_are_the_blocks_of_the_model(folder: Path) -> None:
    assert block_classes(settings(folder)) == BLOCKS
