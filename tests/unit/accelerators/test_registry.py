from __future__ import annotations

from typing import Any

import pytest

from loopwright.accelerators import ACCELERATOR_REGISTRY, Accelerator, AcceleratorRegistry, CPUAccelerator
from loopwright.errors import ConfigError


class Board(Accelerator):
    def __init__(self, speed: int = 1) -> None:
        self.speed = speed


def test_the_global_registry_has_the_kinds_that_torch_has() -> None:
    assert {"cpu", "cuda", "mps"} <= ACCELERATOR_REGISTRY.available_accelerators()
    assert ACCELERATOR_REGISTRY.get("CPU") is CPUAccelerator
    assert isinstance(ACCELERATOR_REGISTRY.create("cpu"), CPUAccelerator)


def test_register_as_call_and_as_decorator() -> None:
    registry = AcceleratorRegistry()
    registry.register("board", Board, "a board", speed=2)

    @registry.register("other")
    class Other(Accelerator):
        pass

    assert registry.names() == ["board", "other"]
    assert registry.get("other") is Other
    made: Any = registry.create("board")
    assert made.speed == 2
    assert registry.create("board", speed=3).speed == 3
    assert registry.description("board") == "a board"
    assert "Board" in registry
    assert len(registry) == 2


def test_an_unknown_name_names_the_nearest_and_all() -> None:
    registry = AcceleratorRegistry()
    registry.register("board", Board)
    for call in (registry.get, registry.create, registry.remove):
        with pytest.raises(ConfigError, match=r"did you mean 'board'(.|\n)*use one of: board"):
            call("bord")
    assert registry.get("bord", Board) is Board


def test_a_name_is_taken_once_unless_overridden() -> None:
    registry = AcceleratorRegistry()
    registry.register("board", Board)
    with pytest.raises(ConfigError, match="already registered, for Board"):
        registry.register("BOARD", CPUAccelerator)
    registry.register("board", CPUAccelerator, override=True)
    assert registry.get("board") is CPUAccelerator
    registry.remove("board")
    assert "board" not in registry


@pytest.mark.parametrize("name", [None, 3, "", Board])
def test_a_name_must_be_a_string(name: Any) -> None:
    with pytest.raises(ConfigError, match="Expected a string"):
        AcceleratorRegistry().register(name, Board)


def test_an_instance_cannot_be_registered() -> None:
    with pytest.raises(ConfigError, match="Expected a class for"):
        AcceleratorRegistry().register("board", Board())  # type: ignore[call-overload]
