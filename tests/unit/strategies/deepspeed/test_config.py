from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loopwright.errors import ConfigError
from loopwright.strategies import STRATEGY_REGISTRY, DeepSpeedStrategy
from loopwright.strategies.deepspeed.arguments import (
    DeepSpeedArguments,
    build,
    check_against,
    check_arguments,
    check_sections,
)
from loopwright.strategies.deepspeed.config import Facts, merged, precision_of, read, settle, stage_of, taken_over

# The example file of the chapter on distributed training.
CHAPTER: dict[str, Any] = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": 5e8,
        "reduce_bucket_size": 5e8,
    },
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
}


def test_every_argument_becomes_a_key() -> None:
    arguments = DeepSpeedArguments(
        stage=3, offload_optimizer=True, offload_parameters=True, offload_params_device="nvme",
        offload_optimizer_device="nvme", nvme_path="/disk", params_buffer_count=6, params_buffer_size=7, max_in_cpu=8,
        optimizer_buffer_count=9, block_size=10, queue_depth=11, single_submit=True, overlap_events=False,
        thread_count=12, pin_memory=True, sub_group_size=13, contiguous_gradients=False, overlap_comm=False,
        allgather_partitions=False, reduce_scatter=False, allgather_bucket_size=14, reduce_bucket_size=15,
        zero_allow_untested_optimizer=False, partition_activations=True, cpu_checkpointing=True,
        contiguous_memory_optimization=True, synchronize_checkpoint_boundary=True,
    )  # fmt: skip
    assert build(arguments) == {
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": False,
        "activation_checkpointing": {
            "partition_activations": True,
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": True,
            "synchronize_checkpoint_boundary": True,
        },
        "aio": {
            "block_size": 10,
            "queue_depth": 11,
            "single_submit": True,
            "overlap_events": False,
            "thread_count": 12,
            "intra_op_parallelism": 12,
        },
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": False,
            "overlap_comm": False,
            "allgather_partitions": False,
            "reduce_scatter": False,
            "allgather_bucket_size": 14,
            "reduce_bucket_size": 15,
            "sub_group_size": 13,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "buffer_count": 9, "pin_memory": True},
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/disk",
                "buffer_count": 6,
                "buffer_size": 7,
                "max_in_cpu": 8,
                "pin_memory": True,
            },
        },
    }
    assert stage_of(build(DeepSpeedArguments(zero_optimization=False))) == 0
    assert "offload_optimizer" not in build(DeepSpeedArguments())["zero_optimization"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"stage": 4}, "expected stage to be a ZeRO stage, got 4"),
        ({"offload_parameters": True}, "offload_parameters in ZeRO stage 2"),
        ({"stage": 0, "offload_optimizer": True}, "without ZeRO"),
        (
            {"offload_optimizer": True, "offload_optimizer_device": "disk"},
            "expected offload_optimizer_device to be 'cpu' or 'nvme', got 'disk'",
        ),
        ({"offload_optimizer": True, "offload_optimizer_device": "nvme"}, "on 'nvme' in ZeRO stage 2"),
        ({"stage": 3, "offload_parameters": True, "offload_params_device": "nvme", "nvme_path": None}, "nvme_path"),
    ],
)
def test_an_argument_that_cannot_work_is_named(arguments: dict[str, Any], what: str) -> None:
    assert what in check_arguments(DeepSpeedArguments(**arguments))[0][0]
    with pytest.raises(ConfigError, match=what):
        DeepSpeedStrategy(**arguments)


def test_what_trainer_knows_is_filled_in() -> None:
    config = settle(build(DeepSpeedArguments()), Facts(2, accumulate=4, clip=0.5, micro_batch=8, dtype="bfloat16"), "")
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.5
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["train_batch_size"] == 64
    assert config["bf16"] == {"enabled": True}
    assert "fp16" not in config
    # DeepSpeed would clip at 1.0 where nothing is written.
    assert settle({}, Facts(), "")["gradient_clipping"] == 0.0


