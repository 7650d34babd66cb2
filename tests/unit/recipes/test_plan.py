"""`plan` against the training that it describes: bytes of weights, gradients and optimizer, steps, and parameters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_models import import_libraries
from recipe_runs import make_inputs, settings

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.recipes import train
from loopwright.recipes.memory import count_sizes
from loopwright.recipes.model.settings import LoraSettings, ModelSettings, shipped_names
from loopwright.recipes.plan import plan
from loopwright.recipes.run_folder import TrainingFolder
from loopwright.recipes.settings import FinetuneSettings, PlanFinetuneSettings, PlanPretrainSettings
from loopwright.recipes.train import finetune

# Any in this file: settings, and arguments of hooks.


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_libraries()
    return make_inputs(tmp_path_factory.mktemp("inputs"))


class Bytes(lw.Callback):
    """Counts what is in memory when an optimizer step begins, and after it."""

    weights = gradients = optimizer = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parameters = list(pl_module.parameters())
        self.weights = sum(one.nbytes for one in parameters)
        self.gradients = sum(one.grad.nbytes for one in parameters if one.grad is not None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        states = trainer.optimizers[0].state.values()
        tensors = [one for state in states for one in state.values() if isinstance(one, torch.Tensor) and one.dim()]
        self.optimizer = sum(one.nbytes for one in tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "full"},
        {"method": "full", "dtype": "bfloat16"},
        {"method": "full", "optimizer": {"class_path": "SGD", "init_args": {"momentum": 0.9}}},
        {},
        {"lora": LoraSettings(dora=True)},
        {"dtype": "bfloat16", "precision": "bf16-mixed"},
        {"precision": "bf16-true"},
    ],
)
def test_bytes_and_steps_are_those_of_the_training(inputs: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    counted = Bytes()
    chosen = settings(inputs, tmp_path / "run", epochs=2, micro_batch=2, **changes, trainer={"callbacks": [counted]})
    planned = plan(chosen)
    report = finetune(chosen)

    assert planned is not None
    assert report is not None
    memory = planned.memory
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        counted.weights,
        counted.gradients,
        counted.optimizer,
    )
    assert planned.steps.num_steps == report.steps
    assert (planned.sizes.trained, planned.sizes.frozen) == (report.parameters, report.frozen_parameters)
    assert planned.steps.trained_per_step * planned.steps.steps_per_epoch >= report.data["trained_tokens"]
    tokens = round(planned.steps.num_steps * planned.steps.tokens_per_step)
    flops = tokens * (6 * report.parameters + 4 * report.frozen_parameters)
    assert f"compute: {tokens:,} tokens, about {flops:.3g} FLOPs" in planned.describe()


def test_a_plan_makes_the_optimizer(inputs: Path, tmp_path: Path) -> None:
    groups: dict[str, Any] = {"vectors": {"optimizer": "Muon"}}
    with pytest.raises(ConfigError, match=r"groups.vectors: Expected .* Muon takes.* only supports 2D"):
        plan(settings(inputs, tmp_path / "run", method="full", groups=groups, steps=1))
    with pytest.raises(ConfigError, match="optimizer: Expected AdamW or the like with DeepSpeed.*got Muon"):
        plan(settings(inputs, tmp_path / "run", method="full", optimizer="Muon", strategy="deepspeed_stage_2"))
    groups = {"matrices": {"optimizer": "Muon", "learning_rate": 0.02}}
    with pytest.raises(ConfigError, match="groups: Expected AdamW or the like with DeepSpeed"):
        plan(settings(inputs, tmp_path / "run", method="full", groups=groups, strategy="deepspeed_stage_2"))
    groups = {"embeddings": {"learning_rate": 1e-5}}
    chosen = settings(inputs, tmp_path / "run", method="full", optimizer="Muon", groups=groups, steps=1)
    planned = plan(chosen)
    assert planned is not None
    assert "as for AdamW" in planned.describe()
    assert finetune(chosen) is not None
    assert finetune(chosen) is not None  # the same settings, as they were written


def test_a_plan_of_several_machines_needs_none(inputs: Path, tmp_path: Path) -> None:
    planned = plan(settings(inputs, tmp_path / "run", packing=False, micro_batch=2, trainer={"num_nodes": 4}))
    assert planned is not None
    assert (planned.processes, planned.steps.ranks) == (4, 4)
    assert "MASTER_ADDR" not in os.environ


def test_rows_are_as_long_as_the_model_where_the_default_is_longer(inputs: Path, tmp_path: Path) -> None:
    default = settings(inputs, tmp_path / "run", max_length=FinetuneSettings.max_length, steps=1)
    report = finetune(default)
    assert report is not None
    assert TrainingFolder(tmp_path / "run").read()["settings"]["max_length"] == 128  # type: ignore[index]
    assert finetune(default) == report  # it is not trained again


@pytest.mark.parametrize(("memory", "name"), [(10**12, "DDPStrategy"), (1000, "FSDPStrategy"), (None, "DDPStrategy")])
def test_a_model_that_does_not_fit_on_a_device_is_sharded(
    inputs: Path, tmp_path: Path, memory: int | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "device_memory", lambda device: memory)
    planned = plan(settings(inputs, tmp_path / "run", devices=2))
    assert planned is not None
    assert planned.strategy == name


def test_a_plan_of_sixteen_bits_says_so(inputs: Path, tmp_path: Path) -> None:
    full = {"method": "full", "steps": 1}
    short, usual = (
        plan(settings(inputs, tmp_path / str(dtype), dtype=dtype, **full)) for dtype in ("bfloat16", "float32")
    )
    assert short is not None
    assert usual is not None
    assert 2 * short.memory.state == usual.memory.state
    assert "(P trained parameters of 16 bits; in float32 16 P)" in short.describe()
    assert "(16 P; P: trained parameters, in float32)" in usual.describe()


# What the models' publications and hubs name.
PARAMETERS = {
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


def test_a_model_by_name_needs_no_files(tmp_path: Path) -> None:
    assert set(shipped_names()) == set(PARAMETERS)
    for name, count in PARAMETERS.items():
        assert count_sizes(ModelSettings(Path(name), from_scratch=True)).trained == count


def test_a_plan_without_data_is_that_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = plan(PlanPretrainSettings(model=Path("TinyLlama-1.1B"), max_length=64, devices=1))
    assert one is not None
    assert one.memory.state == 16 * PARAMETERS["tinyllama-1.1b"]
    assert "6.6 GFLOPs per token; 22 billion tokens" in one.describe()
    assert one.as_dict()["steps"] is None
    eight = plan(PlanPretrainSettings(model=Path("tinyllama-1.1b"), max_length=64, devices=8, strategy="fsdp"))
    assert eight is not None
    assert eight.memory.state == one.memory.state / 8
    continued = plan(PlanPretrainSettings(model=Path("TinyLlama-1.1B"), max_length=64, devices=1, from_scratch=False))
    assert continued is not None
    assert continued.memory == one.memory  # no weights are asked for
    adapters = plan(PlanFinetuneSettings(model=Path("tinyllama-1.1b"), max_length=64, devices=1))
    assert adapters is not None
    assert (adapters.sizes.frozen, adapters.sizes.trained) == (PARAMETERS["tinyllama-1.1b"], 12_615_680)
    assert list(tmp_path.iterdir()) == []


def test_a_name_without_weights_is_refused_where_they_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="llama-2-7b, a configuration without weights"):
        finetune(FinetuneSettings(data="none.jsonl", model=Path("llama-2-7b"), out=tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"got llama-2-7 \(did you mean 'llama-2-7b'\?\)"):
        plan(PlanFinetuneSettings(model=Path("llama-2-7")))
