from __future__ import annotations

from typing import Any

import pytest

from loopwright.errors import ConfigError
from loopwright.strategies import MeshStrategy
from loopwright.strategies.mesh.pipeline.options import SCHEDULES, Pipeline


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"schedule": "zero_bubble"}, "did you mean 'zero-bubble'"),
        ({"schedule": "1F1B"}, "did you mean '1f1b'"),
        ({"schedule": 3}, "got 3"),
        ({"split": "evn"}, "did you mean 'even'"),
        ({"split": []}, r"got \[\]"),
        ({"split": ["a", "a"]}, "each block once"),
        ({"split": 2}, "got 2"),
        ({"module": ""}, "name of a submodule"),
        ({"micro_batches": 0}, "positive number, got 0"),
        ({"micro_batches": 2.0}, "positive number, got 2.0"),
        ({"micro_batches": True}, "positive number, got True"),
        ({"module": "", "schedule": "x"}, "(?s)name of a submodule.*schedule"),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Pipeline(**arguments)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_is_on_one_rank(schedule: str) -> None:
    options = Pipeline(schedule=schedule)
    stages = sorted(stage for rank in range(4) for stage in options.stages_of(rank, 4))
    assert stages == list(range(options.num_stages(4)))


def test_v_schedules_have_first_and_last_stage_on_rank_0() -> None:
    assert Pipeline(schedule="zbv").stages_of(0, 4) == (0, 7)
    assert Pipeline(schedule="interleaved").stages_of(0, 4) == (0, 4)


def test_split_points_give_the_number_of_stages() -> None:
    assert Pipeline(split=["b.1", "b.2", "b.3"], schedule="interleaved").num_stages(2) == 4
    assert Pipeline(split=[f"b.{n}" for n in range(1, 6)], schedule="interleaved").stages_of(1, 2) == (1, 3, 5)
    with pytest.raises(ConfigError, match="Expected 1 split points .*got 2: b.1, b.2"):
        Pipeline(split=["b.1", "b.2"]).num_stages(2)


def test_arguments_of_the_strategy_are_checked() -> None:
    with pytest.raises(ConfigError, match="Expected pipeline= to be a Pipeline, got '1f1b'"):
        MeshStrategy(pp=2, pipeline="1f1b")
    with pytest.raises(ConfigError, match="Expected 1 split points"):
        MeshStrategy(pp=2, pipeline=Pipeline(split=["a", "b"])).check_processes(2, 1)
