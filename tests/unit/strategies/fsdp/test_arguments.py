from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from loopwright.errors import Clauses, ConfigError
from loopwright.strategies.fsdp import arguments
from loopwright.strategies.fsdp.plan import MixedPrecisionPlan, ShardingPlan, check_mesh

HALF = torch.bfloat16


def read_arguments(**given: object) -> ShardingPlan:
    problems = Clauses()
    plan = arguments.read_arguments(given, problems)
    problems.refuse()
    return plan


def test_nothing_given_is_the_default_plan() -> None:
    assert read_arguments() == ShardingPlan()
    # As the constructor of the strategy spells its defaults
    assert (
        read_arguments(sharding_strategy="FULL_SHARD", use_orig_params=True, forward_prefetch=False) == ShardingPlan()
    )
    assert read_arguments(cpu_offload=False, limit_all_gathers=True, process_group=None) == ShardingPlan()
    assert ShardingPlan().sync_module_states


@pytest.mark.parametrize("spelling", [str, str.lower, ShardingStrategy.__getitem__])
def test_every_sharding_strategy(spelling: Any) -> None:
    def read(name: str) -> tuple[Any, ...]:
        plan = read_arguments(sharding_strategy=spelling(name))
        return plan.reshard_after_forward, plan.is_hybrid, plan.is_replicated

    assert read("FULL_SHARD") == (True, False, False)
    assert read("SHARD_GRAD_OP") == (False, False, False)
    assert read("NO_SHARD") == (False, False, True)
    assert read("HYBRID_SHARD") == (True, True, False)
    assert read("_HYBRID_SHARD_ZERO2") == (False, True, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"cpu_offload": True}, {"offload": True}),
        ({"cpu_offload": CPUOffload(offload_params=True)}, {"offload": True}),
        ({"cpu_offload": CPUOffload()}, {}),
        ({"cpu_offload": CPUOffloadPolicy()}, {"offload": True, "pin_memory": True}),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"offload": True, "pin_memory": False}),
        ({"offload_policy": OffloadPolicy()}, {}),
        (
            {"mixed_precision": MixedPrecision(HALF, HALF, HALF)},
            {
                "mixed_precision": MixedPrecisionPlan(
                    HALF,
                    HALF,
                    HALF,
                    cast_forward_inputs=False,
                    full_precision_classes=(nn.modules.batchnorm._BatchNorm,),
                )
            },
        ),
        (
            {"mp_policy": MixedPrecisionPolicy(HALF, torch.float32, HALF, cast_forward_inputs=False)},
            {
                "mixed_precision": MixedPrecisionPlan(
                    HALF,
                    torch.float32,
                    output_dtype=HALF,
                    cast_forward_inputs=False,
                    cast_root_forward_inputs=False,
                )
            },
        ),
        ({"mixed_precision": MixedPrecisionPolicy()}, {"mixed_precision": MixedPrecisionPlan()}),
        ({"state_dict_type": "Full"}, {"state_dict_type": "full"}),
        ({"state_dict_type": StateDictType.FULL_STATE_DICT}, {"state_dict_type": "full"}),
        ({"state_dict_type": StateDictType.SHARDED_STATE_DICT}, {"state_dict_type": "sharded"}),
        ({"activation_checkpointing": True}, {"activation_checkpointing": True}),
        ({"activation_checkpointing": False}, {}),
        ({"activation_checkpointing": [nn.Linear]}, {"activation_checkpointing": [nn.Linear]}),
        ({"activation_checkpointing_policy": {nn.Linear}}, {"activation_checkpointing": {nn.Linear}}),
        ({"auto_wrap_policy": transformer_auto_wrap_policy}, {"auto_wrap_policy": transformer_auto_wrap_policy}),
        ({"auto_wrap_policy": {"Block"}}, {"auto_wrap_policy": {"Block"}}),
        ({"device_mesh": (2, 4)}, {"mesh": (2, 4), "is_hybrid": True}),
        ({"mesh": [1, 4], "sharding_strategy": "HYBRID_SHARD"}, {"mesh": (1, 4), "is_hybrid": True}),
        ({"device_mesh": (4, 1), "sharding_strategy": "NO_SHARD"}, {"mesh": (4, 1), "is_hybrid": True}),
        ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
        ({"reshard_after_forward": 2}, {"reshard_after_forward": 2}),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, {}),
        ({"backward_prefetch": 2}, {"backward_prefetch": 2}),
        ({"forward_prefetch": True}, {"forward_prefetch": 1}),
        ({"forward_prefetch": 3}, {"forward_prefetch": 3}),
        ({"sync_module_states": False}, {"sync_module_states": False}),
        ({"sync_module_states": True}, {}),
        ({"param_init_fn": nn.init.zeros_}, {"param_init_fn": nn.init.zeros_}),
        ({"shard_placement_fn": len}, {"shard_placement_fn": len}),
    ],
    ids=lambda value: ", ".join(value),
)
def test_every_argument_in_each_of_its_forms(given: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = read_arguments(**given)
    kept = {name: getattr(plan, name) for name in expected}
    assert kept == expected
    others = {name: value for name, value in vars(plan).items() if name not in expected and name != "notes"}
    default = vars(read_arguments(sharding_strategy=given.get("sharding_strategy")))
    assert others == {name: default[name] for name in others}


def test_what_has_no_effect_is_said() -> None:
    plan = read_arguments(
        use_orig_params=False,
        limit_all_gathers=False,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        mixed_precision=MixedPrecision(keep_low_precision_grads=True),
        device_mesh=(2, 2),
        sharding_strategy="SHARD_GRAD_OP",
    )
    starts = ["sharding_strategy='SHARD_GRAD_OP'", "use_orig_params=False", "limit_all_gathers=False"]
    starts += ["keep_low_precision_grads=True", "backward_prefetch='BACKWARD_POST'"]
    assert [note.split(" ")[0] for note in plan.notes] == starts
    assert "as _HYBRID_SHARD_ZERO2 does." in plan.notes[0]
    assert read_arguments(use_orig_params=True, limit_all_gathers=True, backward_prefetch="backward_pre").notes == ()


def test_parameters_and_modules_can_be_ignored_in_every_way() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    plan = read_arguments(
        ignored_modules=iter([model[0]]), ignored_states=[model[1].weight, other], ignored_params=model[2].parameters()
    )
    expected = {*model[0].parameters(), model[1].weight, *model[2].parameters()}
    assert plan.find_ignored(model) == plan.find_ignored(model) == expected
    assert read_arguments().find_ignored(model) == set()


def mesh_of(*shape: int, names: tuple[str, ...] | None = ("replicate", "shard")) -> Any:
    """Return an object of torch's class DeviceMesh, which needs no processes as long as nobody communicates."""
    from torch.distributed import device_mesh

    ranks = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    # torch 2.9 takes no rank, and asks the processes for it.
    with patch.object(device_mesh, "get_rank", lambda: 0):
        return device_mesh.DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"auto_wrap_polcy": None},
            ["auto_wrap_polcy= is not an argument of this strategy (did you mean 'auto_wrap_policy'?)"],
        ),
        ({"start_metod": "fork"}, ["did you mean 'start_method'?"]),
        ({"process_group": object()}, ["process_group= cannot be used", "DeviceMesh.from_group"]),
        ({"process_group": (1, 2), "device_mesh": (1, 2)}, ["process_group= and device_mesh= set the same option"]),
        ({"device_id": 0}, ["device_id= is derived from devices="]),
        ({"dp_mesh_dims": 0}, ["dp_mesh_dims= cannot be used"]),
        ({"module": 0}, ["module= is passed to the Trainer"]),
        ({"sharding_strategy": "FULL_SHART"}, ["got sharding_strategy='FULL_SHART' (did you mean 'FULL_SHARD'?)"]),
        ({"sharding_strategy": 3}, ["got sharding_strategy=3"]),
        ({"cpu_offload": "yes"}, ["got cpu_offload='yes'", "CPUOffload"]),
        ({"cpu_offload": True, "offload_policy": OffloadPolicy()}, ["cpu_offload= and offload_policy= set the same"]),
        ({"mixed_precision": "bf16-mixed"}, ["got mixed_precision='bf16-mixed'", "precision='bf16-mixed'"]),
        (
            {"mixed_precision": MixedPrecision(param_dtype=torch.int8)},
            ["a floating-point dtype, got param_dtype=torch.int8"],
        ),
        ({"activation_checkpointing": True, "activation_checkpointing_policy": {nn.Linear}}, ["set the same option"]),
        (
            {"activation_checkpointing": 3},
            ["Expected activation_checkpointing= to be True, a fraction from 0.0 to 1.0, or a policy, got 3"],
        ),
        ({"auto_wrap_policy": {3}}, ["Expected auto_wrap_policy= to contain only classes, got 3"]),
        ({"device_mesh": (2, 0)}, ["got device_mesh=(2, 0)", "two positive integers"]),
        ({"device_mesh": 4}, ["got device_mesh=4"]),
        ({"device_mesh": (2, 2), "sharding_strategy": "NO_SHARD"}, ["'NO_SHARD', got one with 2 shards"]),
        ({"device_mesh": mesh_of(2, 2, 1, names=None)}, ["one or two axes, got 3"]),
        ({"device_mesh": mesh_of(2, 2, names=None)}, ["names for the two axes", "mesh_dim_names="]),
        (
            {"device_mesh": mesh_of(4, names=None), "sharding_strategy": "HYBRID_SHARD"},
            ["'HYBRID_SHARD', got one axis"],
        ),
        ({"reshard_after_forward": -1}, ["a positive integer, got -1"]),
        ({"reshard_after_forward": True, "sharding_strategy": "SHARD_GRAD_OP"}, ["keeps parameters after forward"]),
        ({"backward_prefetch": "BACKWARD"}, ["got backward_prefetch='BACKWARD'", "did you mean 'BACKWARD_P"]),
        ({"forward_prefetch": "yes"}, ["got forward_prefetch='yes'"]),
        ({"state_dict_type": "shraded"}, ["got state_dict_type='shraded' (did you mean 'sharded'?)"]),
        (
            {"state_dict_type": StateDictType.LOCAL_STATE_DICT},
            ["state_dict_type='local' is not supported", "'sharded'"],
        ),
        ({"param_init_fn": 3}, ["got param_init_fn=3"]),
        (
            {"sync_module_states": "yes", "use_orig_params": 1},
            ["sync_module_states='yes'", "use_orig_params=1"],
        ),
        ({"ignored_modules": [3]}, ["ignored_modules to be a list of Module, got a list with int"]),
        ({"ignored_params": nn.Linear(1, 1)}, ["ignored_params to be a list of Parameter, got Linear"]),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_named_with_advice(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_arguments(**given)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_arguments(
            cpu_offload=1.5,
            sharding_strategy="ZERO9",
            device_mesh=(0, 1),
            proces_group=3,
            state_dict_type="local",
            auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=3),
        )
    assert caught.value.what.count(";") == 4


