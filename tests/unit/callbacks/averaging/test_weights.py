from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from loopwright.callbacks.averaging.weights import check_fit, kept_dtype, refuse_shards, tensors_of, tied_names, write
from loopwright.errors import CheckpointError, ConfigError
from loopwright.strategies import DeepSpeedStrategy, Strategy, XLAFSDPStrategy
from loopwright.strategies.traits import Traits


def tied() -> nn.ModuleDict:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False), "norm": nn.BatchNorm1d(2)})
    module["b"].weight = module["a"].weight
    module["norm"].register_buffer("scratch", torch.zeros(1), persistent=False)
    return module


def test_each_saved_tensor_is_named_once() -> None:
    module = tied()
    names = ["a.weight", "a.bias", "norm.weight", "norm.bias"]
    buffers = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert list(tensors_of(module)) == [*names, *buffers]
    assert tied_names(module) == {"b.weight": "a.weight"}


def test_names_of_compiled_submodules_have_no_prefix() -> None:
    module = nn.ModuleDict(
        {"a": nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)})}
    )  # torch.compile's wrapper has that child
    assert list(tensors_of(module)) == ["a.weight", "a.bias"]


def test_half_precision_is_kept_wide() -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.long]
    wide = [torch.float32, torch.float32, torch.float32, torch.float64, torch.long]
    assert [kept_dtype(torch.zeros(1, dtype=dtype)) for dtype in dtypes] == wide


def test_writing_keeps_the_modules_own_tensors() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight
    write({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, tensors_of(module), owner="X")
    assert module.weight is weight
    assert weight.requires_grad
    assert torch.equal(weight, torch.ones(2, 2))


def test_everything_that_does_not_fit_is_named() -> None:
    values = {"weight": torch.zeros(3), "other": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"X: .*missing bias; unexpected other; weight has shape \(3,\), the mod"):
        check_fit(values, tensors_of(nn.Linear(2, 2)), owner="X")


@pytest.mark.parametrize("engine", [DeepSpeedStrategy, XLAFSDPStrategy])
def test_engines_are_refused_before_training(engine: type[Strategy]) -> None:
    strategy = Strategy()
    strategy.traits = engine.traits
    trainer: Any = SimpleNamespace(strategy=strategy, fit_loop=SimpleNamespace(epoch_limit=9))
    for callback in (WeightAveraging(), StochasticWeightAveraging(0.1), ModelPruning("l1_unstructured")):
        with pytest.raises(ConfigError, match=f"{type(callback).__name__} reads and writes the weights, and under"):
            callback.on_fit_start(trainer, nn.Linear(2, 2))
    strategy.traits = Traits()
    refuse_shards(trainer, nn.Linear(2, 2), owner="X")
    strategy.traits = Traits(shards_parameters=True)
    with pytest.raises(ConfigError, match="X needs the full module"):
        refuse_shards(trainer, nn.Linear(2, 2), owner="X")
