from __future__ import annotations

from typing import Any

import pytest

from loopwright.errors import ConfigError
from loopwright.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy, Strategy, StrategyRegistry
from loopwright.strategies.registry import PLANNED_STRATEGIES


def test_get_gives_the_class_and_create_an_instance() -> None:
    assert STRATEGY_REGISTRY.get("Single_Device") is SingleDeviceStrategy
    made = STRATEGY_REGISTRY.create("single_device", device="cpu")
    assert isinstance(made, SingleDeviceStrategy)
    assert "single_device" in STRATEGY_REGISTRY.available_strategies()


def test_one_class_can_have_several_names() -> None:
    class Custom(Strategy):
        def __init__(self, start_method: str = "popen") -> None:
            super().__init__()
            self.start_method = start_method

    registry = StrategyRegistry()
    registry.register("custom", Custom, "mine")
    registry.register("custom_fork", Custom, start_method="fork")
    made: Any = registry.create("custom_fork")
    assert made.start_method == "fork"
    assert registry.available_strategies() == ["custom", "custom_fork"]
    registry.remove("custom")
    with pytest.raises(ConfigError, match=r"did you mean 'custom_fork'"):
        registry.get("custom")


def test_every_name_of_the_field_is_known() -> None:
    assert {"ddp", "ddp_spawn_find_unused_parameters_true", "dp", "deepspeed_stage_3_offload_nvme"} <= {
        *PLANNED_STRATEGIES
    }
    assert {"fsdp_cpu_offload", "xla_debug", "xla_fsdp", "single_tpu"} <= {*PLANNED_STRATEGIES}
    assert len(PLANNED_STRATEGIES) == 28
