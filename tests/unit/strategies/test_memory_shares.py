"""`SharesMemory.memory_shares` of each engine, and the axes of a mesh that split a module."""

from __future__ import annotations

import pytest

from loopwright.errors import ConfigError
from loopwright.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    MeshStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from loopwright.strategies.optional import memory_shares
from loopwright.strategies.traits import MemoryShares


@pytest.mark.parametrize(
    ("strategy", "nodes", "expected"),
    [
        (SingleDeviceStrategy(), 1, MemoryShares()),
        (DDPStrategy(), 1, MemoryShares(buckets=1, formula="20 P")),
        (FSDPStrategy(), 1, MemoryShares(8, 8, 8, casts_parameters=True, formula="16 P / N")),
        (
            FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"),
            1,
            MemoryShares(1, 8, 8, casts_parameters=True, formula="16 P / N"),
        ),
        (
            FSDPStrategy(sharding_strategy="HYBRID_SHARD"),
            2,
            MemoryShares(4, 4, 4, casts_parameters=True, formula="16 P / N"),
        ),
        (FSDPStrategy(device_mesh=(4, 2)), 1, MemoryShares(2, 2, 2, casts_parameters=True, formula="16 P / N")),
        (FSDPStrategy(sharding_strategy="NO_SHARD"), 1, MemoryShares(casts_parameters=True)),
        (
            DeepSpeedStrategy(stage=1),
            1,
            MemoryShares(1, 8, 8, has_float32_copies=True, casts_parameters=True, formula="4 P + 16 P / N"),
        ),
        (
            DeepSpeedStrategy(stage=3),
            1,
            MemoryShares(8, 8, 8, has_float32_copies=True, casts_parameters=True, formula="20 P / N"),
        ),
        (
            MeshStrategy(dp=2, fsdp=-1, tp=2),
            1,
            MemoryShares(4, 4, 4, activations=2, casts_parameters=True, formula="16 P / 4"),
        ),
        (MeshStrategy(dp=4, cp=2), 1, MemoryShares(2, 2, 2, activations=2, formula="16 P / 2")),
    ],
    ids=str,
)
def test_each_engine_says_what_eight_processes_share(strategy: Strategy, nodes: int, expected: MemoryShares) -> None:
    assert memory_shares(strategy, 8, nodes) == expected


def test_a_mesh_names_the_axes_that_split_a_module() -> None:
    assert DDPStrategy().traits.model_axes == {}
    assert MeshStrategy(dp=2, fsdp=2).traits.model_axes == {}
    assert MeshStrategy(dp=2, pp=2, tp=-1).traits.model_axes == {"pp": 2, "tp": -1}


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="Expected device_mesh= for 6 processes"):
        FSDPStrategy(device_mesh=(4, 2)).memory_shares(6, 1)
