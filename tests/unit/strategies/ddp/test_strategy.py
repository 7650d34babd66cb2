from __future__ import annotations

import pickle
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks

from loopwright.errors import ConfigError, LaunchError
from loopwright.strategies import STRATEGY_REGISTRY, DDPStrategy, SingleDeviceStrategy


@pytest.mark.parametrize(
    ("name", "start_method", "kwargs"),
    [
        ("ddp", "popen", {}),
        ("DDP_spawn", "spawn", {}),
        ("ddp_fork", "fork", {}),
        ("ddp_notebook", "fork", {}),
        ("ddp_find_unused_parameters_false", "popen", {"find_unused_parameters": False}),
        ("ddp_find_unused_parameters_true", "popen", {"find_unused_parameters": True}),
        ("ddp_spawn_find_unused_parameters_true", "spawn", {"find_unused_parameters": True}),
        ("ddp_fork_find_unused_parameters_false", "fork", {"find_unused_parameters": False}),
        ("ddp_notebook_find_unused_parameters_true", "fork", {"find_unused_parameters": True}),
    ],
)
def test_every_alias_makes_it(name: str, start_method: str, kwargs: dict[str, Any]) -> None:
    made: Any = STRATEGY_REGISTRY.create(name)
    assert isinstance(made, DDPStrategy)
    assert made.start_method == start_method
    assert made.ddp_kwargs == kwargs


def name_of(value: Any) -> str:
    """Return a test's name without addresses, equal in all processes that collect it."""
    return re.sub(r"<[^<>]*?(\w+) at 0x[0-9a-f]+>", r"\1", str(value))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"find_unused_parameter": True}, ["find_unused_parameter=", "did you mean 'find_unused_parameters'"]),
        ({"uneve": "cycle"}, ["did you mean 'uneven'"]),
        ({"device_ids": [0]}, ["device_ids= follows from devices="]),
        ({"start_method": "popem"}, ["start_method='popem'", "did you mean 'popen'"]),
        ({"uneven": "stop"}, ["uneven='stop'", "stop_all"]),
        ({"timeout": 0}, ["timeout=0"]),
        ({"timeout": "1h", "stall_timeout": -1}, ["timeout='1h'", "stall_timeout=-1"]),
        ({"ddp_comm_hook": "bf61"}, ["ddp_comm_hook='bf61'", "did you mean 'bf16'"]),
        ({"ddp_comm_hook": DDPCommHookType.QUANTIZE_PER_TENSOR}, ["QUANTIZE_PER_TENSOR"]),
        ({"ddp_comm_hook": "fp16", "ddp_comm_wrapper": "int8"}, ["ddp_comm_wrapper='int8'"]),
        ({"ddp_comm_state": 2}, ["require ddp_comm_hook"]),
        ({"ddp_comm_hook": "post_local_sgd"}, ["requires model_averaging_period"]),
        ({"model_averaging_period": 4}, ["without ddp_comm_hook='post_local_sgd'"]),
        ({"ddp_comm_hook": "post_local_sgd", "model_averaging_period": 0}, ["model_averaging_period=0"]),
    ],
    ids=name_of,
)
def test_wrong_arguments_are_named_with_advice(kwargs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        DDPStrategy(**kwargs)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_durations_have_the_fields_defaults() -> None:
    assert DDPStrategy().timeout == DDPStrategy(timeout=None).timeout == timedelta(seconds=1800)
    assert DDPStrategy().stall_timeout == timedelta(seconds=300)
    short = DDPStrategy(timeout=20.0)
    assert (short.timeout, short.stall_timeout) == (timedelta(seconds=20), timedelta(seconds=20))
    assert DDPStrategy(stall_timeout=timedelta(seconds=7)).stall_timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    "hook", ["FP16", "bf16_compress", DDPCommHookType.POWER_SGD, default_hooks.bf16_compress_hook, lambda s, b: None]
)
def test_hooks_may_be_names_members_and_functions(hook: Any) -> None:
    assert DDPStrategy(ddp_comm_hook=hook).ddp_comm_hook is hook


def test_a_strategy_can_be_sent_to_a_process_that_is_spawned() -> None:
    sent: Any = pickle.loads(pickle.dumps(STRATEGY_REGISTRY.create("ddp_spawn", uneven="cycle")))
    assert (sent.start_method, sent.uneven, sent.world_size) == ("spawn", "cycle", 1)


def test_without_a_cluster_the_processes_cannot_be_connected() -> None:
    with pytest.raises(LaunchError, match="Expected a cluster environment"):
        DDPStrategy().setup_environment()


def test_the_device_is_that_of_the_local_rank() -> None:
    class Cluster:
        def __init__(self, local_rank: int) -> None:
            self.local = local_rank

        def global_rank(self) -> int:
            return self.local

        def local_rank(self) -> int:
            return self.local

        def node_rank(self) -> int:
            return 0

        def world_size(self) -> int:
            return 4

    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert DDPStrategy(parallel_devices=devices, cluster_environment=Cluster(1)).device == devices[1]
    with pytest.raises(ConfigError, match=r"local rank 2, got 2 on this node: cuda:0, cuda:1"):
        DDPStrategy(parallel_devices=devices, cluster_environment=Cluster(2)).device  # noqa: B018
    assert isinstance(STRATEGY_REGISTRY.create("single_device"), SingleDeviceStrategy)
