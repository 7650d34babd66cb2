"""The constructors of XLA's strategies, which need no torch_xla; tests/integration/xla runs them."""

from __future__ import annotations

import pickle
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.errors import ConfigError, MissingDependency
from loopwright.precision import XLAPrecision
from loopwright.strategies import (
    STRATEGY_REGISTRY,
    SingleDeviceXLAStrategy,
    XLAFSDPStrategy,
    XLAStrategy,
)


def test_the_names_of_the_field_make_them() -> None:
    is_imported = "torch_xla" in sys.modules
    made = {
        name: STRATEGY_REGISTRY.create(name) for name in ("xla", "xla_debug", "xla_fsdp", "single_xla", "single_tpu")
    }
    assert [type(one).__name__ for one in made.values()] == [
        "XLAStrategy", "XLAStrategy", "XLAFSDPStrategy", "SingleDeviceXLAStrategy", "SingleDeviceXLAStrategy",
    ]  # fmt: skip
    assert made["xla_debug"].debug  # type: ignore[attr-defined]
    assert not made["xla"].debug  # type: ignore[attr-defined]
    assert ("torch_xla" in sys.modules) == is_imported


def test_the_arguments_of_the_field_are_taken_by_position() -> None:
    devices = [torch.device("xla", 0), torch.device("xla", 1)]
    strategy = XLAStrategy(None, devices, None, None, True, False)
    assert (strategy.num_devices, strategy.debug, strategy.sync_module_states) == (2, True, False)
    assert SingleDeviceXLAStrategy("xla:1", None, None, None, True).device == torch.device("xla", 1)
    assert SingleDeviceXLAStrategy(1).device == torch.device("xla", 1)
    sharded = XLAFSDPStrategy(
        None, devices, None, None, {nn.Linear}, {nn.Linear}, "full", True, reshard_after_forward=True
    )
    assert sharded.sequential_save
    assert pickle.loads(pickle.dumps(strategy)).num_devices == 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_longest_dimension_is_sharded(size: int) -> None:
    strategy = XLAFSDPStrategy(parallel_devices=[torch.device("xla", index) for index in range(size)])
    assert strategy.spec_of(torch.zeros(2, 6)) == (None, "fsdp")
    assert strategy.spec_of(torch.zeros(())) == ()
    assert strategy.spec_of(torch.zeros(2)) == (("fsdp",) if size <= 2 else (None,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SingleDeviceXLAStrategy("cpu"), "Expected device to be an XLA device, got 'cpu'"),
        (lambda: SingleDeviceXLAStrategy("nonsense"), "Expected device to be an XLA device"),
        (lambda: XLAStrategy(cluster_environment=object()), "one process for all devices"),
        (lambda: XLAFSDPStrategy(state_dict_type="sharded"), "one process has all shards"),
        (lambda: XLAFSDPStrategy(state_dict_type="ful"), "did you mean 'full'"),
        (
            lambda: XLAFSDPStrategy(flatten_parameters=True, optimization_barrier_in_forward=1),
            "flatten_parameters=True",
        ),
        (lambda: XLAFSDPStrategy(auto_wrap_policy=3), "Expected auto_wrap_policy= to be a policy, got 3"),
        (lambda: XLAFSDPStrategy(activation_checkpointing=3), "or a policy, got 3"),
        (lambda: XLAPrecision("16-mixed"), "precision='16-mixed'"),
    ],
)
def test_what_cannot_be_is_refused_in_the_constructor(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert caught.value.fix


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        XLAFSDPStrategy(state_dict_type="sharded", auto_wrap_policy=3, flatten_parameters=True)
    assert all(part in caught.value.what for part in ("state_dict_type", "auto_wrap_policy", "flatten_parameters"))


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_without_torch_xla_the_runtime_says_what_to_install() -> None:
    with pytest.raises((ConfigError, MissingDependency), match="needs the package 'torch_xla'") as caught:
        SingleDeviceXLAStrategy().setup_environment()
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in str(caught.value)


@pytest.mark.parametrize("name", ["32-true", "bf16-true", "16-true"])
def test_the_precision_is_that_of_the_same_name(name: str) -> None:
    precision = XLAPrecision(name)
    linear = precision.convert_module(nn.Linear(2, 2))
    assert linear.weight.dtype == precision.policy.param_dtype
    with precision.forward_context():
        assert torch.ones(1).dtype == precision.policy.compute_dtype
    assert precision.convert_output(torch.ones(1, dtype=linear.weight.dtype)).dtype == torch.float32