@pytest.mark.parametrize(
    ("given", "size", "nodes", "expected"),
    [
        ({}, 4, 1, None),
        ({}, 4, 2, None),
        ({"sharding_strategy": "HYBRID_SHARD"}, 4, 1, None),  # one node: one copy
        ({"sharding_strategy": "HYBRID_SHARD"}, 8, 2, (2, 4)),
        ({"sharding_strategy": "HYBRID_SHARD"}, 9, 2, "multiple of 2 nodes .*, got 9 processes"),
        ({"sharding_strategy": "NO_SHARD"}, 4, 2, (4, 1)),
        ({"sharding_strategy": "NO_SHARD"}, 1, 1, None),
        ({"device_mesh": (2, 2)}, 4, 1, (2, 2)),
        ({"device_mesh": (1, 4)}, 4, 1, None),
        ({"device_mesh": (2, 2)}, 8, 1, "for 8 processes, got 2 x 2 = 4"),
        ({"device_mesh": mesh_of(2, 2)}, 4, 1, (2, 2)),
        ({"device_mesh": mesh_of(4, names=None)}, 4, 1, None),
        ({"device_mesh": mesh_of(4, names=None)}, 2, 1, "for 2 processes, got 1 x 4 = 4"),
        ({"reshard_after_forward": 2}, 4, 1, None),
        ({"reshard_after_forward": 3}, 4, 1, "to divide the 4 processes of a copy, got reshard_after_forward=3"),
        ({"reshard_after_forward": 4, "device_mesh": (2, 2)}, 4, 1, "to divide the 2 processes of a copy"),
    ],
)
def test_the_mesh_fits_the_processes(given: dict[str, Any], size: int, nodes: int, expected: Any) -> None:
    plan = read_arguments(**given)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            check_mesh(plan, size, nodes)
    else:
        assert check_mesh(plan, size, nodes) == expected


def test_only_torchs_own_policies_are_taken_for_them() -> None:
    class CPUOffload(SimpleNamespace):
        """Of the same name, from elsewhere."""

    with pytest.raises(ConfigError, match="cpu_offload="):
        read_arguments(cpu_offload=CPUOffload(offload_params=True))
