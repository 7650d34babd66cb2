from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from loopwright.errors import ConfigError
from loopwright.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy, Strategy, StrategyRegistry


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
    known = set(STRATEGY_REGISTRY.available_strategies())
    assert {"ddp", "ddp_spawn_find_unused_parameters_true", "dp", "deepspeed_stage_3_offload_nvme"} <= known
    assert {"fsdp_cpu_offload", "mesh", "xla_debug", "xla_fsdp", "single_tpu", "single_device"} <= known
    assert len(known) == 31


def test_a_name_can_stand_for_a_class_that_is_imported_when_it_is_asked_for() -> None:
    registry = StrategyRegistry()
    registry.register_lazily("later", "loopwright.strategies.single_device:SingleDeviceStrategy", "text", device="cpu")
    registry.register_lazily("nowhere", "loopwright.strategies.there_is_none:Strategy")
    assert registry.available_strategies() == ["later", "nowhere"]
    assert registry.description("later") == "text"
    assert registry.get("Later") is SingleDeviceStrategy
    assert isinstance(registry.create("later"), SingleDeviceStrategy)
    with pytest.raises(ConfigError, match="already registered, for SingleDeviceStrategy"):
        registry.register_lazily("later", "elsewhere:Other")
    with pytest.raises(ModuleNotFoundError):
        registry.get("nowhere")


def test_the_names_of_several_processes_are_known_without_importing_them() -> None:
    command = (
        "import sys, loopwright.strategies as s; "
        "assert 'ddp_fork' in s.STRATEGY_REGISTRY and 'DDPStrategy' in dir(s); "
        "sys.exit(any(f'loopwright.strategies.{name}' in sys.modules for name in ('ddp', 'comm', 'data_parallel')))"
    )
    assert subprocess.run([sys.executable, "-c", command]).returncode == 0


@pytest.mark.parametrize("argument", ["cls", "strategy_class", "strategy"])
def test_a_class_may_be_passed_by_each_of_its_names(argument: str) -> None:
    class Custom(Strategy):
        pass

    registry = StrategyRegistry()
    made: Any = registry.register("custom", description="mine", **{argument: Custom})  # type: ignore[arg-type]
    assert made is registry.get("custom") is Custom
    assert registry.entry("custom").init_params == {}
    with pytest.raises(ConfigError, match="one class for the strategy 'other', got 2"):
        registry.register("other", Custom, strategy_class=Custom)