def test_equal_values_and_auto_pass() -> None:
    facts = Facts(2, accumulate=4, clip=1.0, micro_batch=8, dtype="float16")
    assert settle(CHAPTER, facts, "")["train_micro_batch_size_per_gpu"] == 8
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    filled = settle(auto, facts, "")
    assert filled == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2},
    }
    assert auto["gradient_clipping"] == "auto"  # the user's own is not changed
    with pytest.raises(ConfigError, match=r"a value for steps_per_print, got \"auto\""):
        settle({"steps_per_print": "auto"}, facts, "")


def test_the_size_of_a_micro_batch_follows_from_that_of_the_global_batch() -> None:
    assert settle({"train_batch_size": 64}, Facts(2, accumulate=4), "")["train_micro_batch_size_per_gpu"] == 8
    with pytest.raises(ConfigError, match=r"train_batch_size +65 +64"):
        settle({"train_batch_size": 65}, Facts(2, accumulate=4), "file")


def test_different_values_are_shown_side_by_side() -> None:
    with pytest.raises(ConfigError) as raised:
        settle(CHAPTER, Facts(2, accumulate=1, clip=0.0, micro_batch=8, dtype="bfloat16"), "ds.json")
    lines = [line.split() for line in raised.value.what.splitlines()]
    assert lines[1][0] == "ds.json"
    assert lines[2:] == [
        ["gradient_accumulation_steps", "4", "1"],
        ["gradient_clipping", "1.0", "0.0"],
        ["train_batch_size", "64", "16"],
        ["fp16.enabled", "true", "false"],
    ]


def test_a_configuration_is_a_dict_a_file_or_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CHAPTER))
    assert read(CHAPTER)[0] == CHAPTER
    assert read(str(file)) == (CHAPTER, f"config={str(file)!r}")
    assert read(None, {"PL_DEEPSPEED_CONFIG_PATH": str(file)})[0] == CHAPTER
    assert read(None, {"LOOPWRIGHT_DEEPSPEED_CONFIG_PATH": str(file), "LT_DEEPSPEED_CONFIG_PATH": "x"})[0] == CHAPTER
    assert read(None, {"LT_DEEPSPEED_CONFIG_PATH": str(file), "PL_DEEPSPEED_CONFIG_PATH": "x"})[0] == CHAPTER
    assert read(None, {}) == (None, "")
    for wrong, what in ((tmp_path / "none.json", "No such file"), (3, "Expected config to be a dict or a path, got 3")):
        with pytest.raises(ConfigError, match=what):
            read(wrong)
    file.write_text("{,")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        read(file)


def test_arguments_fill_what_the_configuration_leaves_out_and_must_not_contradict_it() -> None:
    strategy = DeepSpeedStrategy(config=CHAPTER)
    assert strategy.stage == 2
    assert strategy.given_config["zero_optimization"] == CHAPTER["zero_optimization"]
    assert strategy.given_config["zero_allow_untested_optimizer"] is True
    with pytest.raises(ConfigError, match=r"zero_optimization.stage +2 +3"):
        DeepSpeedStrategy(config=CHAPTER, stage=3)
    check_against(CHAPTER, DeepSpeedArguments(pin_memory=True, offload_optimizer=True), "")
    assert merged({"a": {"b": 1}}, {"a": {"b": 2, "c": 3}, "d": 4}) == {"a": {"b": 1, "c": 3}, "d": 4}


