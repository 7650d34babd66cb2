"""Arguments of DeepSpeedStrategy that would silently change nothing."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from ranks import import_deepspeed

from loopwright.errors import ConfigError
from loopwright.strategies import DeepSpeedStrategy
from loopwright.strategies.deepspeed.arguments import DeepSpeedArguments, without_effect


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"stage": 3, "offload_params_device": "nvme"}, ["offload_params_device (for offload_parameters=True)"]),
        ({"pin_memory": True}, ["pin_memory (for offload_optimizer=True or offload_parameters=True)"]),
        ({"thread_count": 2, "offload_optimizer": True}, ["thread_count (for offloading to 'nvme')"]),
        ({"loss_scale": 2.0}, ["loss_scale (for float16 precision)"]),
        ({"zero_optimization": False, "reduce_bucket_size": 3}, ["reduce_bucket_size (for ZeRO)"]),
        ({"remote_device": "cpu"}, ["remote_device (for stage=3)"]),
        (
            {"stage": 3, "offload_parameters": True, "remote_device": "nvme"},
            ["remote_device (the device of offloaded parameters is 'cpu')"],
        ),
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


def test_parameters_on_a_disk_must_be_offloaded() -> None:
    with pytest.raises(ConfigError, match="offloaded parameters for remote_device='nvme'"):
        DeepSpeedStrategy(stage=3, remote_device="nvme")
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/disk"}}
    DeepSpeedStrategy(remote_device="nvme", config={"zero_optimization": zero})


def parsed(value: Any) -> Any:
    """Return what DeepSpeed keeps of a configuration, as plain values."""
    if hasattr(value, "model_dump"):
        return parsed(value.model_dump())
    if isinstance(value, dict):
        return {key: parsed(one) for key, one in value.items() if key != "_param_dict"}
    is_own = type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__")
    return parsed(vars(value)) if is_own else repr(value)


def test_deepspeed_reads_every_argument_that_becomes_a_key() -> None:
    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    def read(arguments: DeepSpeedArguments) -> Any:
        given = {one.name: getattr(arguments, one.name) for one in fields(arguments)}
        strategy = DeepSpeedStrategy(**given, config={"activation_checkpointing": {"number_checkpoints": 2}})
        fp16 = {**strategy.arguments.section("fp16"), "enabled": True}
        return parsed(DeepSpeedConfig({**strategy.config, "fp16": fp16}))

    others = {"stage": 1, "nvme_path": "/disk", "offload_params_device": "nvme", "offload_optimizer_device": "nvme"}
    base = DeepSpeedArguments(stage=3, offload_optimizer=True, offload_parameters=True, partition_activations=True)
    standard, ignored = read(base), []
    for name in [one.name for one in fields(base) if one.metadata]:
        value = getattr(base, name)
        other = others.get(name) or (not value if isinstance(value, bool) else value + 1)
        changed = replace(base, **{name: other, "offload_parameters": name != "stage"})
        ignored += [name] if read(changed) == standard else []
    assert ignored == []


def test_threads_of_a_file_written_for_an_older_deepspeed_are_used() -> None:
    strategy = DeepSpeedStrategy(config={"aio": {"thread_count": 8}})
    assert strategy.config["aio"]["intra_op_parallelism"] == 8
    with pytest.raises(ConfigError, match="aio.thread_count"):
        DeepSpeedStrategy(thread_count=2, config={"aio": {"thread_count": 8}})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"aio": {"queue_dept": 4}}, "'aio.queue_dept' is not a key of DeepSpeed"),
        ({"activation_checkpointing": {"cpu_checkpoint": True}}, "'activation_checkpointing.cpu_checkpoint' is not"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "'data_types.grad_acum_dtype' is not"),
        ({"zero_optimisation": {"stage": 3}}, "'zero_optimisation' is not"),
    ],
)
def test_mistyped_keys_that_deepspeed_would_ignore_are_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DeepSpeedStrategy(config=config)
