"""Arguments of DeepSpeedStrategy that would silently change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from loopwright.strategies import DeepSpeedStrategy
from loopwright.strategies.deepspeed.arguments import without_effect


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"stage": 3, "offload_params_device": "nvme"}, ["offload_params_device (for offload_parameters=True)"]),
        ({"pin_memory": True}, ["pin_memory (for offload_optimizer=True or offload_parameters=True)"]),
        ({"thread_count": 2, "offload_optimizer": True}, ["thread_count (for offloading to 'nvme')"]),
        ({"loss_scale": 2.0}, ["loss_scale (for float16 precision)"]),
        ({"zero_optimization": False, "reduce_bucket_size": 3}, ["reduce_bucket_size (for ZeRO)"]),
        ({"remote_device": "cpu"}, ["remote_device (for stage=3)"]),
        ({"pin_memory": True, "offload_optimizer": True, "reduce_bucket_size": 3}, []),
        ({"stage": 3, "offload_parameters": True, "offload_params_device": "nvme", "thread_count": 2}, []),
        ({"stage": 3, "remote_device": "cpu", "cpu_checkpointing": True, "nvme_path": "/local_nvme"}, []),
    ],
)
def test_arguments_without_effect_are_named_with_what_they_are_for(
    arguments: dict[str, Any], expected: list[str]
) -> None:
    strategy = DeepSpeedStrategy(**arguments)
    assert without_effect(strategy.arguments, strategy.config) == expected