def test_names_stand_for_stages() -> None:
    made: dict[str, Any] = {
        name: STRATEGY_REGISTRY.create(name) for name in STRATEGY_REGISTRY.names() if name.startswith("deepspeed")
    }
    assert {name: one.stage for name, one in made.items()} == {
        "deepspeed": 2,
        "deepspeed_stage_1": 1,
        "deepspeed_stage_1_offload": 1,
        "deepspeed_stage_2": 2,
        "deepspeed_stage_2_offload": 2,
        "deepspeed_stage_3": 3,
        "deepspeed_stage_3_offload": 3,
        "deepspeed_stage_3_offload_nvme": 3,
    }
    zero = made["deepspeed_stage_3_offload_nvme"].given_config["zero_optimization"]
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "nvme"
    assert made["deepspeed_stage_2_offload"].given_config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "offload_param" not in made["deepspeed_stage_2_offload"].given_config["zero_optimization"]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"zero_optimisation": {"stage": 3}}, "'zero_optimisation' is not a key"),
        ({"optimizer": "AdamW"}, "optimizer: expected an object, got 'AdamW'"),
        ({"zero_optimization": {"stage": 5}}, "stage to be a ZeRO stage, got 5"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param in ZeRO stage 2"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "on 'nvme' in ZeRO stage 2"),
        ({"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype is 'fp32'"),
        ({"tensor_parallel": {"autotp_size": 2}}, r"autotp_size \(tp\) to be 1, got 2"),
        ({"sequence_parallel_size": 2}, r"sequence_parallel_size \(cp\) to be 1, got 2"),
    ],
)
def test_what_deepspeed_would_pass_over_is_refused(config: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        DeepSpeedStrategy(config=config)
    assert check_sections({"zero_optimization": None, "my_own": 1, "bf16": {}}, "") == []


def test_arguments_of_zero_count_beside_a_configuration() -> None:
    strategy = DeepSpeedStrategy(
        config={"zero_optimization": {"stage": 3, "overlap_comm": False}}, offload_optimizer=True
    )
    zero = strategy.given_config["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"], zero["offload_optimizer"]["device"]) == (3, False, "cpu")
    assert DeepSpeedStrategy(config={"zero_optimization": {"overlap_comm": False}}, stage=3).stage == 3
    assert DeepSpeedStrategy(config={"zero_optimization": {"stage": "auto"}}, stage=1).stage == 1
    assert DeepSpeedStrategy(config={"zero_optimization": None}).stage == 2
    assert DeepSpeedStrategy(config={"zero_optimization": True}).stage == 1


def test_a_global_batch_of_the_trainer_and_one_of_the_configuration_must_be_equal() -> None:
    facts = Facts(world_size=2, accumulate=4, micro_batch=8, global_batch=64)
    assert settle({"train_batch_size": 64}, facts, "here")["gradient_accumulation_steps"] == 4
    assert settle({}, facts, "here")["train_batch_size"] == 64
    with pytest.raises(ConfigError, match=r"train_batch_size +32 +64"):
        settle({"train_batch_size": 32}, Facts(world_size=2, global_batch=64), "here")


def test_a_configuration_that_wins_gives_accumulation_clipping_and_precision() -> None:
    facts = Facts(world_size=2, accumulate=1, clip=0.0, micro_batch=8, dtype="float32")
    taken = taken_over({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}, facts)
    assert (taken.accumulate, taken.clip) == (4, 0.5)
    assert taken_over({"train_batch_size": 64}, facts).accumulate == 4
    assert taken_over({"train_batch_size": 60, "gradient_clipping": "auto"}, facts) == facts
    by_hand = Facts(world_size=2)
    assert taken_over({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}, by_hand) == by_hand
    decided = Facts(accumulate=2, global_batch=64, clip=0.0)
    assert taken_over({"gradient_accumulation_steps": 4}, decided).accumulate == 2
    assert precision_of({"bf16": {"enabled": True}}, "32-true") == "bf16-mixed"
    assert precision_of({"fp16": {"enabled": True}}, "bf16-true") == "16-true"
    assert precision_of({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}, "32-true") == "32-true"


@pytest.mark.parametrize(("key", "value"), [("gradient_accumulation_steps", 0), ("gradient_clipping", -1.0)])
def test_values_out_of_range_are_not_taken_over(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"Expected {key} of at least"):
        taken_over({key: value}, Facts(accumulate=1, clip=0.0))
